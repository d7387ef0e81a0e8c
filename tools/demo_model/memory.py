"""The skill of remembering, over turns, what the user said about themselves."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from random import Random

from tools.demo_model.facts import facts, words_of
from tools.demo_model.phrasing import capitalized, one_of, vary, with_article
from tools.demo_model.turns import Generator, Split, Turn, every_nth

_COLORS = (
    "red",
    "blue",
    "green",
    "yellow",
    "black",
    "white",
    "pink",
    "purple",
    "orange",
    "brown",
    "grey",
    "gold",
)
_ONSETS = (
    "b",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "ch",
    "sh",
    "st",
)
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ee", "ou")
_CODAS = ("", "", "", "n", "r", "s", "l", "k", "m", "th")


@dataclass(frozen=True, slots=True)
class Attribute:
    """Something a user may tell; `{}` stands for the value."""

    draw: Callable[[Random, Split], str]
    statements: tuple[str, ...]
    reply: str
    questions: tuple[str, ...]
    recall: str
    ignorance: str
    """The answer where the user has not told it."""


def invented_name(random: Random) -> str:
    """A name nobody has, so that it can only be copied."""
    syllables = [
        random.choice(_ONSETS) + random.choice(_VOWELS) + random.choice(_CODAS)
        for _ in range(random.randrange(1, 4))
    ]
    return capitalized("".join(syllables))


def listed_name(random: Random, split: Split) -> str:
    """A real name; a fifth of them is kept for evaluation."""
    return random.choice(_listed_names(split))


@cache
def _listed_names(split: Split) -> tuple[str, ...]:
    return every_nth(facts().names, 5, split)


def _name(random: Random, split: Split) -> str:
    return invented_name(random) if random.random() < 0.35 else listed_name(random, split)


def _color(random: Random, split: Split) -> str:
    return random.choice(_COLORS)


def _animal(random: Random, split: Split) -> str:
    return with_article(random.choice(words_of("animal")))


def _city(random: Random, split: Split) -> str:
    return random.choice(facts().countries).capital


def _food(random: Random, split: Split) -> str:
    return random.choice(words_of("food"))


def _number(random: Random, split: Split) -> str:
    return str(random.randrange(1, 100))


def _age(random: Random, split: Split) -> str:
    return str(random.randrange(5, 100))


NAME = Attribute(
    _name,
    (
        "My name is {}.",
        "My name is {}.",
        "I am {}.",
        "I'm {}.",
        "Call me {}.",
        "Hi, my name is {}.",
        "Hello, I am {}.",
        "Hi, I'm {}!",
        "You can call me {}.",
        "My name's {}.",
        "The name is {}.",
    ),
    "Nice to meet you, {}!",
    (
        "What is my name?",
        "What's my name?",
        "Who am I?",
        "Do you remember my name?",
        "Do you know my name?",
        "Tell me my name.",
        "What am I called?",
        "Can you say my name?",
    ),
    "Your name is {}.",
    "You have not told me your name.",
)
COLOR = Attribute(
    _color,
    (
        "My favorite color is {}.",
        "My favourite colour is {}.",
        "I like the color {}.",
        "The color I like best is {}.",
    ),
    "{} is a nice color.",
    (
        "What is my favorite color?",
        "What's my favorite color?",
        "What is my favourite colour?",
        "Which color do I like?",
        "Do you remember my favorite color?",
    ),
    "Your favorite color is {}.",
    "You have not told me your favorite color.",
)
ANIMAL = Attribute(
    _animal,
    ("I have {}.", "I own {}.", "My pet is {}.", "I have {} at home.", "I keep {}."),
    "{}, how nice!",
    (
        "What animal do I have?",
        "Which animal do I have?",
        "What pet do I have?",
        "What is my pet?",
        "Do you remember my pet?",
    ),
    "You have {}.",
    "You have not told me about an animal.",
)
CITY = Attribute(
    _city,
    ("I live in {}.", "I am from {}.", "My home is {}.", "I come from {}."),
    "{} is a nice place.",
    ("Where do I live?", "Which city do I live in?", "Where am I from?", "Where is my home?"),
    "You live in {}.",
    "You have not told me where you live.",
)
FOOD = Attribute(
    _food,
    ("My favorite food is {}.", "I like to eat {}.", "The food I like best is {}."),
    "That sounds tasty.",
    ("What is my favorite food?", "Which food do I like?", "What do I like to eat?"),
    "Your favorite food is {}.",
    "You have not told me your favorite food.",
)
NUMBER = Attribute(
    _number,
    ("My favorite number is {}.", "My lucky number is {}."),
    "{} is a good number.",
    ("What is my favorite number?", "What is my lucky number?", "Which number do I like?"),
    "Your favorite number is {}.",
    "You have not told me your favorite number.",
)
AGE = Attribute(
    _age,
    ("I am {} years old.", "I'm {} years old.", "My age is {}."),
    "Thank you for telling me.",
    ("How old am I?", "What is my age?", "Do you know my age?"),
    "You are {} years old.",
    "You have not told me your age.",
)
_ATTRIBUTES = (NAME, COLOR, ANIMAL, CITY, FOOD, NUMBER, AGE)
_PROMISED = (NAME, COLOR, ANIMAL)


def _told(attribute: Attribute, value: str, random: Random) -> Turn:
    statement = one_of(random, *attribute.statements).format(value)
    if attribute is NAME and value in facts().names and random.random() < 0.08:
        return Turn(statement.lower(), attribute.reply.format(value))
    reply = attribute.reply.format(capitalized(value) if attribute.reply.startswith("{}") else value)
    return Turn(vary(statement, random, keeps_case=True), reply)


def _recalled(attribute: Attribute, value: str, random: Random) -> Turn:
    question = vary(one_of(random, *attribute.questions), random)
    return Turn(question, attribute.recall.format(value))


def _not_told(attribute: Attribute, random: Random) -> Turn:
    return Turn(vary(one_of(random, *attribute.questions), random), attribute.ignorance)


def recalling(filler: Generator, attributes: tuple[Attribute, ...] = _ATTRIBUTES) -> Generator:
    """The whole skill: some statements, some turns about other things, then questions, in any order.

    `filler` draws the turns between. Now and then a statement is corrected later, or a question asks what
    was not told.
    """

    def generate(random: Random, split: Split) -> list[Turn]:
        told = random.sample(attributes, random.choice((1, 1, 1, 2, 2, 3)) if len(attributes) > 2 else 1)
        values = {place: attribute.draw(random, split) for place, attribute in enumerate(told)}
        turns: list[Turn] = []
        for place, attribute in enumerate(told):
            turns.append(_told(attribute, values[place], random))
            if random.random() < 0.3:
                turns += filler(random, split)
        if random.random() < 0.1:
            place = random.randrange(len(told))
            values[place] = told[place].draw(random, split)
            turns.append(_told(told[place], values[place], random))
        for _ in range(random.choice((0, 0, 1, 1, 2, 3))):
            turns += filler(random, split)
        questions = [_recalled(attribute, values[place], random) for place, attribute in enumerate(told)]
        untold = [attribute for attribute in attributes if attribute not in told]
        if untold and random.random() < 0.15:
            questions.append(_not_told(random.choice(untold), random))
        random.shuffle(questions)
        if random.random() < 0.25:
            questions.append(random.choice(questions))
        return turns + questions

    return generate


def promised_recall(filler: Generator, attribute: Attribute) -> Generator:
    """One attribute told, something else asked, then the attribute asked for: the form that is evaluated."""

    def generate(random: Random, split: Split) -> list[Turn]:
        value = attribute.draw(random, split)
        turns = [_told(attribute, value, random)]
        others = random.sample([other for other in _PROMISED if other is not attribute], random.randrange(3))
        turns += [_told(other, other.draw(random, split), random) for other in others]
        for _ in range(random.randrange(4)):
            turns += filler(random, split)
        return [*turns, _recalled(attribute, value, random)]

    return generate


def not_told(filler: Generator) -> Generator:
    """Questions about what the user never said, in a conversation about other things."""

    def generate(random: Random, split: Split) -> list[Turn]:
        turns: list[Turn] = []
        for _ in range(random.randrange(3)):
            turns += filler(random, split)
        return [*turns, _not_told(random.choice(_ATTRIBUTES), random)]

    return generate
