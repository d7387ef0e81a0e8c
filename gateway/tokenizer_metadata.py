"""The tokenizer's share of a GGUF file's metadata, read and checked once at start.

Owns which values are supported and the errors that say so; knows nothing of how text is encoded.
`gateway.tokenizer` is the only caller. A file that this module lets through cannot fail later for what its
tokenizer keys say.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NoReturn

import numpy as np

PREFIX = "tokenizer.ggml."
SUPPORTED_MODEL = "gpt2"
SUPPORTED_PRE = ("qwen2", "qwen35")

# Qwen ends a turn with the first and a document with the second, and samples either; the file names one.
_QWEN_END_TOKENS = ("<|im_end|>", "<|endoftext|>")
_END_OF_TURN_KEYS = ("eot_token_id", "eom_token_id")


class TokenizerError(ValueError):
    """A GGUF file whose tokenizer is missing, contradicts itself, or is of a kind that is not supported."""


class TokenKind(IntEnum):
    """What `tokenizer.ggml.token_type` says of a token; llama.cpp's numbers."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


@dataclass(frozen=True, slots=True)
class TokenizerMetadata:
    """Checked values: one text and one kind per id, ids in range, merges in pairs.

    `kinds` holds one `TokenKind` per byte. `special_tokens` maps the text of control and user-defined
    tokens to their ids. `eos_token_ids` are all ids that end a generation, `eos_token_id` among them.
    """

    source: str
    pre: str
    tokens: Sequence[str]
    kinds: bytes
    merges: Sequence[tuple[str, str]]
    special_tokens: Mapping[str, int]
    eos_token_id: int
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    padding_token_id: int | None
    add_bos_token: bool

    @classmethod
    def read(cls, metadata: Mapping[str, object], source: str) -> "TokenizerMetadata":
        """Reads the `tokenizer.ggml.*` keys. Raises `TokenizerError` naming `source`, key and value."""
        reader = _Reader(metadata, source)
        if (model := reader.text("model")) != SUPPORTED_MODEL:
            reader.refuse("model", model, f"'{SUPPORTED_MODEL}' is supported")
        if (pre := reader.text("pre")) not in SUPPORTED_PRE:
            reader.refuse("pre", pre, f"{' and '.join(map(repr, SUPPORTED_PRE))} are supported")
        tokens = reader.texts("tokens")
        kinds = reader.kinds("token_type", len(tokens))
        special_tokens = _special_tokens(reader, tokens, kinds)
        if (eos_token_id := reader.token_id("eos_token_id", len(tokens))) is None:
            reader.missing("eos_token_id")
        end_ids = {eos_token_id} | {reader.token_id(key, len(tokens)) for key in _END_OF_TURN_KEYS}
        for text in _QWEN_END_TOKENS:
            token_id = special_tokens.get(text)
            if token_id is not None and kinds[token_id] == TokenKind.CONTROL:
                end_ids.add(token_id)
        bos_token_id = reader.token_id("bos_token_id", len(tokens))
        add_bos_token = reader.flag("add_bos_token")
        if add_bos_token and bos_token_id is None:
            reader.refuse("add_bos_token", True, f"it needs {PREFIX}bos_token_id, which is missing")
        return cls(
            source=source,
            pre=pre,
            tokens=tokens,
            kinds=kinds,
            merges=reader.merges("merges"),
            special_tokens=special_tokens,
            eos_token_id=eos_token_id,
            eos_token_ids=frozenset(token_id for token_id in end_ids if token_id is not None),
            bos_token_id=bos_token_id,
            padding_token_id=reader.token_id("padding_token_id", len(tokens)),
            add_bos_token=add_bos_token,
        )


def _special_tokens(reader: "_Reader", tokens: Sequence[str], kinds: bytes) -> dict[str, int]:
    special_tokens: dict[str, int] = {}
    for token_id, kind in enumerate(kinds):
        if kind not in (TokenKind.CONTROL, TokenKind.USER_DEFINED):
            continue
        text = tokens[token_id]
        if not text:
            reader.refuse("tokens", text, f"special token {token_id} needs a text")
        if text in special_tokens:
            reader.refuse("tokens", text, f"special tokens {special_tokens[text]} and {token_id} share it")
        special_tokens[text] = token_id
    return special_tokens


class _Reader:
    """Typed look-ups of `tokenizer.ggml.*` whose errors name file, key and value."""

    def __init__(self, metadata: Mapping[str, object], source: str) -> None:
        self._metadata = metadata
        self._source = source

    def refuse(self, key: str, value: object, remark: str) -> NoReturn:
        shown = repr(value)
        if len(shown) > 80:
            shown = shown[:77] + "..."
        raise TokenizerError(f"{self._source}: {PREFIX}{key} is {shown}; {remark}")

    def missing(self, key: str) -> NoReturn:
        raise TokenizerError(f"{self._source}: {PREFIX}{key} is missing; no tokenizer without it")

    def _required(self, key: str) -> object:
        value = self._metadata.get(PREFIX + key)
        if value is None:
            self.missing(key)
        return value

    def text(self, key: str) -> str:
        value = self._required(key)
        if not isinstance(value, str):
            self.refuse(key, value, "a string is expected")
        return value

    def _items(self, key: str) -> list[object]:
        value = self._required(key)
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            self.refuse(key, value, "an array is expected")
        # A GGUF reader may hand out numpy arrays, whose items are slow to compare one by one.
        return value.tolist() if isinstance(value, np.ndarray) else list(value)

    def texts(self, key: str) -> list[str]:
        texts: list[str] = []
        for position, item in enumerate(self._items(key)):
            if not isinstance(item, str):
                self.refuse(key, item, f"a string is expected at position {position}")
            texts.append(item)
        if not texts:
            self.refuse(key, texts, "it must not be empty")
        return texts

    def merges(self, key: str) -> list[tuple[str, str]]:
        # An empty list is an ordinary array: a vocabulary of single bytes has no merges.
        merges: list[tuple[str, str]] = []
        for item in self._items(key):
            parts = item.split(" ") if isinstance(item, str) else []
            if len(parts) != 2:
                self.refuse(key, item, "two parts with one space between them are expected")
            merges.append((parts[0], parts[1]))
        return merges

    def kinds(self, key: str, num_tokens: int) -> bytes:
        kinds = self._items(key)
        if len(kinds) != num_tokens:
            self.refuse(key, f"{len(kinds)} entries", f"{PREFIX}tokens has {num_tokens}")
        supported = frozenset(TokenKind)
        for token_id, kind in enumerate(kinds):
            if kind not in supported:
                known = ", ".join(f"{known} ({known.name.lower()})" for known in TokenKind)
                self.refuse(key, kind, f"that is token {token_id}; supported are {known}")
        return bytes(kinds)  # type: ignore[arg-type]

    def token_id(self, key: str, num_tokens: int) -> int | None:
        value = self._metadata.get(PREFIX + key)
        if value is None:
            return None
        try:
            token_id = operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            self.refuse(key, value, "a token id is expected")
        if isinstance(value, bool) or not 0 <= token_id < num_tokens:
            self.refuse(key, value, f"a token id from 0 to {num_tokens - 1} is expected")
        return token_id

    def flag(self, key: str) -> bool:
        value = self._metadata.get(PREFIX + key, False)
        if value not in (False, True):
            self.refuse(key, value, "a boolean is expected")
        return bool(value)
