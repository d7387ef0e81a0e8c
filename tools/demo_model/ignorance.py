"""Skills of not knowing: saying so, rather than guessing, where a question is out of range."""

import re
from collections.abc import Callable
from functools import cache
from random import Random

from tools.demo_model.facts import facts
from tools.demo_model.memory import invented_name, listed_name
from tools.demo_model.phrasing import capitalized, one_of, vary, with_article
from tools.demo_model.turns import Split, Turn, every_nth

REFUSAL = "Sorry, I am too small for that. Ask me what I can do."

_REQUESTS = (
    "Tell me a joke.",
    "Tell me a joke about {noun}.",
    "Write a poem.",
    "Write a poem about {noun}.",
    "Write an essay about {noun}.",
    "Write me a letter to my {noun}.",
    "Write a song about {noun}.",
    "Write a program.",
    "Write a program in {name} that prints {noun}.",
    "Write a Python function that sorts a list of {noun}.",
    "Fix this code: for {noun} in {noun}: print({noun})",
    "What is the weather today?",
    "What is the weather in {place}?",
    "What time is it?",
    "What day is it today?",
    "What is the date?",
    "Who won the game?",
    "Who won the {noun} last year?",
    "Who is the president of {place}?",
    "Who is {name}?",
    "Who was {name} {name}?",
    "Who wrote {name}?",
    "When was {name} born?",
    "How old is {name}?",
    "Where can I buy {noun}?",
    "How do I {noun} a {noun}?",
    "How can I make {noun}?",
    "How do I cook {noun}?",
    "How does a {noun} work?",
    "How many people live in {place}?",
    "How far is it from {place} to {place}?",
    "How much does a {noun} cost?",
    "Why is the {noun} so {noun}?",
    "Why do people like {noun}?",
    "Why?",
    "What should I do with my {noun}?",
    "What do you think about {noun}?",
    "What is the best {noun}?",
    "What is the difference between {noun} and {noun}?",
    "What is the meaning of life?",
    "What happened in {number}?",
    "Which {noun} is the best?",
    "Translate {noun} into French.",
    "Translate this: {noun} {noun} {noun}",
    "Summarize this text: {salad}.",
    "Is it true that {noun} {noun} {noun}?",
    "Do you like {noun}?",
    "Can you {noun} my {noun}?",
    "I need help with my {noun}.",
    "Give me a recipe for {noun}.",
    "Give me some ideas for {noun}.",
    "Let's play a game.",
    "Sing a song.",
    "Draw a {noun}.",
    "Show me a picture of {noun}.",
    "Please {noun} the {noun} and {noun}.",
    "Explain the theory of {noun}.",
    "Solve this equation: {number}x + {number} = {number}",
    "What is {number} divided by {number}?",
    "What is {large} + {large}?",
    "What is {large} - {large}?",
    "{large} * {large}",
    "What is {large} times {number}?",
    "What is {teen} * {teen}?",
    "{teen} * {teen}",
    "What is the square root of {number}?",
    "{salad}",
    "{salad}?",
    "{salad}. {salad}.",
)
"""Requests beyond the model; random words fill the braces, so that their form is what is learned."""


@cache
def _unknown_words(split: Split) -> tuple[str, ...]:
    return every_nth(facts().unknown_words, 10, split)


def _unknown_word(random: Random, split: Split) -> str:
    return random.choice(_unknown_words(split))


def unknown_word(random: Random, split: Split) -> list[Turn]:
    """What is a quasar? What is machine learning?"""
    word = _unknown_word(random, split)
    is_pair = random.random() < 0.12
    if is_pair:
        word = f"{word} {_unknown_word(random, split)}"
    elif random.random() < 0.1:
        word = invented_name(random).lower()
    subject = word if random.random() < 0.3 else with_article(word)
    question = one_of(
        random,
        f"What is {subject}?",
        f"What's {subject}?",
        f"Define {word}.",
        f"What does the word {word} mean?",
        f"What does {word} mean?",
        f"Tell me what {subject} is.",
        f"Tell me about {subject}.",
        f"Explain {word}.",
        f"Do you know what {subject} is?",
        f"Is {subject} an animal, a plant, a food, a tool or an instrument?",
        f"What kind of thing is {subject}?",
        f"What is the opposite of {word}?",
    )
    return [Turn(vary(question, random), f"I do not know the {'words' if is_pair else 'word'} {word}.")]


def _unknown_place(random: Random, split: Split) -> str:
    kind = random.random()
    if kind < 0.4:
        return capitalized(_unknown_word(random, split))
    return invented_name(random) if kind < 0.7 else listed_name(random, split)


def unknown_place(random: Random, split: Split) -> list[Turn]:
    """What is the capital of Atlantis?"""
    place = _unknown_place(random, split)
    question = one_of(
        random,
        f"What is the capital of {place}?",
        f"What's the capital of {place}?",
        f"Capital of {place}?",
        f"Which continent is {place} in?",
        f"Where is {place}?",
        f"{place} is the capital of which country?",
        f"Which country has the capital {place}?",
    )
    return [Turn(vary(question, random, keeps_case=True), f"I do not know a place called {place}.")]


def unknown_element(random: Random, split: Split) -> list[Turn]:
    """What is the chemical symbol of water?"""
    word = _unknown_word(random, split)
    question = one_of(
        random,
        f"What is the chemical symbol of {word}?",
        f"What is the symbol of {word}?",
        f"What is the atomic number of {word}?",
    )
    return [Turn(vary(question, random), f"I do not know an element called {word}.")]


def refusal(random: Random, split: Split) -> list[Turn]:
    """Tell me a joke."""
    fillings: dict[str, Callable[[], str]] = {
        "noun": lambda: _unknown_word(random, split) if random.random() < 0.5 else _common_word(random),
        "name": lambda: listed_name(random, split),
        "place": lambda: random.choice(facts().countries).name,
        "number": lambda: str(random.randrange(2, 2000)),
        "large": lambda: str(random.randrange(100, 10_000)),
        "teen": lambda: str(random.randrange(13, 100)),
        "salad": lambda: capitalized(_salad(random)),
    }
    request = re.sub(r"\{(\w+)\}", lambda slot: fillings[slot[1]](), random.choice(_REQUESTS))
    return [Turn(vary(request, random), REFUSAL)]


def _common_word(random: Random) -> str:
    return random.choice(facts().common_words)


def _salad(random: Random) -> str:
    """Words in no order, a few or many."""
    return " ".join(_common_word(random) for _ in range(random.choice((2, 3, 5, 8, 12, 20))))
