"""Log-probabilities in the two shapes that the API has: of chats, and of text completions.

There is one entry for each token of `completion_tokens`, also for the one that ends the answer.
"""

from collections.abc import Sequence
from typing import Any

from gateway.answer_text import TokenEntry
from gateway.tokenizer import Tokenizer


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` object of a chat: of a token that is part of a character, `bytes` say which."""
    return {
        "content": [
            _described(entry.token_id, entry.logprobs.logprob, tokenizer)
            | {
                "top_logprobs": [
                    _described(token_id, logprob, tokenizer)
                    for token_id, logprob in zip(
                        entry.logprobs.top_token_ids, entry.logprobs.top_logprobs, strict=True
                    )
                ]
            }
            for entry in entries
        ],
        "refusal": None,
    }


def completion_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer, num_top: int) -> dict[str, Any]:
    """The `logprobs` object of a text completion: lists with a place for each token. `text_offset` counts the
    characters of the answer before it; `top_logprobs` has the chosen token too, as OpenAI's has."""
    return {
        "tokens": [_spelled(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [entry.logprobs.logprob for entry in entries],
        "top_logprobs": [_top_of(entry, tokenizer) for entry in entries] if num_top else None,
        "text_offset": [entry.text_offset for entry in entries],
    }


def _top_of(entry: TokenEntry, tokenizer: Tokenizer) -> dict[str, float]:
    top: dict[str, float] = {}
    ids = (*entry.logprobs.top_token_ids, entry.token_id)
    for token_id, logprob in zip(ids, (*entry.logprobs.top_logprobs, entry.logprobs.logprob), strict=True):
        # Of tokens that are spelled alike the likeliest stands for all.
        top.setdefault(_spelled(token_id, tokenizer), logprob)
    return top


def _described(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = _bytes_of(token_id, tokenizer)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


def _spelled(token_id: int, tokenizer: Tokenizer) -> str:
    """The token's text; of part of a character its bytes, in the words of OpenAI's text completions."""
    raw = _bytes_of(token_id, tokenizer)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _bytes_of(token_id: int, tokenizer: Tokenizer) -> bytes:
    # The model may have rows for more ids than the vocabulary names.
    return tokenizer.token_bytes(token_id) if token_id < tokenizer.num_tokens else b""
