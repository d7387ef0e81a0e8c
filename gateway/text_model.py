"""The text side of a model: tokenizer and chat template, loaded once from the file's metadata."""

from dataclasses import dataclass

from gateway.chat_template import ChatTemplate, ChatTemplateError
from gateway.tokenizer import Tokenizer, TokenizerError
from shared.errors import UnsupportedModelError
from shared.gguf.model import GGUFModel

_TEMPLATE_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class TextModel:
    """What turns text into token ids and back. `chat_template` is None where the file has none."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def load_text_model(model: GGUFModel) -> TextModel:
    """Takes about a second for a large vocabulary. Raises UnsupportedModelError."""
    try:
        tokenizer = Tokenizer.from_metadata(model.metadata, str(model.path))
    except TokenizerError as error:
        raise UnsupportedModelError(str(error)) from error
    source = model.metadata.get(_TEMPLATE_KEY)
    if source is None:
        return TextModel(tokenizer, None)
    try:
        return TextModel(tokenizer, ChatTemplate(str(source), tokenizer))
    except ChatTemplateError as error:
        raise UnsupportedModelError(f"{model.path}: {_TEMPLATE_KEY} is not usable: {error}") from error
