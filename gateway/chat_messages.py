"""Chat messages in the shape that chat templates expect.

Clients write what the OpenAI API allows; templates are written against plain dictionaries whose contents are
strings. Roles and required fields have been validated by the caller.
"""

import json
from collections.abc import Mapping, Sequence

from gateway.template_environment import ChatTemplateError

# Names under which clients send an assistant's earlier reasoning; templates read the first.
_REASONING_FIELDS = ("reasoning_content", "reasoning")


def prepare_messages(messages: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Copies of the messages, with

    * content as one string. Parts of text are joined with nothing between, as Qwen's own template joins
      them. Templates that handle parts themselves get a string too, where transformers would hand parts on:
      such templates take a string as well and write the same for it, while many others fail on a list or
      print it. No content (an assistant's tool calls) is "": templates add contents to strings, or would
      print "None".
    * arguments of tool calls as objects where they are JSON objects: the API sends them encoded, templates
      iterate over them or encode them themselves.
    * other keys whose value is null left out, since templates ask whether a key is defined.
    * an assistant's reasoning under `reasoning_content`, whichever name it came under.

    Raises `ChatTemplateError` for a content part that is not text.
    """
    return [_prepare(message, index) for index, message in enumerate(messages)]


def _prepare(message: Mapping[str, object], index: int) -> dict[str, object]:
    prepared = {key: value for key, value in message.items() if value is not None}
    prepared["content"] = _joined(message.get("content"), index)
    if isinstance(tool_calls := prepared.get("tool_calls"), list):
        prepared["tool_calls"] = [_with_decoded_arguments(call) for call in tool_calls]
    for name in _REASONING_FIELDS:
        if name in prepared:
            prepared.setdefault(_REASONING_FIELDS[0], prepared[name])
    return prepared


def _joined(content: object, index: int) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts = []
    for position, part in enumerate(content if isinstance(content, list) else [content]):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatTemplateError(
                f"messages[{index}].content[{position}] is of type {kind!r}; only 'text' parts are supported"
            )
        texts.append(text)
    return "".join(texts)


def _with_decoded_arguments(call: object) -> object:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError):  # a model may write anything; then the template gets it as it is
        return call
    if not isinstance(decoded, dict):
        return call
    return {**call, "function": {**function, "arguments": decoded}}
