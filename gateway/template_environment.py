"""Jinja as chat templates expect it, in a sandbox and with limits.

The dialect is that of Hugging Face transformers, for which chat templates are written: trimmed blocks, loop
controls, `raise_exception`, `strftime_now`, a `tojson` that escapes nothing, and `{% generation %}` blocks,
which only mark the assistant's text there and are passed through here.

What the limits are for. The template comes with the model file, so whoever starts the server chose it; the
client supplies only what it is rendered with. A client must not be able to blow up a sound template, and a
broken template must not stop the server. So the length of the output is bounded, and a deadline is checked
at every call, every pass of a loop and every piece of output; recursion is bounded by Python, `range` by the
sandbox, and `*` and `**`, with which one expression can ask for any amount of memory or time, by the limit
on length. What a hostile template can still build up inside variables before the deadline is not bounded.
"""

import json
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# A full context of a quarter of a million tokens is about a million characters; what is somewhat over shall
# still reach the check of its tokens, which gives the better message.
MAX_OUTPUT_CHARACTERS = 8_000_000
MAX_SECONDS = 10.0


class ChatTemplateError(ValueError):
    """Messages that the model's chat template refuses or fails on, with the reason for the client."""


class BoundedTemplate:
    """A compiled template. Immutable; may be rendered by several threads at once."""

    def __init__(
        self,
        template_source: str,
        *,
        max_characters: int = MAX_OUTPUT_CHARACTERS,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises `ChatTemplateError` for a template that does not parse."""
        self._max_characters = max_characters
        self._max_seconds = max_seconds
        self._clock = clock
        environment = _Sandbox(max_characters, now)
        try:
            tree = environment.parse(template_source)
            self.characters: frozenset[str] = _literal_characters(tree)
            """Every character the template itself can write."""
            _check_time_in_loops(tree, environment)
            self._template = environment.from_string(tree)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError) as error:  # Python's own limits on nesting
            raise ChatTemplateError("chat template is nested too deeply") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """The template's output. Raises `ChatTemplateError`, whatever goes wrong in the template."""
        deadline = _Deadline(self._clock, self._max_seconds)
        token = _deadline.set(deadline)
        try:
            pieces: list[str] = []
            num_characters = 0
            for piece in self._template.generate(dict(variables)):
                deadline.check()
                pieces.append(piece)
                num_characters += len(piece)
                if num_characters > self._max_characters:
                    raise ChatTemplateError(
                        f"the rendered chat is longer than {self._max_characters} characters; shorten it"
                    )
            return "".join(pieces)
        except ChatTemplateError:
            raise
        except RecursionError as error:
            raise ChatTemplateError("chat template recurses too deeply") from error
        except Exception as error:  # whatever operation the template tried: all of it is the template's
            raise ChatTemplateError(f"chat template failed: {str(error) or type(error).__name__}") from error
        finally:
            _deadline.reset(token)


class _Deadline:
    def __init__(self, clock: Callable[[], float], max_seconds: float) -> None:
        self._clock = clock
        self._max_seconds = max_seconds
        self._end = clock() + max_seconds

    def check(self) -> None:
        if self._clock() > self._end:
            raise ChatTemplateError(f"chat template took longer than {self._max_seconds:g} s")


# Of the render in progress in this thread: Jinja hands its environment no per-render state.
_deadline: ContextVar[_Deadline] = ContextVar("chat template deadline")


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def __init__(self, max_characters: int, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols])
        self._max_characters = max_characters
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: now().strftime(pattern)

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        _deadline.get().check()
        return super().call(context, target, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Estimates the size of the result: items of a repeated sequence, bits of a number."""
        match left, right:
            case (str() | list() | tuple(), int()):
                size = len(left) * right
            case (int(), str() | list() | tuple()):
                size = left * len(right)
            case (int(), int()) if operator == "**":
                size = left.bit_length() * right
            case (int(), int()):
                size = left.bit_length() + right.bit_length()
            case _:
                size = 0
        if size > self._max_characters:
            raise ChatTemplateError(f"chat template: the result of '{operator}' is too large")
        return super().call_binop(context, operator, left, right)

    def on_loop_pass(self) -> None:
        """Called at the start of each pass of each loop, through `call`, which checks the time."""


class _GenerationBlocks(Extension):
    """`{% generation %} ... {% endgeneration %}`: the body, in a scope of its own as in transformers."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Signature of transformers' filter. `ensure_ascii` is accepted and ignored: models are trained without
    escapes, and an escaped stand-in of `gateway.special_text` could not be turned back."""
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(str(message))


def _literal_characters(tree: nodes.Template) -> frozenset[str]:
    characters: set[str] = set()
    for data in tree.find_all(nodes.TemplateData):
        characters.update(data.data)
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            characters.update(constant.value)
    return frozenset(characters)


def _check_time_in_loops(tree: nodes.Template, environment: jinja2.Environment) -> None:
    """Puts a call of `_Sandbox.on_loop_pass` at the start of every loop's body."""
    for loop in tree.find_all(nodes.For):
        hook = nodes.EnvironmentAttribute("on_loop_pass", lineno=loop.lineno)
        call = nodes.Call(hook, [], [], None, None, lineno=loop.lineno)
        statement = nodes.ExprStmt(call, lineno=loop.lineno)
        loop.body.insert(0, statement.set_environment(environment))
