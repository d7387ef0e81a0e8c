"""Writes the demo model as a GGUF file in F32, F16 or Q8_0.

The source is a checkpoint directory, or a GGUF file that this module wrote: a Q8_0 file written again as F32
holds exactly the weights it decodes to, which is what a numeric comparison with transformers needs.

    python -m tools.demo_model.convert CHECKPOINT_OR_GGUF OUTPUT.gguf [--type Q8_0]
    python -m tools.demo_model.convert CHECKPOINT_OR_GGUF OUTPUT_DIRECTORY --type checkpoint
"""

import argparse
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize

from tools.demo_model.checkpoint import Checkpoint
from tools.demo_model.metadata import write_metadata
from tools.demo_model.tensor_map import Array, Storage, links, split_fused
from tools.demo_model.to_transformers import load_checkpoint
from tools.gguf_writer import GGUFWriter

FILE_TYPES = {"F32": 0, "F16": 1, "Q8_0": 7}
"""Type of the matrices, and ggml's number for a file of them."""


def storage_type(storage: Storage, matrix_type: str) -> str:
    """The tensor type for a class of tensors in a file of `matrix_type`."""
    match storage:
        case Storage.MATRIX:
            return matrix_type
        case Storage.MIXER:
            return "F32" if matrix_type == "F32" else "F16"
        case Storage.EXACT:
            return "F32"


def encoded(array: Array, type_name: str) -> bytes:
    """The bytes of `array` in a tensor type."""
    return quantize(np.ascontiguousarray(array, np.float32), GGMLQuantizationType[type_name]).tobytes()


def write_gguf(checkpoint: Checkpoint, path: Path, matrix_type: str) -> None:
    """Writes every tensor of `checkpoint`. Raises ValueError for one that the table lacks."""
    writer = GGUFWriter()
    has_prediction = checkpoint.has_prediction
    write_metadata(writer, checkpoint.config, checkpoint.tokenizer, has_prediction, FILE_TYPES[matrix_type])
    floats = {name: weight.numpy() for name, weight in checkpoint.state.items() if weight.is_floating_point()}
    state = split_fused(floats, checkpoint.config)
    for link in links(checkpoint.config, has_prediction):
        array = link.encode(state.pop(link.checkpoint_name))
        type_name = storage_type(link.storage, matrix_type)
        writer.add_tensor(link.gguf_name, type_name, array.shape, encoded(array, type_name))
    if state:
        raise ValueError(f"tensors without a place in the file: {sorted(state)}")
    writer.write(path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="checkpoint directory or GGUF file")
    parser.add_argument("output", type=Path)
    parser.add_argument("--type", choices=[*FILE_TYPES, "checkpoint"], default="Q8_0")
    arguments = parser.parse_args()
    source: Path = arguments.source
    checkpoint = Checkpoint.load(source) if source.is_dir() else load_checkpoint(source)
    if arguments.type == "checkpoint":
        checkpoint.save(arguments.output)
    else:
        write_gguf(checkpoint, arguments.output, arguments.type)
        print(f"{arguments.output}: {arguments.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
