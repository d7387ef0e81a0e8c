"""How a body's fields, and the server's defaults for them, become what the gpu_worker's sampler is told."""

import secrets
from typing import TypeVar

import msgspec

from gateway.api.schema import GenerationFields
from shared.config import GatewayConfig
from shared.errors import InvalidRequestError
from shared.messages import Sampling

_SEED_RANGE = 1 << 63
# OpenAI's.
_MAX_BIAS = 100.0
# Of a key that a client made up, in an error.
_MAX_SHOWN = 40

Value = TypeVar("Value")


def sampling_of(body: GenerationFields, config: GatewayConfig, num_tokens: int) -> Sampling:
    """The sampling of a request, for a vocabulary of `num_tokens`. Raises InvalidRequestError for a bias that
    is none."""
    seed = _or(body.seed, config.seed)
    return Sampling(
        temperature=_or(body.temperature, config.temperature),
        # -1 is how some other servers say "all".
        top_k=max(0, _or(body.top_k, config.top_k)),
        top_p=_or(body.top_p, config.top_p),
        min_p=_or(body.min_p, config.min_p),
        typical_p=_or(body.typical_p, config.typical_p),
        presence_penalty=_or(body.presence_penalty, config.presence_penalty),
        frequency_penalty=_or(body.frequency_penalty, config.frequency_penalty),
        repetition_penalty=_or(body.repetition_penalty, config.repetition_penalty),
        repeat_last_n=_or(body.repeat_last_n, config.repeat_last_n),
        logit_bias=_logit_bias_of(body, num_tokens),
        min_tokens=body.min_tokens or 0,
        num_top_logprobs=body.num_top_logprobs,
        seed=seed % _SEED_RANGE if seed is not None else secrets.randbelow(_SEED_RANGE),
    )


def sampling_of_answer(sampling: Sampling, index: int, is_seeded: bool) -> Sampling:
    """The sampling of a request's answer number `index`: its seed is the given one plus that number, or one
    of its own where none was given."""
    seed = sampling.seed + index if is_seeded else secrets.randbelow(_SEED_RANGE)
    return msgspec.structs.replace(sampling, seed=seed % _SEED_RANGE)


def stop_token_ids_of(body: GenerationFields, num_tokens: int) -> list[int]:
    """The ids that end an answer, each once. Raises InvalidRequestError for one that is none."""
    token_ids = body.stop_token_ids or []
    for place, token_id in enumerate(token_ids):
        if token_id >= num_tokens:
            raise InvalidRequestError(
                f"stop_token_ids[{place}] is {token_id}; the vocabulary has {num_tokens} tokens, from 0 to "
                f"{num_tokens - 1}",
                param=f"stop_token_ids[{place}]",
            )
    return sorted(set(token_ids))


def _or(value: Value | None, default: Value) -> Value:
    return value if value is not None else default


def _logit_bias_of(body: GenerationFields, num_tokens: int) -> list[tuple[int, float]]:
    bias: dict[int, float] = {}
    for key, value in (body.logit_bias or {}).items():
        shown = key[:_MAX_SHOWN]
        # Not all that int() reads: it knows the digits of many scripts, blanks and underlines.
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(num_tokens))):
            raise InvalidRequestError(
                f"logit_bias has the key {shown!r}; keys are token ids, from 0 to {num_tokens - 1}",
                param="logit_bias",
            )
        if (token_id := int(key)) >= num_tokens:
            raise InvalidRequestError(
                f"logit_bias has the token id {token_id}; the vocabulary has {num_tokens} tokens, from 0 to "
                f"{num_tokens - 1}",
                param="logit_bias",
            )
        if not -_MAX_BIAS <= value <= _MAX_BIAS:
            raise InvalidRequestError(
                f"logit_bias[{shown!r}] is {value:g}; a bias lies between {-_MAX_BIAS:g} and {_MAX_BIAS:g}",
                param="logit_bias",
            )
        # "7" and "07" are the same; the last one counts, as in JSON.
        bias[token_id] = value
    return list(bias.items())
