"""Writes a transformers `Qwen4ExpForCausalLM` as a GGUF file, in all the ways such files are laid out.

Afterwards the model computes with the values that the file's bytes decode to, so it is an exact reference for
the file whatever its types. Formats of blocks have no encoder here: a tensor gets random valid blocks whose
values spread as much as its own did.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import Qwen4ExpForCausalLM

from shared.gguf.types import tensor_type_named
from tests.support.model_shapes import MERGES, Shape
from tests.support.quant_blocks import dequantize, random_rows, set_scale
from tests.support.vocabulary import byte_spelling
from tools.demo_model.config import ENDOFTEXT, IM_END, IM_START, IMAGE_PAD
from tools.demo_model.metadata import byte_level_tokenizer, write_metadata
from tools.demo_model.tensor_map import join_fused, links, split_fused
from tools.gguf_writer import GGUFWriter, ValueType

Array = NDArray[np.float32]

NGRAM_TABLE = "per_layer_token_embd.weight"

# Where the minimum of a block lies, and what it must be for a scale of 1 so that values average to zero.
_MINIMA = {"Q4_1": (2, -7.5), "Q5_1": (2, -15.5), "Q2_K": (82, 1.5), "Q4_K": (2, 7.5), "Q5_K": (2, 15.5)}
# How much larger than 1 / sqrt(fan in) matrices of the prediction block are, by part of their names.
_PREDICTION_GAINS = (
    ("_inject", 2.0),
    ("hc_", 3.0),
    ("ffn_gate_inp.", 2.0),
    ("indexer.", 1.5),
    ("attn_q", 1.5),
    ("attn_k", 1.5),
)


@dataclass(frozen=True, slots=True)
class FileLayout:
    """How a model is stored. The defaults are one plain F32 file."""

    types: Mapping[str, str] = field(default_factory=dict)
    """Tensor types by part of the tensor's name; the first part found in a name decides, F32 otherwise."""
    is_split: bool = False
    """Two files, the n-gram table in the second."""
    has_prediction: bool = False
    """With a prediction block of random weights, of which transformers knows nothing."""
    has_dense_prediction: bool = False
    """The prediction block sees everything: its compress ratio is 0."""
    has_head: bool = True
    """Without one the embedding serves as the output matrix, and the model is changed to do the same."""
    has_norm_matrices: bool = False
    """Norms of all streams as [streams, hidden]."""
    lists_recurrent_layers: bool = False
    """`attention.recurrent_layers` instead of the interval."""

    def type_of(self, tensor_name: str) -> str:
        """The type that a tensor is stored in."""
        return next((kind for part, kind in self.types.items() if part in tensor_name), "F32")


def write_model(
    model: Qwen4ExpForCausalLM, shape: Shape, layout: FileLayout, path: Path, seed: int
) -> list[Path]:
    """Writes the file or files and loads the decoded values back into `model`; returns the paths."""
    rng = np.random.default_rng(seed)
    writer = _EditedWriter(shape, layout)
    write_metadata(writer, shape, _tokenizer(), layout.has_prediction, file_type=0)
    stored = {
        name: value.detach().numpy()
        for name, value in model.state_dict().items()
        if value.is_floating_point()
    }
    pieces = split_fused(stored, shape)
    decoded_pieces = {}
    extents_of: dict[str, tuple[int, ...]] = {}

    def add(name: str, values: Array) -> Array:
        type_name = layout.type_of(name)
        raw, decoded = encode(values, type_name, rng)
        is_stream_norm = "norm" in name and values.shape == (shape.stream_width,)
        extents = (shape.hc_count, -1) if layout.has_norm_matrices and is_stream_norm else values.shape
        extents_of[name] = values.reshape(extents).shape
        writer.add_tensor(name, type_name, extents_of[name], raw)
        return decoded

    for link in links(shape, has_prediction=False):
        if link.gguf_name == "output.weight" and not layout.has_head:
            continue
        if link.checkpoint_name in pieces:
            encoded = np.ascontiguousarray(link.encode(pieces[link.checkpoint_name]))
            decoded_pieces[link.checkpoint_name] = link.decode(add(link.gguf_name, encoded))
    if not layout.has_head:
        decoded_pieces["lm_head.weight"] = decoded_pieces["model.embed_tokens.weight"]
    if layout.has_prediction:
        for name, extents in _prediction_tensors(shape, extents_of).items():
            add(name, _random_prediction(name, extents, rng))
    _load(model, join_fused(decoded_pieces))
    if layout.is_split:
        return writer.write_split(path, lambda name: name == NGRAM_TABLE)
    return writer.write(path)


def encode(values: Array, type_name: str, rng: np.random.Generator) -> tuple[bytes, Array]:
    """The bytes of a tensor in a type, and the values they decode to: those given for the float types."""
    match type_name:
        case "F32":
            return values.tobytes(), values
        case "F16":
            return values.astype(np.float16).tobytes(), values.astype(np.float16).astype(np.float32)
        case "BF16":
            rounded = torch.from_numpy(values).bfloat16()
            return rounded.view(torch.int16).numpy().tobytes(), rounded.float().numpy()
    rows = _random_blocks(type_name, values.reshape(-1, values.shape[-1]), rng)
    return rows.tobytes(), dequantize(type_name, rows).reshape(values.shape)


def _random_blocks(type_name: str, values: Array, rng: np.random.Generator) -> NDArray[np.uint8]:
    kind = tensor_type_named(type_name)
    num_rows, width = values.shape
    if width % kind.block_size:
        raise ValueError(f"rows of {width} weights do not divide into blocks of {type_name}")
    blocks = random_rows(type_name, num_rows, width, seed=int(rng.integers(2**31))).reshape(
        -1, kind.block_bytes
    )
    sign_and_spread = rng.choice([-1.0, 1.0], len(blocks)) * rng.uniform(0.7, 1.3, len(blocks))
    scale = (sign_and_spread * values.std() / _spread_at_scale_one(type_name)).astype(np.float32)
    _set_scales(type_name, blocks, scale)
    return blocks.reshape(num_rows, -1)


@lru_cache
def _spread_at_scale_one(type_name: str) -> float:
    """The standard deviation of a format's values where all codes are equally likely and scales are 1."""
    kind = tensor_type_named(type_name)
    blocks = random_rows(type_name, 64, kind.block_size, seed=0)
    _set_scales(type_name, blocks, np.ones(64, np.float32))
    return float(dequantize(type_name, blocks).std())


def _set_scales(type_name: str, blocks: NDArray[np.uint8], scale: Array) -> None:
    set_scale(type_name, blocks, scale)
    if type_name in _MINIMA:
        offset, factor = _MINIMA[type_name]
        minimum = (scale * factor).astype(np.float16)
        blocks[:, offset : offset + 2] = minimum.view(np.uint8).reshape(-1, 2)


def _load(model: Qwen4ExpForCausalLM, state: Mapping[str, Array]) -> None:
    tensors = {name: torch.from_numpy(np.array(values)) for name, values in state.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    # What the file does not hold are the integer constants of the n-gram hash.
    assert not unexpected
    assert all("ple_embedding" in name for name in missing), missing


def _prediction_tensors(shape: Shape, trunk: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Name and extents of the tensors of the prediction block: those of an attention layer, and its own."""
    hidden, width, rank = shape.hidden_size, shape.stream_width, shape.hc_lowrank
    prefix = f"blk.{shape.num_hidden_layers}."
    attention_layer = next(layer for layer in range(shape.num_hidden_layers) if shape.is_attention(layer))
    like_attention = f"blk.{attention_layer}."
    return {
        prefix + name.removeprefix(like_attention): extents
        for name, extents in trunk.items()
        if name.startswith(like_attention)
    } | {
        prefix + "nextn.enorm.weight": (hidden,),
        prefix + "nextn.hnorm.weight": (width,),
        prefix + "nextn.eh_proj.weight": (hidden, 2 * hidden),
        prefix + "nextn.hc_head_norm.weight": (width,),
        prefix + "nextn.hc_head_down.weight": (rank, width),
        prefix + "nextn.hc_head_up.weight": (width, rank),
    }


def _random_prediction(name: str, extents: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Drawn as the trunk's are (`tests.support.reference_model`), so that every part shows in the logits."""
    if "norm" in name:
        return rng.normal(1, 0.2, extents).astype(np.float32)
    gain = next((gain for part, gain in _PREDICTION_GAINS if part in name), 1.0)
    return rng.normal(0, gain * extents[-1] ** -0.5, extents).astype(np.float32)


@lru_cache
def _tokenizer() -> Tokenizer:
    tokens = [*byte_spelling().values(), *(left + right for left, right in MERGES)]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    return byte_level_tokenizer(vocabulary, list(MERGES), [ENDOFTEXT, IM_START, IM_END, IMAGE_PAD])


class _EditedWriter(GGUFWriter):
    """Takes the demo model's metadata, and changes what is different about this model."""

    def __init__(self, shape: Shape, layout: FileLayout) -> None:
        super().__init__()
        self._shape = shape
        self._layout = layout

    def add(self, key: str, value_type: ValueType, value: object) -> None:
        if self._is_left_out(key):
            return
        if key.endswith(".full_attention_interval") and self._lists_layers:
            num_blocks = self._shape.num_hidden_layers + int(self._layout.has_prediction)
            is_recurrent = [
                block < self._shape.num_hidden_layers and not self._shape.is_attention(block)
                for block in range(num_blocks)
            ]
            name = key.replace("full_attention_interval", "attention.recurrent_layers")
            super().add_array(name, ValueType.BOOL, is_recurrent)
            return
        super().add(key, value_type, value)
        if key.endswith(".rope.freq_base") and self._shape.yarn_factor > 1:
            prefix = key.replace("freq_base", "scaling.")
            super().add(f"{prefix}type", ValueType.STRING, "yarn")
            super().add(f"{prefix}factor", ValueType.FLOAT32, self._shape.yarn_factor)
            super().add(f"{prefix}original_context_length", ValueType.UINT32, self._shape.yarn_original)

    def add_array(self, key: str, element_type: ValueType, values: Sequence[object]) -> None:
        if self._is_left_out(key):
            return
        if key.endswith(".compress_ratios") and self._shape.is_dense:
            values = [0] * len(values)
        if key.endswith(".compress_ratios") and self._layout.has_dense_prediction:
            values = [*values[:-1], 0]
        super().add_array(key, element_type, values)

    @property
    def _lists_layers(self) -> bool:
        return self._layout.lists_recurrent_layers or bool(self._shape.attention_layers)

    def _is_left_out(self, key: str) -> bool:
        is_about_ngrams = ".ple." in key or key.endswith(".embedding_length_per_layer_input")
        return is_about_ngrams and not self._shape.has_ngram
