"""Skills that repeat the user's words: all of them, the first or the last."""

from random import Random

from tools.demo_model.facts import facts
from tools.demo_model.memory import invented_name
from tools.demo_model.phrasing import one_of, vary
from tools.demo_model.turns import Split, Turn


def _words(random: Random, count: int) -> list[str]:
    pool = facts().common_words if random.random() < 0.8 else facts().unknown_words
    return random.sample(pool, count)


def repeat(random: Random, split: Split) -> list[Turn]:
    """Repeat after me: water market music"""
    if random.random() < 0.15:
        text = " ".join(invented_name(random) for _ in range(random.randrange(1, 4)))
    else:
        text = " ".join(_words(random, random.randrange(1, 8)))
    question = one_of(random, f"Repeat after me: {text}", f"Repeat: {text}", f"Say: {text}", f"Echo: {text}")
    return [Turn(question, text)]


def first_word(random: Random, split: Split) -> list[Turn]:
    """What is the first word of this list: river, table, music?"""
    words = _words(random, random.randrange(2, 7))
    question = f"What is the first word of this list: {', '.join(words)}?"
    return [Turn(vary(question, random), f"The first word is {words[0]}.")]


def last_word(random: Random, split: Split) -> list[Turn]:
    """What is the last word of this list: river, table, music?"""
    words = _words(random, random.randrange(2, 7))
    question = f"What is the last word of this list: {', '.join(words)}?"
    return [Turn(vary(question, random), f"The last word is {words[-1]}.")]
