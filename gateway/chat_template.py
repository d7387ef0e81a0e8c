"""Chat messages to the prompt's token ids, by the model's own chat template.

Renders (`gateway.template_environment`) what the client sent, brought into shape (`gateway.chat_messages`)
and made harmless (`gateway.special_text`), and encodes the result. Synchronous and CPU-bound: the gateway
calls it in an executor.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from gateway.chat_messages import prepare_messages
from gateway.special_text import (
    Disguise,
    OutOfStandInsError,
    SpecialTexts,
    is_word,
    strings_in,
    with_strings_replaced,
)
from gateway.template_environment import (
    MAX_OUTPUT_CHARACTERS,
    MAX_SECONDS,
    BoundedTemplate,
    ChatTemplateError,
)
from gateway.tokenizer import Tokenizer

__all__ = ["ChatPrompt", "ChatTemplate", "ChatTemplateError"]

_THINK, _END_THINK = "<think>", "</think>"
_RESERVED_NAMES = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """An encoded chat. `is_thinking_open`: the prompt ends inside `<think>`, so what the model writes first
    is reasoning although it opens with no tag. `boundaries` are the positions at which messages begin, but
    the first: where the special token comes again that the template begins with, if it begins with one."""

    token_ids: list[int]
    is_thinking_open: bool
    boundaries: list[int]


class ChatTemplate:
    """The chat template of one model. Immutable; may be used by several threads at once."""

    def __init__(
        self,
        template_source: str,
        tokenizer: Tokenizer,
        *,
        max_characters: int = MAX_OUTPUT_CHARACTERS,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`template_source` is the file's `tokenizer.chat_template`; the limits are explained in
        `gateway.template_environment`. Raises `ChatTemplateError` where it does not parse."""
        self._tokenizer = tokenizer
        self._template = BoundedTemplate(
            template_source, max_characters=max_characters, max_seconds=max_seconds, clock=clock, now=now
        )
        specials = tokenizer.special_tokens
        self._special_texts = SpecialTexts(specials)
        self._control_texts = SpecialTexts(filter(self._is_control_text, specials))
        self._own_characters = self._template.characters.union(*specials)
        self._token_strings = {"eos_token": _token_string(tokenizer, tokenizer.eos_token_id)}
        if tokenizer.bos_token_id is not None:
            self._token_strings["bos_token"] = _token_string(tokenizer, tokenizer.bos_token_id)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
    ) -> ChatPrompt:
        """The prompt for `messages` (of the OpenAI API, roles validated).

        `template_kwargs` are handed to the template as variables, `reasoning_effort` and `enable_thinking`
        among them; an effort of "none" is handed on as `enable_thinking` = False instead.

        Special tokens in client text stay text. In an assistant's message that goes for control tokens only:
        `<think>` or `<tool_call>` there came from the model and become their ids again.

        Raises `ChatTemplateError`: all its causes are the client's to mend (status 400). Raises
        `TooManyTokensError` for a prompt of more than `max_tokens`.
        """
        text, disguise = self._render(messages, tools, template_kwargs, add_generation_prompt)
        pieces = list(self._tokenizer.split_special(text))
        revealed = (piece if isinstance(piece, int) else disguise.reveal(piece) for piece in pieces)
        token_ids = self._tokenizer.encode_pieces(revealed, max_tokens)
        token_ids = self._tokenizer.with_bos(token_ids)
        return ChatPrompt(
            token_ids, self._ends_thinking(pieces), _places_of(next(iter(pieces), ""), token_ids)
        )

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """The prompt's text, to be looked at. Encoding it is not the same as `encode_chat`: who wrote which
        special token is no longer known. Raises `ChatTemplateError`."""
        text, disguise = self._render(messages, tools, template_kwargs, add_generation_prompt)
        return disguise.reveal(text)

    def _render(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] | None,
        template_kwargs: Mapping[str, object] | None,
        add_generation_prompt: bool,
    ) -> tuple[str, Disguise]:
        """The rendered chat, still disguised."""
        try:
            prepared = prepare_messages(messages)
            variables = _variables(template_kwargs or {})
            taken = {*self._own_characters}.union(*strings_in([prepared, list(tools or ()), variables]))
            disguise = Disguise(taken)

            def hide_all(text: str) -> str:
                return disguise.hide(text, self._special_texts)

            def hide_control(text: str) -> str:
                return disguise.hide(text, self._control_texts)

            variables = {name: with_strings_replaced(value, hide_all) for name, value in variables.items()}
            variables["tools"] = with_strings_replaced(tools, hide_all) if tools else None
            variables["messages"] = [
                _disguised(message, hide_control if message.get("role") == "assistant" else hide_all)
                for message in prepared
            ]
        except RecursionError as error:
            raise ChatTemplateError("messages or tools are nested too deeply") from error
        except OutOfStandInsError as error:
            raise ChatTemplateError(str(error)) from error
        variables["add_generation_prompt"] = add_generation_prompt
        return self._template.render(variables | self._token_strings), disguise

    def _is_control_text(self, special_text: str) -> bool:
        return self._tokenizer.is_control(self._tokenizer.special_tokens[special_text])

    def _ends_thinking(self, pieces: Sequence[str | int]) -> bool:
        """Whether the last turn, that is what follows the last control token, leaves `<think>` open."""
        tokenizer = self._tokenizer
        open_id, close_id = tokenizer.special_token(_THINK), tokenizer.special_token(_END_THINK)
        for piece in reversed(pieces):
            if isinstance(piece, str):
                # Only vocabularies that lack the tags as tokens have them in text.
                opened, closed = piece.rfind(_THINK), piece.rfind(_END_THINK)
                if opened != closed:
                    return opened > closed
            elif piece in (open_id, close_id):
                return piece == open_id
            elif tokenizer.is_control(piece):
                return False
        return False


def _token_string(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def _disguised(message: Mapping[str, object], hide: Callable[[str], str]) -> dict[str, object]:
    """A message with its strings hidden, but for the plain words that templates look up and compare: field
    names and the role. In some vocabularies those words have tokens of their own, such as `<|user|>`."""
    disguised: dict[str, object] = {}
    for key, value in message.items():
        if key == "role" and isinstance(value, str) and is_word(value):
            disguised[key] = value
        else:
            disguised[key if is_word(key) else hide(key)] = with_strings_replaced(value, hide)
    return disguised


def _variables(template_kwargs: Mapping[str, object]) -> dict[str, object]:
    """The client's variables for the template. Raises `ChatTemplateError` for a name that is not free."""
    if taken := _RESERVED_NAMES.intersection(template_kwargs):
        raise ChatTemplateError(f"chat_template_kwargs must not set {sorted(taken)[0]!r}")
    variables = dict(template_kwargs)
    for name in ("reasoning_effort", "enable_thinking"):
        if name in variables and variables[name] is None:
            del variables[name]
    if variables.get("reasoning_effort") == "none":
        del variables["reasoning_effort"]
        variables["enable_thinking"] = False
    return variables


def _places_of(first: str | int, token_ids: Sequence[int]) -> list[int]:
    """Where that special token is, but the first of them; nowhere if it is text."""
    if isinstance(first, str):
        return []
    return [place for place, token_id in enumerate(token_ids) if token_id == first][1:]
