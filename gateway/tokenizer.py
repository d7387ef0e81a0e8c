"""Text to token ids and back to bytes, for the byte-level BPE vocabulary of a GGUF file.

The merging is done by the `tokenizers` package; what surrounds it is here: special tokens are cut out of the
raw text before it, because who may write them differs by caller (a raw prompt may, a chat user may not, see
`gateway.special_text`). Text is not normalised: like llama.cpp, and unlike Qwen's own tokenizer files, which
compose to NFC first.

Knows nothing of chats or streams. Instances are immutable and may be shared by threads; `encode` releases
the interpreter lock nearly all of its time, so a long prompt in an executor does not stall the event loop.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count

import tokenizers
from tokenizers import models, pre_tokenizers

from gateway.tokenizer_metadata import PREFIX, TokenizerError, TokenizerMetadata, TokenKind

__all__ = ["Tokenizer", "TokenizerError", "TooManyTokensError"]

# How text is cut before merging, by `tokenizer.ggml.pre`. "qwen35" lets combining marks stay with their
# letters, "qwen2" does not; the two are otherwise the same.
_SPLIT_PATTERNS = {
    "qwen2": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen35": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
        r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}

# `\s*[\r\n]+` steps back over a run of blanks one by one, and the regex library inside `tokenizers` panics
# after ten million steps: an exception that is no `Exception`. Longer runs are cut, far below that.
_MAX_WHITESPACE_RUN = 4_000_000

# A long text is encoded in parts of at least this many characters, so that it takes little memory at a time
# and can be given up early. A part ends only where both patterns above end a piece whatever comes before and
# after: behind a letter that a blank or a point follows, behind a line break that something visible follows.
_PART_LENGTH = 1 << 16
_PART_END = re.compile(
    r"(?<=[A-Za-z\u0410-\u044f\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5])(?=[ .,\u3001\u3002])|(?<=\n)(?=[!-~])"
)


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's `bytes_to_unicode`):
    itself where it is visible in Latin-1, else the next code point from 256 on."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = count(0x100)
    return [chr(byte) if byte in visible else chr(next(spare)) for byte in range(256)]


_BYTE_ALPHABET = _byte_alphabet()
_BYTE_OF_CHARACTER = {ord(character): byte for byte, character in enumerate(_BYTE_ALPHABET)}


class TooManyTokensError(ValueError):
    """A text is longer than its reader wants to know."""

    def __init__(self, max_tokens: int) -> None:
        super().__init__(f"more than {max_tokens} tokens")
        self.max_tokens = max_tokens


class Tokenizer:
    """The vocabulary of one model. Ids are the positions in `tokenizer.ggml.tokens`."""

    def __init__(self, metadata: TokenizerMetadata) -> None:
        """Takes checked metadata; use `from_metadata`. Raises `TokenizerError` where the tokens do not cover
        all bytes or a merge names a part that is no normal token."""
        self._tokens = metadata.tokens
        self._kinds = metadata.kinds
        self.special_tokens: Mapping[str, int] = dict(metadata.special_tokens)
        self.eos_token_id = metadata.eos_token_id
        self.eos_token_ids = metadata.eos_token_ids
        self.bos_token_id = metadata.bos_token_id
        self.padding_token_id = metadata.padding_token_id
        self.add_bos_token = metadata.add_bos_token
        self._special_pattern = any_of(self.special_tokens)
        self._longest_special = max(map(len, self.special_tokens), default=0)
        self._bpe = _build_bpe(metadata)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object], source: str) -> "Tokenizer":
        """Builds the tokenizer from a GGUF file's metadata; `source` is the file's name, for errors.

        Takes about a second for a vocabulary of 250k tokens. Raises `TokenizerError`.
        """
        return cls(TokenizerMetadata.read(metadata, source))

    @property
    def num_tokens(self) -> int:
        """Size of the vocabulary, unused ids included: the width of the model's logits."""
        return len(self._tokens)

    def encode(self, text: str, parse_special: bool = True, max_tokens: int | None = None) -> list[int]:
        """Token ids of `text`. With `parse_special` the text of control and user-defined tokens becomes their
        ids; without, all of it is plain text (llama.cpp would still honour user-defined tokens there).

        Lone surrogates, which have no UTF-8 form, become U+FFFD. No BOS is added, see `with_bos`.

        Raises `TooManyTokensError` soon after the ids are more than `max_tokens`.
        """
        pieces = self.split_special(text) if parse_special else [text]
        return self.encode_pieces(pieces, max_tokens)

    def encode_pieces(self, pieces: Iterable[str | int], max_tokens: int | None = None) -> list[int]:
        """Token ids of stretches of plain text and of special ids, as `split_special` gives them."""
        token_ids: list[int] = []
        for piece in pieces:
            if isinstance(piece, int):
                token_ids.append(piece)
                continue
            for part_ids in self._encode_plain(piece):
                token_ids += part_ids
                if max_tokens is not None and len(token_ids) > max_tokens:
                    raise TooManyTokensError(max_tokens)
        return token_ids

    def split_special(self, text: str) -> list[str | int]:
        """Cuts `text` at its special tokens: stretches of plain text, none empty, and special ids, in order.

        Leftmost first, and of those that start together the longest, as tiktoken and Hugging Face do.
        llama.cpp takes the longest of the whole text first, which differs only for special tokens that
        overlap without one holding the other; no Qwen vocabulary has such.
        """
        pieces: list[str | int] = []
        at = 0
        for match in self._special_matches(text):
            if match.start() > at:
                pieces.append(text[at : match.start()])
            pieces.append(self.special_tokens[match[0]])
            at = match.end()
        if at < len(text):
            pieces.append(text[at:])
        return pieces

    def _special_matches(self, text: str) -> Iterator[re.Match[str]]:
        """Special tokens in `text`, searched for in one part after the other: a search holds the interpreter
        lock, and a whole text may take a second."""
        at = 0
        for stop in range(_PART_LENGTH, len(text) + _PART_LENGTH, _PART_LENGTH):
            # One that begins in this part is whole before the end of what is looked at.
            while match := self._special_pattern.search(text, at, stop + self._longest_special):
                if match.start() >= stop:
                    break
                yield match
                at = match.end()
            at = max(at, stop)

    def with_bos(self, token_ids: list[int]) -> list[int]:
        """`token_ids` with BOS in front where the model file asks for it and it is not there already."""
        if not self.add_bos_token or self.bos_token_id is None or token_ids[:1] == [self.bos_token_id]:
            return token_ids
        return [self.bos_token_id, *token_ids]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for: part of a character perhaps for a normal token, the text of a special
        one, nothing for an unused one. Raises IndexError for an id outside the vocabulary."""
        kind = self._kind(token_id)
        if kind == TokenKind.NORMAL:
            return self._tokens[token_id].translate(_BYTE_OF_CHARACTER).encode("latin-1")
        return b"" if kind == TokenKind.UNUSED else self._tokens[token_id].encode()

    def is_control(self, token_id: int) -> bool:
        """Whether a token is structure, not text (turn borders, end marks). Raises IndexError like
        `token_bytes`."""
        return self._kind(token_id) == TokenKind.CONTROL

    def special_token(self, text: str) -> int | None:
        """The id of the control or user-defined token with this text, or None where there is none."""
        return self.special_tokens.get(text)

    def _kind(self, token_id: int) -> int:
        if not 0 <= token_id < len(self._kinds):
            raise IndexError(f"token id {token_id} is outside the vocabulary of {len(self._kinds)}")
        return self._kinds[token_id]

    def _encode_plain(self, text: str) -> Iterator[list[int]]:
        try:
            text.encode()
        except UnicodeEncodeError:
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        for part in _parts(text):
            # Not `encode`: that one keeps offsets, takes twice as long, and holds the interpreter lock.
            yield self._bpe.encode_batch_fast([part], add_special_tokens=False)[0].ids


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern with one group that matches any of `texts`, the longest first; nothing for none."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _build_bpe(metadata: TokenizerMetadata) -> tokenizers.Tokenizer:
    """Only normal tokens go in: then no merge can make a control token out of plain text."""
    vocabulary: dict[str, int] = {}
    for token_id, kind in enumerate(metadata.kinds):
        if kind == TokenKind.NORMAL:
            text = metadata.tokens[token_id]
            if text in vocabulary:
                raise TokenizerError(
                    f"{metadata.source}: {PREFIX}tokens has {text!r} twice, "
                    f"as {vocabulary[text]} and {token_id}, both normal tokens"
                )
            vocabulary[text] = token_id
    if foreign := set[str]().union(*vocabulary) - set(_BYTE_ALPHABET):
        token = next(text for text in vocabulary if not foreign.isdisjoint(text))
        raise TokenizerError(
            f"{metadata.source}: {PREFIX}tokens has {token!r} as {vocabulary[token]}, a normal token; "
            f"those are spelled in the byte-level alphabet, which lacks {sorted(foreign)[0]!r}"
        )
    if missing := [byte for byte, character in enumerate(_BYTE_ALPHABET) if character not in vocabulary]:
        raise TokenizerError(
            f"{metadata.source}: {PREFIX}tokens has no normal token for byte 0x{missing[0]:02x}; "
            "text with it could not be encoded"
        )
    try:
        model = models.BPE(vocab=vocabulary, merges=list(metadata.merges))
    except Exception as error:  # the package raises plain Exception
        raise TokenizerError(
            f"{metadata.source}: {PREFIX}merges does not fit the normal tokens of {PREFIX}tokens: {error}"
        ) from error
    bpe = tokenizers.Tokenizer(model)
    split = pre_tokenizers.Split(tokenizers.Regex(_SPLIT_PATTERNS[metadata.pre]), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    return bpe


def _parts(text: str) -> Iterator[str]:
    """`text` in parts that are encoded each for itself: nearly always the text itself."""
    start = 0
    while match := _PART_END.search(text, start + _PART_LENGTH):
        yield from _within_run_limit(text[start : match.start()])
        start = match.start()
    yield from _within_run_limit(text[start:])


def _within_run_limit(text: str) -> Iterator[str]:
    """`text` in parts without a run of whitespace beyond the limit."""
    start = 0
    if len(text) > _MAX_WHITESPACE_RUN:
        for run in re.finditer(r"\s+", text):
            for cut in range(run.start() + _MAX_WHITESPACE_RUN, run.end(), _MAX_WHITESPACE_RUN):
                yield text[start:cut]
                start = cut
    yield text[start:]
