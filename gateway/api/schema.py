"""Request bodies: which fields there are, which types and ranges they have, and which are not supported yet.

A body is checked in one go; the error names the field. Fields nobody knows are ignored, since clients send
all kinds, but logged once and counted.
"""

import json
import logging
import re
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, get_args

import msgspec
from aiohttp import web
from msgspec import Meta, Struct

from gateway.services import BODY_BYTES, Services
from shared.errors import InvalidRequestError

_log = logging.getLogger(__name__)

_MAX_STOP_STRINGS = 64
# They are looked for in every answer, on the event loop.
_MAX_STOP_LENGTH = 1000
_MAX_INT = 2**31 - 1
_MAX_SALT_LENGTH = 1024
_MAX_STOP_TOKEN_IDS = 64
# OpenAI's limit.
_MAX_ANSWERS = 128
# OpenAI allows 20 in chats and 5 in text completions.
_MAX_TOP_LOGPROBS = 20
_MAX_SHOWN = 40
_MAX_NOTED_FIELDS = 50
Role = Literal["system", "developer", "user", "assistant", "tool"]
_PATH_STEP = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>.+)`")

StopString = Annotated[str, Meta(min_length=1, max_length=_MAX_STOP_LENGTH)]
TokenIds = list[Annotated[int, Meta(ge=0)]]
AdditivePenalty = Annotated[float, Meta(ge=-2, le=2)]
NumTopLogprobs = Annotated[int, Meta(ge=0, le=_MAX_TOP_LOGPROBS)]


class StreamOptions(Struct):
    """`stream_options`: whether a last chunk brings the usage."""

    include_usage: bool | None = None


class GenerationFields(Struct, kw_only=True):
    """What chat and text completions have in common."""

    model: str | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=5)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_INT)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=_MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=_MAX_ANSWERS)] | None = None
    presence_penalty: AdditivePenalty | None = None
    frequency_penalty: AdditivePenalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[int, Meta(ge=-1, le=_MAX_INT)] | None = None
    # Token ids as strings; checked by `gateway.api.sampling`, which knows the vocabulary.
    logit_bias: dict[str, float] | None = None
    typical_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=_MAX_INT)] | None = None
    stop_token_ids: Annotated[TokenIds, Meta(max_length=_MAX_STOP_TOKEN_IDS)] | None = None
    # Accepted with the one value that means "not used"; see `refuse_unsupported`.
    modalities: list[str] | None = None
    audio: dict[str, Any] | None = None
    cache_salt: Annotated[str, Meta(max_length=_MAX_SALT_LENGTH)] | None = None
    # Accepted and of no effect on the answer.
    user: str | None = None

    unsupported_unless: ClassVar[dict[str, tuple[object, ...]]] = {
        "modalities": (["text"],),
        "audio": (),
    }

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream is to end with a chunk of usage."""
        return bool(self.stream_options is not None and self.stream_options.include_usage)

    @property
    def token_limit(self) -> int | None:
        """The most tokens the client wants, or None."""
        return self.max_tokens

    @property
    def num_answers(self) -> int:
        """How many answers are wanted."""
        return self.n if self.n is not None else 1

    @property
    def num_top_logprobs(self) -> int | None:
        """With how many others in its place each token's log-probability is wanted; None for none at all."""
        return None

    def check(self) -> None:
        """Raises InvalidRequestError for fields that contradict each other."""
        limit = self.token_limit
        if self.min_tokens is not None and limit is not None and self.min_tokens > limit:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, more than the {limit} tokens that the answer may have at "
                "most; lower it, or raise max_tokens",
                param="min_tokens",
            )


class TextPart(Struct):
    """One part of a message's content. Other types than text are refused by name."""

    type: str
    text: str | None = None


class ChatMessage(Struct):
    """One message; what else it holds is the chat template's business."""

    role: Role
    content: str | list[TextPart] | None = None


class ChatRequest(GenerationFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: NumTopLogprobs | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    unsupported_unless: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerationFields.unsupported_unless,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "response_format": ({"type": "text"},),
        "structured_outputs": (),
    }

    @property
    def token_limit(self) -> int | None:
        """The newer name wins where a client sends both."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Nothing without `logprobs`, whatever `top_logprobs` is."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raises InvalidRequestError for fields that contradict each other."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError(
                f"top_logprobs is {self.top_logprobs}, which needs logprobs to be true", param="top_logprobs"
            )


class CompletionRequest(GenerationFields, kw_only=True):
    """POST /v1/completions. The prompt is text or token ids; lists of prompts may hold one."""

    prompt: str | list[Annotated[int, Meta(ge=0)] | str | TokenIds]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: NumTopLogprobs | None = None

    unsupported_unless: ClassVar[dict[str, tuple[object, ...]]] = {
        **GenerationFields.unsupported_unless,
        "echo": (False,),
        "suffix": ("",),
    }

    @property
    def num_top_logprobs(self) -> int | None:
        """Even 0 asks for the log-probability of the chosen token."""
        return self.logprobs

    def check(self) -> None:
        """Raises InvalidRequestError for fields that contradict each other."""
        super().check()
        if self.best_of is not None and self.best_of != self.num_answers:
            raise InvalidRequestError(
                f"best_of is {self.best_of} and n is {self.num_answers}; only as many answers are generated "
                "as are returned, so leave best_of out",
                param="best_of",
            )


class TokenizeRequest(Struct, kw_only=True):
    """POST /tokenize: text under either of the names that servers use, or a chat."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    parse_special: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class LogitsRequest(Struct, kw_only=True):
    """POST /v1/logits."""

    prompt_token_ids: Annotated[TokenIds, Meta(min_length=1)]


Body = TypeVar("Body", bound=Struct)


async def read_body(
    request: web.Request, kind: type[Body], services: Services
) -> tuple[Body, dict[str, Any]]:
    """The body as `kind`, and as the plain JSON object it was. Raises InvalidRequestError."""
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:
        # Not what its Content-Encoding says, for example; aiohttp puts a heading in front.
        reason = str(error).splitlines()[-1].strip()
        raise InvalidRequestError(f"the body cannot be read: {reason}") from None
    request[BODY_BYTES] = len(raw)
    if not raw:
        raise InvalidRequestError("the body is empty; a JSON object is expected")
    try:
        plain = json.loads(raw, parse_constant=_refuse_constant)
    except RecursionError:
        raise InvalidRequestError("the body is nested too deeply") from None
    except ValueError as error:
        # Python's own words on a number too long to read would advise to reconfigure the interpreter.
        reason = "a number in it has too many digits" if "digits" in str(error) else str(error)
        raise InvalidRequestError(f"the body is not valid JSON: {reason}") from None
    if not isinstance(plain, dict):
        raise InvalidRequestError(f"the body is a JSON {_json_type(plain)}; a JSON object is expected")
    body = _checked(plain, kind)
    _note_unknown_fields(plain, kind, services)
    return body, plain


def refuse_unsupported(body: GenerationFields) -> None:
    """Raises InvalidRequestError for a field whose effect this version does not have, and for fields that
    contradict each other.

    Ignoring one would give an answer that looks right and is not what was asked for.
    """
    for name, harmless in type(body).unsupported_unless.items():
        value = getattr(body, name)
        if value is not None and value not in harmless:
            accepted = "".join(f", or send {json.dumps(entry)}" for entry in harmless)
            raise InvalidRequestError(
                f"{name} is not supported by this version of Strata; leave it out{accepted}",
                param=name,
                code="unsupported_parameter",
            )
    body.check()


def _checked(plain: dict[str, Any], kind: type[Body]) -> Body:
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        raise _invalid_field(str(error), plain) from None
    except UnicodeEncodeError as error:
        # Of a string where something else belongs: msgspec looks at it as UTF-8.
        raise InvalidRequestError(f"a string in the body is no text: {error.reason}") from None


def _invalid_field(message: str, plain: dict[str, Any]) -> InvalidRequestError:
    """From msgspec's message, which ends with the path of the field, or names one that is missing there."""
    reason, _, path = message.partition(" - at `$")
    param = path.rstrip("`").lstrip(".")
    if missing := _MISSING_FIELD.fullmatch(reason):
        param = f"{param}.{missing['name']}".lstrip(".")
        reason = "this field is required"
    elif reason.startswith("Invalid enum value") and param.endswith(".role"):
        reason = f"a message's role is one of {', '.join(get_args(Role))}"
    elif param and (value := _shown_at(plain, param)):
        reason = f"{reason}; it is {value}"
    return InvalidRequestError(f"{param or 'the body'}: {reason}", param=param or None)


def _shown_at(plain: dict[str, Any], path: str) -> str:
    """The number or short text at a path such as `messages[0].role`; nothing for what is no such thing."""
    value: Any = plain
    for name, place in _PATH_STEP.findall(path):
        try:
            value = value[name] if name else value[int(place)]
        except (LookupError, TypeError):
            return ""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a number beyond 64 bits"
    shown = json.dumps(value) if isinstance(value, str | int | float) else ""
    return shown if len(shown) <= _MAX_SHOWN else ""


def _note_unknown_fields(plain: dict[str, Any], kind: type[Struct], services: Services) -> None:
    unknown = plain.keys() - set(kind.__struct_fields__)
    if not unknown:
        return
    services.metrics.ignored_fields(len(unknown))
    known = services.known_unknown_fields
    for name in islice(unknown, _MAX_NOTED_FIELDS - len(known)):
        # A client may make up any number of names of any length.
        if (short := name[:_MAX_SHOWN]) not in known:
            known.add(short)
            _log.info("requests have the field %r, which is ignored", short)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _json_type(value: object) -> str:
    names = {list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
