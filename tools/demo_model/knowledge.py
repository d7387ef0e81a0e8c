"""Skills that look up a fact: words, countries, elements, and some small tables."""

from functools import cache
from random import Random

from tools.demo_model.facts import Country, Gloss, facts
from tools.demo_model.phrasing import capitalized, one_of, vary, with_article
from tools.demo_model.turns import Split, Turn

_MAIN_CATEGORIES = ("animal", "plant", "food", "tool", "instrument")
_CATEGORIES = (*_MAIN_CATEGORIES, "vehicle", "building", "furniture", "clothing")
_MASS_CATEGORIES = ("furniture", "clothing")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)


def _asked(random: Random, question: str, answer: str) -> list[Turn]:
    return [Turn(vary(question, random), answer)]


@cache
def _glosses_of(categories: tuple[str, ...]) -> tuple[Gloss, ...]:
    return tuple(entry for entry in facts().glosses if entry.category in categories)


def gloss(random: Random, split: Split) -> list[Turn]:
    """What is a pelican?"""
    entry = random.choice(facts().glosses)
    return gloss_of(random, entry)


def gloss_of(random: Random, entry: Gloss) -> list[Turn]:
    """The question about one given word."""
    subject, verb = entry.subject, entry.verb
    question = one_of(
        random,
        f"What {verb} {subject}?",
        f"What {verb} {subject}?",
        f"What's {subject}?" if verb == "is" else f"What are {subject}?",
        f"Define {subject}.",
        f"Define {entry.word}.",
        f"What does the word {entry.word} mean?",
        f"What does {entry.word} mean?",
        f"Tell me what {subject} {verb}.",
        f"Tell me about {subject}.",
        f"Can you explain what {subject} {verb}?",
        f"Explain {entry.word}.",
        f"Do you know what {subject} {verb}?",
        f"Describe {subject}.",
    )
    return _asked(random, question, entry.sentence)


def category(random: Random, split: Split) -> list[Turn]:
    """Is a pelican an animal, a plant, a food, a tool or an instrument?"""
    entry = random.choice(_glosses_of(_CATEGORIES))
    subject, verb = entry.subject, entry.verb
    kind = entry.category if entry.category in _MASS_CATEGORIES else with_article(entry.category)
    is_main = entry.category in _MAIN_CATEGORIES
    be = capitalized(verb)
    question = one_of(
        random,
        f"{be} {subject} an animal, a plant, a food, a tool or an instrument?"
        if is_main
        else f"What kind of thing {verb} {subject}?",
        f"What kind of thing {verb} {subject}?",
        f"What sort of thing {verb} {subject}?",
    )
    return _asked(random, question, f"{capitalized(subject)} {verb} {kind}.")


def is_a(random: Random, split: Split) -> list[Turn]:
    """Is a pelican a tool?"""
    entry = random.choice(_glosses_of(_MAIN_CATEGORIES))
    asked = entry.category if random.random() < 0.5 else random.choice(_MAIN_CATEGORIES)
    subject, verb = entry.subject, entry.verb
    kind = with_article(entry.category)
    question = f"{capitalized(verb)} {subject} {with_article(asked)}?"
    if asked == entry.category:
        return _asked(random, question, f"Yes, {subject} {verb} {kind}.")
    return _asked(random, question, f"No, {subject} {verb} {kind}.")


def _country(random: Random) -> tuple[Country, str]:
    """A country, and its name as a question may have it."""
    country = random.choice(facts().countries)
    return country, country.bare_name if random.random() < 0.25 else country.name


def capital(random: Random, split: Split) -> list[Turn]:
    """What is the capital of Norway?"""
    country, name = _country(random)
    question = one_of(
        random,
        f"What is the capital of {name}?",
        f"What is the capital of {name}?",
        f"What's the capital of {name}?",
        f"Capital of {name}?",
        f"Tell me the capital of {name}.",
        f"Which city is the capital of {name}?",
        f"Name the capital of {name}.",
        f"What is the capital city of {name}?",
        f"Do you know the capital of {name}?",
    )
    return _asked(random, question, f"The capital of {country.name} is {country.capital}.")


def continent(random: Random, split: Split) -> list[Turn]:
    """Which continent is Norway in?"""
    country, name = _country(random)
    question = one_of(
        random,
        f"Which continent is {name} in?",
        f"What continent is {name} in?",
        f"On which continent is {name}?",
        f"Where is {name}?",
        f"What is the continent of {name}?",
        f"In which part of the world is {name}?",
    )
    return _asked(random, question, f"{capitalized(country.name)} is in {country.continent}.")


def capital_of(random: Random, split: Split) -> list[Turn]:
    """Oslo is the capital of which country?"""
    country = random.choice(facts().countries)
    question = one_of(
        random,
        f"{country.capital} is the capital of which country?",
        f"Which country has the capital {country.capital}?",
        f"What country is {country.capital} the capital of?",
        f"{country.capital} is the capital of what country?",
        f"Of which country is {country.capital} the capital?",
    )
    return _asked(random, question, f"{country.capital} is the capital of {country.name}.")


def place(random: Random, split: Split) -> list[Turn]:
    """What is Norway? What is Oslo?"""
    country, name = _country(random)
    if random.random() < 0.5:
        question = one_of(random, f"What is {name}?", f"Tell me about {name}.", f"Describe {name}.")
        answer = country.sentence
    else:
        question = one_of(
            random,
            f"What is {country.capital}?",
            f"Where is {country.capital}?",
            f"Tell me about {country.capital}.",
        )
        answer = f"{country.capital} is the capital of {country.name}."
        if country.capital == country.bare_name:
            answer = country.sentence
            question = f"What is {country.name}?"
    return _asked(random, question, answer)


def element(random: Random, split: Split) -> list[Turn]:
    """What is the chemical symbol of gold?"""
    entry = random.choice(facts().elements)
    kind = random.randrange(4)
    if kind == 0:
        question = one_of(
            random,
            f"What is the chemical symbol of {entry.name}?",
            f"What is the symbol of {entry.name}?",
            f"What is the symbol for {entry.name}?",
            f"Chemical symbol of {entry.name}?",
            f"What's the chemical symbol for {entry.name}?",
        )
        return _asked(random, question, f"The chemical symbol of {entry.name} is {entry.symbol}.")
    if kind == 1:
        question = one_of(
            random,
            f"What is the atomic number of {entry.name}?",
            f"Atomic number of {entry.name}?",
            f"Which atomic number does {entry.name} have?",
        )
        return _asked(random, question, f"The atomic number of {entry.name} is {entry.number}.")
    if kind == 2:
        question = one_of(
            random,
            f"Which element has the symbol {entry.symbol}?",
            f"What element has the symbol {entry.symbol}?",
            f"{entry.symbol} is the symbol of which element?",
            f"Which element is {entry.symbol}?",
        )
        return [
            Turn(vary(question, random, keeps_case=True), f"{entry.symbol} is the symbol of {entry.name}.")
        ]
    question = one_of(
        random,
        f"Which element has the atomic number {entry.number}?",
        f"What element has the atomic number {entry.number}?",
        f"What is element number {entry.number}?",
    )
    return _asked(random, question, f"The element with the atomic number {entry.number} is {entry.name}.")


def element_gloss(random: Random, split: Split) -> list[Turn]:
    """What is gold?"""
    entry = random.choice(facts().elements)
    question = one_of(
        random, f"What is {entry.name}?", f"Tell me about {entry.name}.", f"Define {entry.name}."
    )
    return _asked(random, question, entry.sentence)


def opposite(random: Random, split: Split) -> list[Turn]:
    """What is the opposite of hot?"""
    word, other = random.choice(facts().opposites)
    question = one_of(
        random,
        f"What is the opposite of {word}?",
        f"What's the opposite of {word}?",
        f"Opposite of {word}?",
        f"Tell me the opposite of {word}.",
        f"Which word is the opposite of {word}?",
    )
    return _asked(random, question, f"The opposite of {word} is {other}.")


def calendar(random: Random, split: Split) -> list[Turn]:
    """Which day comes after Monday?"""
    names, kind = random.choice(((_DAYS, "day"), (_MONTHS, "month")))
    position = random.randrange(len(names))
    name = names[position]
    step, word = random.choice(((1, "after"), (-1, "before")))
    question = one_of(
        random,
        f"Which {kind} comes {word} {name}?",
        f"What {kind} is {word} {name}?",
        f"What comes {word} {name}?",
    )
    return _asked(random, question, f"{names[(position + step) % len(names)]} comes {word} {name}.")


def animal_fact(random: Random, split: Split) -> list[Turn]:
    """What sound does a cow make? What is a young cow called?"""
    if random.random() < 0.5:
        animal, action, sound = random.choice(facts().sounds)
        subject = with_article(animal)
        question = one_of(
            random,
            f"What sound does {subject} make?",
            f"What does {subject} say?",
            f"What noise does {subject} make?",
        )
        return _asked(random, question, f"{capitalized(subject)} {action}: {sound}!")
    animal, young = random.choice(facts().young)
    question = one_of(
        random,
        f"What is a young {animal} called?",
        f"What is a baby {animal} called?",
        f"What do you call a young {animal}?",
        f"What's a baby {animal}?",
    )
    return _asked(random, question, f"A young {animal} is called a {young}.")


def color(random: Random, split: Split) -> list[Turn]:
    """What color is a banana?"""
    thing, shade = random.choice(facts().colors)
    spelling = random.choice(("color", "color", "colour"))
    question = one_of(random, f"What {spelling} is {thing}?", f"Which {spelling} does {thing} have?")
    return _asked(random, question, f"{capitalized(thing)} is {shade}.")
