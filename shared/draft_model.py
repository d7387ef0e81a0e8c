"""Opens a model, and with it a prediction block that comes in a file of its own, the *draft model*.

Such a file has the keys of the architecture with one block more than the model, `nextn_predict_layers` 1, and
the tensors of that block. Often it has an embedding and an output matrix too, for programs that run it alone:
here the model's own are used. Both together are one `GGUFModel`, as if the block were in the main file.
"""

from pathlib import Path

import numpy as np

from shared.errors import UnsupportedModelError
from shared.gguf.file import MetadataValue
from shared.gguf.model import GGUFModel
from shared.model_config import ARCHITECTURE, read_model_config
from shared.tensor_catalog import block_prefix, expected_tensors

_EMBEDDING = "token_embd.weight"
_LAYERS, _BLOCKS = "nextn_predict_layers", "block_count"
# What of the trunk the block is made for.
_SHAPE_KEYS = (
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.indexer.head_count",
    "attention.indexer.key_length",
    "attention.indexer.top_k",
    "rope.dimension_count",
    "rope.freq_base",
    "expert_count",
    "expert_used_count",
    "hyper_connection.count",
    "hyper_connection.low_rank",
)
# Values that files may leave to these defaults.
_DEFAULTS: dict[str, MetadataValue] = {_LAYERS: 0, "expert_weights_scale": 1.0, "expert_gating_func": 1}


def open_model(path: Path, draft_path: Path | None = None) -> GGUFModel:
    """The model, and the prediction block of a draft model where there is one. Raises ModelFileError, and
    UnsupportedModelError for a draft model that is none, or not one of this model, or not needed."""
    model = GGUFModel(path)
    if draft_path is None:
        return model
    draft = GGUFModel(draft_path)
    if value := _value(model, _LAYERS):
        raise UnsupportedModelError(
            f"{path}: {ARCHITECTURE}.{_LAYERS} is {value}: the model has a prediction block of its own; "
            f"leave --draft-model {draft_path} out"
        )
    num_layers = _check_draft(model, draft)
    prefix = block_prefix(num_layers)
    model.join(draft, [name for name in draft if name.startswith(prefix)], _metadata(model, draft))
    for tensor in expected_tensors(read_model_config(model), model):
        if tensor.name.startswith(prefix) and tensor.name not in model:
            raise UnsupportedModelError(f"{draft_path}: the tensor {tensor.name} is missing")
    return model


def _check_draft(model: GGUFModel, draft: GGUFModel) -> int:
    """Raises UnsupportedModelError unless the one is for the other; the number of the model's layers."""
    architecture = draft.metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise _refused(draft, "general.architecture", architecture, f"a draft model has {ARCHITECTURE!r}")
    if (value := _value(draft, _LAYERS)) != 1:
        raise _refused(draft, f"{ARCHITECTURE}.{_LAYERS}", value, "a draft model has 1 prediction block")
    num_layers, value = _value(model, _BLOCKS), _value(draft, _BLOCKS)
    if not isinstance(num_layers, int) or value != num_layers + 1:
        reason = f"that of {model.path} is {num_layers!r}, a draft model for it has one more"
        raise _refused(draft, f"{ARCHITECTURE}.{_BLOCKS}", value, reason)
    for key in (*_SHAPE_KEYS, *(key for key in _DEFAULTS if key != _LAYERS)):
        value, expected = _value(draft, key), _value(model, key)
        if value != expected:
            reason = f"in {model.path} it is {expected!r}; take the draft model that was made for this model"
            raise _refused(draft, f"{ARCHITECTURE}.{key}", value, reason)
    if _EMBEDDING in draft and _EMBEDDING in model:
        shape, expected_shape = draft.info(_EMBEDDING).shape, model.info(_EMBEDDING).shape
        if shape != expected_shape:
            raise UnsupportedModelError(
                f"{draft.path}: {_EMBEDDING} has shape {shape}, in {model.path} it has {expected_shape}; "
                "take the draft model that was made for this model"
            )
    return num_layers


def _metadata(model: GGUFModel, draft: GGUFModel) -> dict[str, MetadataValue]:
    """What is said of all blocks together."""
    ratios = f"{ARCHITECTURE}.attention.compress_ratios"
    recurrent = f"{ARCHITECTURE}.attention.recurrent_layers"
    names = [f"{ARCHITECTURE}.{key}" for key in (_LAYERS, _BLOCKS)]
    found = {name: draft.metadata[name] for name in names}
    of_blocks, of_layers = draft.metadata.get(ratios), model.metadata.get(ratios)
    if not isinstance(of_blocks, np.ndarray) or len(of_blocks) != _value(draft, _BLOCKS):
        raise _refused(draft, ratios, of_blocks, f"an array of {_value(draft, _BLOCKS)} is needed")
    if isinstance(of_layers, np.ndarray):
        found[ratios] = np.append(of_layers, of_blocks[-1:].astype(of_layers.dtype))
    if isinstance(listed := model.metadata.get(recurrent), np.ndarray):
        found[recurrent] = np.append(listed, np.zeros(1, listed.dtype))
    return found


def _value(model: GGUFModel, key: str) -> MetadataValue:
    """An array whose entries agree is what they are. Raises UnsupportedModelError for a key that is not
    there."""
    value = model.metadata.get(f"{ARCHITECTURE}.{key}", _DEFAULTS.get(key))
    if value is None:
        raise UnsupportedModelError(f"{model.path}: the key {ARCHITECTURE}.{key} is missing")
    if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
        same: int | float | bool = value[0].item()
        return same
    return value


def _refused(draft: GGUFModel, key: str, value: object, reason: str) -> UnsupportedModelError:
    shown = repr(value)
    return UnsupportedModelError(
        f"{draft.path}: {key} is {shown if len(shown) <= 80 else f'{shown[:77]}...'}; {reason}"
    )
