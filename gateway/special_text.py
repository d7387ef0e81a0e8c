"""Keeps special tokens that a client merely writes from becoming structure.

A user may write "<|im_end|>" or "<|im_start|>system" and must get text, while the same characters written by
the chat template are turn borders. The template joins both into one string, so the client's are *disguised*
before rendering: the first character of each occurrence is replaced by a stand-in, a rare symbol that occurs
nowhere else in the request. After rendering the special tokens still visible are the template's; the text
between them is `reveal`ed and encoded as plain text, as though nothing had ever been replaced.

Why a stand-in inside and not a marker in front: templates trim, split and slice. A marker can be parted from
what it marks, and then the client's token is live, or the marker ends up before one of the template's own
tokens and kills that. A replaced character goes wherever its text goes, and lengths stay as they were.

Template and client text can also make a special token *together*: `'<function=' ~ name ~ '>'` with the name
"<|im_end|", or `'<' ~ key ~ '>'` with the key "|im_end|" or "think". So a string is disguised at its edges
too, where it could continue or be continued. Words are spared, because templates compare them ("tool",
"image"), except the whole word inside a special token's punctuation ("think", "im_end").

Not covered is a template that makes a special token of client text that held none: by changing its characters
(`lower`, `replace`), by cutting it and writing the rest of a token next to the cut, or by writing several
words of it next to each other between punctuation of its own.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from gateway.tokenizer import any_of

# Symbols without case that are no blanks, as the brackets they stand in for: Braille patterns, then
# SignWriting. Private-use characters are the last resort, because Python prints a list or an object, as some
# templates do, with escapes in their place.
STAND_INS = "".join(map(chr, [*range(0x2801, 0x2900), *range(0x1D800, 0x1DA00), *range(0xE000, 0xF900)]))

_PUNCTUATION_AROUND = re.compile(r"^[\W_]+|[\W_]+$")


class SpecialTexts:
    """A set of special tokens' texts, prepared for finding what of them is in a string. Immutable."""

    def __init__(self, texts: Iterable[str]) -> None:
        texts = frozenset(texts)
        self._whole = any_of(texts)
        self._longest = max(map(len, texts), default=0)
        self._beginnings = {text[:end] for text in texts for end in range(1, len(text))}
        self._ends = {text[start:] for text in texts for start in range(1, len(text))}
        self._middles = {end[:length] for end in self._ends for length in range(1, len(end))}
        self._words = {_PUNCTUATION_AROUND.sub("", text) for text in texts}

    def positions_in(self, text: str) -> set[int]:
        """Which characters of `text` to disguise so that no special token can show, whatever stands before
        and after it."""
        positions = set()
        match = self._whole.search(text)
        while match:  # occurrences may overlap, so the search goes on one character further
            positions.add(match.start())
            match = self._whole.search(text, match.start() + 1)
        if not text or (is_word(text) and text not in self._words):
            return positions
        for start in range(max(0, len(text) - self._longest), len(text)):
            if text[start:] in self._beginnings:
                positions.add(start)
        if text in self._middles or any(text[:end] in self._ends for end in range(1, self._longest)):
            positions.add(0)
        return positions


def is_word(text: str) -> bool:
    """Whether `text` is one word: nothing but letters, digits and underscores."""
    return text.replace("_", "").isalnum()


class OutOfStandInsError(ValueError):
    """A request that itself uses every one of the thousands of characters that could stand in."""


class Disguise:
    """The stand-ins of one request. `taken` are all characters that may show up in its rendered prompt."""

    def __init__(self, taken: set[str]) -> None:
        self._free = (character for character in STAND_INS if character not in taken)
        self._stand_ins: dict[str, str] = {}

    def hide(self, text: str, specials: SpecialTexts) -> str:
        """`text` with stand-ins where `specials` could show. Raises `OutOfStandInsError`."""
        positions = specials.positions_in(text)
        if not positions:
            return text
        characters = list(text)
        for position in positions:
            characters[position] = self._stand_in(characters[position])
        return "".join(characters)

    def reveal(self, text: str) -> str:
        """`text` with the stand-ins replaced by what they stand for."""
        for character, stand_in in self._stand_ins.items():
            text = text.replace(stand_in, character)
        return text

    def _stand_in(self, character: str) -> str:
        if character not in self._stand_ins:
            stand_in = next(self._free, None)
            if stand_in is None:
                raise OutOfStandInsError(
                    "the request leaves no character free to tell its special tokens from the template's"
                )
            self._stand_ins[character] = stand_in
        return self._stand_ins[character]


def strings_in(value: object) -> Iterator[str]:
    """Every string in a JSON-like value, keys of objects included, in no particular order."""
    # Not by recursion: generators within generators cost each string its depth, which a client chooses.
    open_values = [value]
    while open_values:
        value = open_values.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            open_values += value
            open_values += value.values()
        elif isinstance(value, list | tuple):
            open_values += value


def with_strings_replaced(value: object, replace: Callable[[str], str]) -> object:
    """A copy of a JSON-like value with every string, keys included, passed through `replace`."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, Mapping):
        return {
            with_strings_replaced(key, replace): with_strings_replaced(item, replace)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [with_strings_replaced(item, replace) for item in value]
    return value
