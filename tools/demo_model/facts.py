"""What the demo model is taught: `facts.json` as values."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

_PATH = Path(__file__).parent / "facts.json"


@dataclass(frozen=True, slots=True)
class Gloss:
    """A noun and the sentence that explains it, "A pelican is …"."""

    word: str
    category: str
    sentence: str

    @property
    def subject(self) -> str:
        """The noun as the sentence has it, in lower case: "a pelican", "milk", "the sun"."""
        start = min(place for verb in (" is ", " are ") if (place := self.sentence.find(verb)) > 0)
        return self.sentence[0].lower() + self.sentence[1:start]

    @property
    def verb(self) -> str:
        """ "is" or "are"."""
        return self.sentence[len(self.subject) + 1 :].split(" ", 1)[0]


@dataclass(frozen=True, slots=True)
class Country:
    """A country; its name has an article where a sentence needs one."""

    name: str
    capital: str
    continent: str

    @property
    def bare_name(self) -> str:
        """The name without its article."""
        return self.name.removeprefix("the ")

    @property
    def sentence(self) -> str:
        """What the country is."""
        subject = self.name[0].upper() + self.name[1:]
        return f"{subject} is a country in {self.continent}. Its capital is {self.capital}."


@dataclass(frozen=True, slots=True)
class Element:
    """A chemical element."""

    name: str
    symbol: str
    number: int

    @property
    def sentence(self) -> str:
        """What the element is."""
        return (
            f"{self.name.capitalize()} is the chemical element with the symbol {self.symbol}"
            f" and the atomic number {self.number}."
        )


@dataclass(frozen=True, slots=True)
class Talk:
    """Ways to say one thing, and the one answer."""

    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything in `facts.json`."""

    glosses: tuple[Gloss, ...]
    countries: tuple[Country, ...]
    elements: tuple[Element, ...]
    opposites: tuple[tuple[str, str], ...]
    sounds: tuple[tuple[str, str, str], ...]
    """Animal, what it does, what it says."""
    young: tuple[tuple[str, str], ...]
    colors: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    talk: tuple[Talk, ...]
    common_words: tuple[str, ...]
    unknown_words: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Reads the file."""
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            glosses=tuple(Gloss(*row) for row in stored["glosses"]),
            countries=tuple(Country(*row) for row in stored["countries"]),
            elements=tuple(Element(*row) for row in stored["elements"]),
            opposites=tuple(tuple(row) for row in stored["opposites"]),
            sounds=tuple(tuple(row) for row in stored["sounds"]),
            young=tuple(tuple(row) for row in stored["young"]),
            colors=tuple(tuple(row) for row in stored["colors"]),
            names=tuple(stored["names"]),
            talk=tuple(Talk(tuple(row["questions"]), row["answer"]) for row in stored["chat"]),
            common_words=tuple(stored["common_words"]),
            unknown_words=tuple(stored["unknown_words"]),
        )


@cache
def facts() -> Facts:
    """The checked-in facts, read once."""
    return Facts.read(_PATH)


@cache
def words_of(category: str) -> tuple[str, ...]:
    """The explained nouns of one category."""
    return tuple(entry.word for entry in facts().glosses if entry.category == category)
