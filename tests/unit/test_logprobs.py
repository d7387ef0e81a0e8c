"""The two shapes of log-probabilities."""

from gateway.answer_text import TokenEntry
from gateway.api.logprobs import chat_logprobs, completion_logprobs
from shared.messages import TokenLogprobs
from tests.support.gateway_parts import small_tokenizer

TOKENIZER = small_tokenizer()
FIRST, SECOND = "é".encode()


def entry(token_id: int, logprob: float, top: dict[int, float], text_offset: int = 0) -> TokenEntry:
    logprobs = TokenLogprobs(logprob=logprob, top_token_ids=list(top), top_logprobs=list(top.values()))
    return TokenEntry(token_id, text_offset, logprobs)


def test_a_chat_has_an_object_for_each_token() -> None:
    eos = TOKENIZER.eos_token_id
    entries = [entry(ord("a"), -0.5, {ord("b"): -0.25}), entry(FIRST, -1.0, {}), entry(eos, -2.0, {})]
    assert chat_logprobs(entries, TOKENIZER) == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [{"token": "b", "logprob": -0.25, "bytes": [98]}],
            },
            {"token": "\ufffd", "logprob": -1.0, "bytes": [FIRST], "top_logprobs": []},
            {
                "token": TOKENIZER.token_bytes(eos).decode(),
                "logprob": -2.0,
                "bytes": list(TOKENIZER.token_bytes(eos)),
                "top_logprobs": [],
            },
        ],
        "refusal": None,
    }


def test_a_completion_has_lists() -> None:
    """Parts of characters are spelled as bytes, so that they are told from each other; of tokens that the
    tokenizer has no text for the likeliest stands for all."""
    unknown = TOKENIZER.num_tokens
    entries = [
        entry(ord("a"), -0.5, {ord("b"): -0.25, FIRST: -1.0, SECOND: -1.5}),
        entry(SECOND, -3.0, {unknown: -1.0, unknown + 1: -2.0}, text_offset=1),
    ]
    assert completion_logprobs(entries, TOKENIZER, 3) == {
        "tokens": ["a", "bytes:\\xa9"],
        "token_logprobs": [-0.5, -3.0],
        "top_logprobs": [
            {"b": -0.25, "bytes:\\xc3": -1.0, "bytes:\\xa9": -1.5, "a": -0.5},
            {"": -1.0, "bytes:\\xa9": -3.0},
        ],
        "text_offset": [0, 1],
    }
    assert completion_logprobs(entries, TOKENIZER, 0)["top_logprobs"] is None
