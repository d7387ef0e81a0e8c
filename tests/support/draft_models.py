"""Takes the prediction block out of a model file into a file of its own, as published models have it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from shared.gguf.file import StringArray
from shared.gguf.model import GGUFModel
from shared.model_config import ARCHITECTURE, read_model_config
from tools.gguf_writer import GGUFWriter, ValueType

_SCALARS = {bool: ValueType.BOOL, int: ValueType.UINT32, float: ValueType.FLOAT32, str: ValueType.STRING}
_ARRAYS = {
    "int32": ValueType.INT32,
    "uint32": ValueType.UINT32,
    "uint64": ValueType.UINT64,
    "int64": ValueType.INT64,
    "float32": ValueType.FLOAT32,
    "bool": ValueType.BOOL,
}


def split_draft(
    path: Path, folder: Path, change: Callable[[dict[str, object]], None] = lambda metadata: None
) -> tuple[Path, Path]:
    """Writes main.gguf, without the block, and draft.gguf, with the embedding beside it and without n-grams;
    `change` may alter the metadata of the draft model."""
    with GGUFModel(path) as model:
        num_layers = read_model_config(model).num_layers
        main: dict[str, object] = dict(model.metadata)
        draft = {key: value for key, value in main.items() if ".ple." not in key}
        del main[f"{ARCHITECTURE}.nextn_predict_layers"]
        main[f"{ARCHITECTURE}.block_count"] = num_layers
        for key in ("attention.compress_ratios", "attention.recurrent_layers"):
            listed = main.get(f"{ARCHITECTURE}.{key}")
            if isinstance(listed, np.ndarray):
                main[f"{ARCHITECTURE}.{key}"] = listed[:num_layers]
        change(draft)
        block = [name for name in model if name.startswith(f"blk.{num_layers}.")]
        rest = [name for name in model if name not in block]
        return (
            _write(model, main, rest, folder / "main.gguf"),
            _write(model, draft, ["token_embd.weight", *block], folder / "draft.gguf"),
        )


def _write(model: GGUFModel, metadata: dict[str, object], names: list[str], path: Path) -> Path:
    writer = GGUFWriter()
    for key, value in metadata.items():
        if isinstance(value, StringArray):
            writer.add_array(key, ValueType.STRING, list(value))
        elif isinstance(value, np.ndarray):
            writer.add_array(key, _ARRAYS[value.dtype.name], value.tolist())
        else:
            writer.add(key, _SCALARS[type(value)], value)
    for name in names:
        info = model.info(name)
        writer.add_tensor(name, info.type.name, info.shape, model.rows(name).tobytes())
    writer.write(path)
    return path
