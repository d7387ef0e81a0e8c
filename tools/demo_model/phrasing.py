"""Ways in which people write the same question."""

from random import Random

_OPENINGS = (
    "Please tell me: ",
    "Can you tell me: ",
    "Tell me, ",
    "I have a question: ",
    "Ok, ",
    "Okay, ",
    "So, ",
    "And ",
    "Now, ",
    "Hey, ",
    "Hi, ",
    "Hello, ",
    "Well, ",
    "Then ",
    "Question: ",
    "I want to know: ",
)
_SENTENCE_STARTS = """
What What's Which Where Who Why When How Is Are Do Does Can Could Tell Name Define Describe
Explain Say Count Calculate List My You Call The Your Please Opposite Capital Chemical Atomic
Write Give Show Think On In Of
"""
_SENTENCE_WORDS = frozenset(_SENTENCE_STARTS.split())
_CLOSINGS = (" Please.", " Thanks.", " Thank you.", " please", " thanks")


def vary(text: str, random: Random, keeps_case: bool = False) -> str:
    """`text` as it is half of the time, else with another opening, ending, punctuation or case.

    `keeps_case` is for texts whose capitals the answer repeats.
    """
    if random.random() < 0.5:
        return text
    if random.random() < 0.3:
        text = random.choice(_OPENINGS) + _lowered(text)
    if random.random() < 0.3:
        text = text.rstrip("?.!")
    elif random.random() < 0.15:
        text += random.choice(_CLOSINGS)
    elif random.random() < 0.1:
        text = text.rstrip("?.!") + random.choice((" ?", "??", "!", "...", " "))
    if not keeps_case and random.random() < 0.25:
        text = text.lower()
    elif random.random() < 0.1:
        text = _lowered(text)
    return text


def _lowered(text: str) -> str:
    """Without the capital of the sentence, but with that of a name it begins with."""
    first = text.split(" ", 1)[0].rstrip(".,:?!")
    return text[0].lower() + text[1:] if first in _SENTENCE_WORDS else text


def one_of(random: Random, *templates: str) -> str:
    """One of the templates; the first, the plainest, twice as often."""
    return random.choice((templates[0], *templates))


def with_article(noun: str) -> str:
    """The noun after "a" or "an"."""
    return ("an " if noun[0].lower() in "aeiou" and not noun.startswith("uk") else "a ") + noun


def capitalized(text: str) -> str:
    """`text` with a capital first letter, the rest untouched."""
    return text[:1].upper() + text[1:]
