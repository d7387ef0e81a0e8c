"""What surrounds an answer: the checks before it, what the gpu_worker is asked, and its figures after it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from gateway.api.sampling import sampling_of, sampling_of_answer, stop_token_ids_of
from gateway.api.schema import GenerationFields
from gateway.attribution import shares_of
from gateway.generation import Outcome
from gateway.services import Services
from gateway.tokenizer import TooManyTokensError
from shared.errors import ContextLengthError, InvalidRequestError, NotFoundError
from shared.messages import FileReads, GenerateRequest, RequestTimings

# Prompts up to this many contexts long are counted exactly.
_COUNTED_CONTEXTS = 4
# Of a name that a client made up, in an error.
_MAX_SHOWN_NAME = 100

Encoded = TypeVar("Encoded")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenised prompt, how long that took, and the positions at which its messages begin."""

    token_ids: list[int]
    tokenize_s: float
    boundaries: Sequence[int] = ()


def check_model(name: str | None, services: Services) -> None:
    """Raises NotFoundError where a request names a model that is not served here."""
    served = (services.model_name, *services.config.aliases)
    if name is not None and name not in served:
        raise NotFoundError(
            f"the model {name[:_MAX_SHOWN_NAME]!r} does not exist here; served: {', '.join(served)}",
            param="model",
            code="model_not_found",
        )


def check_may_enter(services: Services, num_answers: int) -> None:
    """Raises what `respond` would raise now, before work is spent on a prompt that cannot be answered."""
    check_ready(services)
    admission = services.admission
    if num_answers > admission.capacity:
        raise InvalidRequestError(
            f"n is {num_answers}; this server holds {admission.capacity} answers at most, "
            f"{services.config.parallel} that run (--parallel) and {services.config.queue_size} that wait "
            "(--queue-size); ask for fewer at a time",
            param="n",
        )
    admission.check_room(num_answers)


def check_ready(services: Services) -> None:
    """Raises ModelLoadingError while the workers are not there, unless the server is stopping anyway."""
    if not services.engine.is_ready and not services.admission.is_draining:
        raise services.engine.not_ready()


def generate_request(
    request_id: str,
    prompt: Prompt,
    body: GenerationFields,
    services: Services,
    min_answer_tokens: int = 1,
) -> GenerateRequest:
    """What the gpu_worker is asked, with defaults filled in. Raises as `check_prompt` and `sampling_of`."""
    config, tokenizer = services.config, services.loaded_text().tokenizer
    check_prompt(prompt.token_ids, services, min_answer_tokens)
    room = services.engine.max_context - len(prompt.token_ids)
    limits = [limit for limit in (body.token_limit, config.max_new) if limit]
    ignores_eos = bool(body.ignore_eos)
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        boundaries=list(prompt.boundaries),
        cache_salt=_salt_of(body),
        max_new_tokens=min([room, *limits]),
        eos_token_ids=[] if ignores_eos else sorted(config.eos_ids or tokenizer.eos_token_ids),
        stop_token_ids=stop_token_ids_of(body, tokenizer.num_tokens),
        sampling=sampling_of(body, config, tokenizer.num_tokens),
        # Who measures speed wants as many tokens as were asked for, whatever they are.
        may_repeat=ignores_eos,
    )


def _salt_of(body: GenerationFields) -> str:
    salt = body.cache_salt or ""
    try:
        salt.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"cache_salt is no text: {error.reason}", param="cache_salt") from None
    return salt


def requests_of_answers(
    generate: GenerateRequest, body: GenerationFields, services: Services
) -> list[GenerateRequest]:
    """The requests of all answers that are wanted: of several, each has its place in its id and its seed."""
    if body.num_answers == 1:
        return [generate]
    is_seeded = body.seed is not None or services.config.seed is not None
    return [
        msgspec.structs.replace(
            generate,
            request_id=f"{generate.request_id}-{index}",
            sampling=sampling_of_answer(generate.sampling, index, is_seeded),
        )
        for index in range(body.num_answers)
    ]


def check_prompt(token_ids: list[int], services: Services, min_answer_tokens: int) -> None:
    """Raises InvalidRequestError or ContextLengthError where the model cannot read these ids and then write
    that many."""
    num_known = services.loaded_text().tokenizer.num_tokens
    if not token_ids:
        raise InvalidRequestError("the prompt is empty; at least one token is needed", param="prompt")
    if max(token_ids) >= num_known:
        raise InvalidRequestError(
            f"the prompt has the token id {max(token_ids)}; the vocabulary has {num_known}", param="prompt"
        )
    max_context = services.engine.max_context
    if max_context and len(token_ids) + min_answer_tokens > max_context:
        raise _too_long(f"{len(token_ids)}", services, min_answer_tokens)


def max_counted_tokens(services: Services) -> int | None:
    """Up to how many tokens a prompt is encoded, though it is too long already: its client is told its true
    length, but not every length is worth the time. None while the context is not known."""
    return _COUNTED_CONTEXTS * services.engine.max_context or None


async def encode_off_loop(services: Services, num_bytes: int, encode: Callable[[], Encoded]) -> Encoded:
    """What `encode` makes of a prompt that came in a body of that length. Raises ContextLengthError where it
    finds more tokens than it may."""
    try:
        return await services.off_loop(num_bytes, encode)
    except TooManyTokensError as error:
        raise _too_long(f"more than {error.max_tokens}", services) from None


def _too_long(length: str, services: Services, min_answer_tokens: int = 1) -> ContextLengthError:
    """The error for a prompt of that many tokens."""
    max_context = services.engine.max_context
    answer = f", {min_answer_tokens} of them for the answer" if min_answer_tokens else ""
    is_set_lower = max_context == services.config.max_context
    remedy = (
        ", or raise --max-context"
        if is_set_lower
        else ": the model is made for no more, unless --rope-scaling"
    )
    return ContextLengthError(
        f"the prompt has {length} tokens, the context has room for {max_context}{answer}; shorten it{remedy}"
    )


def usage_of(num_prompt_tokens: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The `usage` object of all answers: true counts, end-of-text tokens included; the prompt once."""
    num_output_tokens = sum(outcome.num_output_tokens for outcome in outcomes)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": outcomes[0].timings.num_reused if outcomes else 0},
    }


def timings_of(num_prompt_tokens: int, outcome: Outcome, tokenize_s: float) -> dict[str, Any]:
    """The `timings` object that llama-server's clients know, the waits behind it, and what was needed."""
    times = outcome.timings
    prompt_ms, predicted_ms = 1e3 * times.prefill_s, 1e3 * times.decode_s
    # As in llama-server: what was read, without what was there.
    num_read = num_prompt_tokens - times.num_reused
    num_predicted = outcome.num_output_tokens
    timings: dict[str, Any] = {
        "cache_n": times.num_reused,
        "prompt_n": num_read,
        "prompt_ms": round(prompt_ms, 3),
        "prompt_per_token_ms": round(prompt_ms / num_read, 3),
        "prompt_per_second": round(1e3 * num_read / prompt_ms, 3) if prompt_ms else 0.0,
        "predicted_n": num_predicted,
        "predicted_ms": round(predicted_ms, 3),
        "predicted_per_token_ms": round(predicted_ms / num_predicted, 3) if num_predicted else 0.0,
        "predicted_per_second": round(1e3 * num_predicted / predicted_ms, 3) if predicted_ms else 0.0,
        "queue_ms": round(1e3 * times.queue_s, 3),
        "tokenize_ms": round(1e3 * tokenize_s, 3),
        "ngram_wait_ms": round(1e3 * times.ngram_wait_s, 3),
        "ngram_read_ms": round(1e3 * times.ngram_read_s, 3),
        "ngram_wait_p95_ms": round(1e3 * outcome.ngram_wait_p95_s, 3),
        "expert_wait_ms": round(1e3 * times.expert_wait_s, 3),
        "transfer_wait_ms": round(1e3 * times.transfer_wait_s, 3),
        "device_wait_ms": round(1e3 * times.device_wait_s, 3),
        "ngram_n": times.ngram_rows,
        "ngram_hits_n": times.ngram_hits,
        "major_faults_n": times.major_faults,
        "disk_bytes_n": sum(reads.num_bytes for reads in times.disk),
    }
    if times.reuse_note:
        timings["cache_note"] = times.reuse_note
    if times.drafts:
        timings |= _drafts_of(times)
    routes = shares_of(times.routes)
    if routes:
        timings["expert_routes"] = {
            way: {"n": count, "share": round(share, 6)} for way, (count, share) in routes.items()
        }
    expert_bytes = {way: size for way, size in msgspec.structs.asdict(times.expert_bytes).items() if size}
    if expert_bytes:
        timings["expert_bytes_n"] = expert_bytes
    if times.disk:
        timings["disk"] = [_reads_of(reads) for reads in times.disk]
    staged = outcome.staged
    if staged is not None and staged.reads.num_reads:
        timings["staged"] = {
            "ngram_n": staged.num_rows,
            "ngram_hits_n": staged.num_hits,
            "ms": round(1e3 * staged.seconds, 3),
            "depth": round(staged.depth, 1),
            **_reads_of(staged.reads),
        }
    return timings


def _drafts_of(times: RequestTimings) -> dict[str, Any]:
    """What was drafted: in llama-server's words, and by source."""
    return {
        "draft_n": sum(counts.num_drafted for counts in times.drafts),
        "draft_n_accepted": sum(counts.num_accepted for counts in times.drafts),
        "draft_ms": round(1e3 * times.draft_s, 3),
        "windows_n": times.num_windows,
        "drafts": {
            counts.source: {"n": counts.num_drafted, "accepted_n": counts.num_accepted}
            for counts in times.drafts
        },
    }


def _reads_of(reads: FileReads) -> dict[str, Any]:
    return {
        "file": reads.file,
        "reads_n": reads.num_reads,
        "bytes_n": reads.num_bytes,
        "wait_ms": round(1e3 * reads.wait_s, 3),
    }
