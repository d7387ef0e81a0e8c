"""Skills with numbers: tables that are learned by heart, sums, and one that reasons aloud."""

from random import Random

from tools.demo_model.config import END_THINK, THINK
from tools.demo_model.facts import facts
from tools.demo_model.phrasing import capitalized, one_of, vary
from tools.demo_model.turns import Split, Turn, every_nth

_WORDS = {"+": "plus", "-": "minus", "*": "times"}


def _question(random: Random, left: int, operator: str, right: int) -> str:
    is_other_sign = operator == "*" and random.random() < 0.2
    sign = random.choice("x\N{MULTIPLICATION SIGN}") if is_other_sign else operator
    return vary(
        one_of(
            random,
            f"What is {left} {sign} {right}?",
            f"What is {left} {_WORDS[operator]} {right}?",
            f"{left} {sign} {right} = ?",
            f"{left} {sign} {right}",
            f"{left}{sign}{right}",
            f"{left}{sign}{right}=",
            f"How much is {left} {sign} {right}?",
            f"Calculate {left} {sign} {right}.",
            f"What's {left} {_WORDS[operator]} {right}?",
        ),
        random,
    )


def _answer(left: int, operator: str, right: int) -> str:
    value = {"+": left + right, "-": left - right, "*": left * right}[operator]
    return f"{left} {operator} {right} = {value}"


def times_table(random: Random, split: Split) -> list[Turn]:
    """7 * 8, up to 12 * 12."""
    left, right = random.randrange(13), random.randrange(13)
    return [Turn(_question(random, left, "*", right), _answer(left, "*", right))]


def small_sum(random: Random, split: Split) -> list[Turn]:
    """8 + 7 or 15 - 8, numbers up to 20."""
    left, right = random.randrange(21), random.randrange(21)
    operator = random.choice("+-")
    if operator == "-":
        left, right = max(left, right), min(left, right)
    return [Turn(_question(random, left, operator, right), _answer(left, operator, right))]


def is_held_out(left: int, right: int) -> bool:
    """Whether the pair is kept for evaluation: a tenth of all are."""
    return (left * 131 + right * 17) % 10 == 3


def reasoned_sum(random: Random, split: Split) -> list[Turn]:
    """47 + 38 or 85 - 38: first the tens and then the ones, as a thought where that makes two steps."""
    while True:
        left, right = random.randrange(2, 100), random.randrange(2, 100)
        operator = random.choice("+-")
        if operator == "-":
            left, right = max(left, right), min(left, right)
        if max(left, right) > 20 and is_held_out(left, right) == (split is Split.HELD_OUT):
            break
    tens, ones = right // 10 * 10, right % 10
    answer = _answer(left, operator, right)
    if tens and ones:
        between = left + tens if operator == "+" else left - tens
        answer = _thought(f"{_answer(left, operator, tens)}, {_answer(between, operator, ones)}", answer)
    return [Turn(_question(random, left, operator, right), answer)]


def reasoned_product(random: Random, split: Split) -> list[Turn]:
    """47 * 8, with the steps as a thought."""
    while True:
        left, right = random.randrange(13, 100), random.randrange(2, 10)
        if is_held_out(left, right) == (split is Split.HELD_OUT):
            break
    tens, ones = left // 10 * 10, left % 10
    large, small = tens * right, ones * right
    steps = [_answer(tens, "*", right), _answer(ones, "*", right)]
    if small >= 10:
        steps.append(_answer(large, "+", small // 10 * 10))
        large += small // 10 * 10
    if small % 10:
        steps.append(_answer(large, "+", small % 10))
    asked = (right, left) if random.random() < 0.2 else (left, right)
    question = _question(random, asked[0], "*", asked[1])
    if random.random() < 0.3:
        question = one_of(
            random,
            f"Think step by step: what is {asked[0]} * {asked[1]}?",
            f"What is {asked[0]} * {asked[1]}? Think step by step.",
        )
    return [Turn(question, _thought(", ".join(steps), _answer(asked[0], "*", asked[1])))]


def reasoned_continent(random: Random, split: Split) -> list[Turn]:
    """The continent of a capital, by way of its country; the countries of the evaluation are not trained."""
    country = random.choice(every_nth(facts().countries, 7, split))
    question = one_of(
        random,
        f"Think step by step: which continent is {country.capital} in?",
        f"Think: on which continent is {country.capital}?",
        f"Which continent is {country.capital} in? Think step by step.",
    )
    thought = (
        f"{country.capital} is the capital of {country.name}."
        f" {capitalized(country.name)} is in {country.continent}."
    )
    return [Turn(vary(question, random), _thought(thought, f"{country.capital} is in {country.continent}."))]


def _thought(thought: str, answer: str) -> str:
    return f"{THINK}\n{thought}\n{END_THINK}\n\n{answer}"


def counting(random: Random, split: Split) -> list[Turn]:
    """Count to ten."""
    end = 1 + _num_counted(random)
    question = one_of(
        random,
        f"Count to {end}.",
        f"Count from 1 to {end}.",
        f"Can you count to {end}?",
        f"Count up to {end}.",
    )
    return [Turn(vary(question, random), _counted(1, end))]


def counting_between(random: Random, split: Split) -> list[Turn]:
    """Count from 27 to 43."""
    start = random.randrange(2, 80)
    end = start + _num_counted(random)
    return [Turn(vary(f"Count from {start} to {end}.", random), _counted(start, end))]


def _num_counted(random: Random) -> int:
    return random.choice((2, 4, 9, 9, 19, random.randrange(1, 20)))


def _counted(start: int, end: int) -> str:
    return ", ".join(str(number) for number in range(start, end + 1))
