"""A valid `qwen4exp` file of about a megabyte with random weights, for tests that only need a model to load.

Names and shapes are written out here from the description of the format, not taken from
`shared.tensor_catalog`, so that the two check each other. Everything is F32, for which no kernel is compiled.
Tests change what they want to be different before they write it.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tests.support.vocabulary import small_vocabulary
from tools.gguf_writer import GGUFWriter, TensorData, ValueType, Write

# One attention layer after three of delta nets; n-grams before the second.
NUM_LAYERS = 4
ATTENTION_LAYER = 3
NGRAM_LAYER = 1
HIDDEN = 64
STREAMS = 2
NUM_EXPERTS = 8
EXPERT_WIDTH = 32
ROW_WIDTH = 32
# Two heads for pairs of tokens, two for triples.
HEAD_SIZES = (101, 103, 107, 109)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_UINT, _INT, _FLOAT, _STRING = ValueType.UINT32, ValueType.INT32, ValueType.FLOAT32, ValueType.STRING


@dataclass(slots=True)
class TinyTensor:
    """One tensor; `data` None is filled with random values when it is written."""

    shape: tuple[int, ...]
    type_name: str = "F32"
    data: TensorData | None = None


@dataclass(slots=True)
class TinyModel:
    """What the file will hold. `metadata` maps a key to type and value; a list is an array of the type."""

    metadata: dict[str, tuple[ValueType, object]] = field(default_factory=dict)
    tensors: dict[str, TinyTensor] = field(default_factory=dict)
    seed: int = 0

    def set(self, key: str, value: object) -> None:
        """Changes the value of a `qwen4exp.*` key and keeps its type."""
        name = f"qwen4exp.{key}"
        self.metadata[name] = (self.metadata[name][0], value)

    def drop(self, key: str) -> None:
        """Leaves a `qwen4exp.*` key out."""
        del self.metadata[f"qwen4exp.{key}"]

    def drop_ngrams(self) -> None:
        """Leaves the n-gram embedding out."""
        self.metadata = {key: entry for key, entry in self.metadata.items() if ".ple." not in key}
        self.tensors = {
            name: tensor
            for name, tensor in self.tensors.items()
            if "ple_" not in name and not name.startswith("per_layer")
        }

    def write(self, path: Path) -> Path:
        """Writes one file."""
        self._writer().write(path)
        return path

    def write_split(self, path: Path, in_second_part: Callable[[str], bool]) -> list[Path]:
        """Writes two parts, named after `path`."""
        return self._writer().write_split(path, in_second_part)

    def _writer(self) -> GGUFWriter:
        writer = GGUFWriter()
        for key, (kind, value) in self.metadata.items():
            if isinstance(value, list):
                writer.add_array(key, kind, value)
            else:
                writer.add(key, kind, value)
        for number, (name, tensor) in enumerate(self.tensors.items()):
            data = tensor.data if tensor.data is not None else self._random(number, name, tensor.shape)
            writer.add_tensor(name, tensor.type_name, tensor.shape, data)
        return writer

    def _random(self, number: int, name: str, shape: tuple[int, ...]) -> bytes:
        """Values of a spread as in real matrices; a piece of the same noise for each tensor, to be quick."""
        places = np.arange(prod(shape)) + 7919 * number
        values: NDArray[np.float32] = shape[-1] ** -0.5 * _noise(self.seed).take(places, mode="wrap")
        if name.endswith("ssm_a"):
            # Decay rates are negative; positive ones would let the state grow without bounds.
            values = -np.abs(values)
        return values.astype(np.float32).tobytes()


@cache
def _noise(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(1 << 16, np.float32)


_vocabulary = cache(small_vocabulary)


def hole(num_bytes: int) -> TensorData:
    """The data of a tensor of any size that takes no room on disk. Not for the last tensor of a file."""

    def skip(write: Write) -> None:
        write.__self__.seek(num_bytes, os.SEEK_CUR)  # type: ignore[attr-defined]

    return skip


def tiny_model(seed: int = 0, *, has_prediction: bool = False) -> TinyModel:
    """A fresh description, to be changed and written; with a prediction block behind the layers, or
    without."""
    vocabulary = _vocabulary()
    vocab_size = len(vocabulary["tokenizer.ggml.tokens"])  # type: ignore[arg-type]
    model = TinyModel(seed=seed)
    model.metadata["general.architecture"] = (_STRING, "qwen4exp")
    model.metadata["general.name"] = (_STRING, "tiny")
    for key, entry in _architecture(end_of_text=vocab_size - 3).items():
        model.metadata[f"qwen4exp.{key}"] = entry
    for key, value in vocabulary.items():
        model.metadata[key] = _tokenizer_entry(key, value)
    model.metadata["tokenizer.chat_template"] = (_STRING, CHAT_TEMPLATE)
    for name, shape in _tensors(vocab_size):
        model.tensors[name] = TinyTensor(shape)
    if has_prediction:
        model.set("block_count", NUM_LAYERS + 1)
        model.set("attention.compress_ratios", [0, 0, 0, 4, 4])
        model.metadata["qwen4exp.nextn_predict_layers"] = (_UINT, 1)
        for name, shape in _prediction():
            model.tensors[f"blk.{NUM_LAYERS}.{name}"] = TinyTensor(shape)
    return model


def _architecture(end_of_text: int) -> dict[str, tuple[ValueType, object]]:
    offsets = [sum(HEAD_SIZES[:head]) for head in range(len(HEAD_SIZES))]
    return {
        "block_count": (_UINT, NUM_LAYERS),
        "context_length": (_UINT, 512),
        "embedding_length": (_UINT, HIDDEN),
        "attention.head_count": (_UINT, 2),
        "attention.head_count_kv": (_UINT, 1),
        "attention.key_length": (_UINT, 32),
        "attention.value_length": (_UINT, 32),
        "attention.layer_norm_rms_epsilon": (_FLOAT, 1e-6),
        "rope.dimension_count": (_UINT, 16),
        "rope.freq_base": (_FLOAT, 10000.0),
        "expert_count": (_UINT, NUM_EXPERTS),
        "expert_used_count": (_UINT, 2),
        "ssm.conv_kernel": (_UINT, 4),
        "ssm.state_size": (_UINT, 16),
        "ssm.group_count": (_UINT, 2),
        "ssm.time_step_rank": (_UINT, 4),
        "ssm.inner_size": (_UINT, 64),
        "full_attention_interval": (_UINT, 4),
        "hyper_connection.count": (_UINT, STREAMS),
        "hyper_connection.low_rank": (_UINT, 16),
        "attention.indexer.head_count": (_UINT, 2),
        "attention.indexer.key_length": (_UINT, 32),
        "attention.indexer.top_k": (_UINT, 16),
        "attention.compress_ratios": (_INT, [0, 0, 0, 4]),
        "ple.layers": (_INT, [NGRAM_LAYER]),
        "ple.ngram_size": (_UINT, 3),
        "ple.heads_per_ngram": (_UINT, 2),
        "ple.conv_kernel": (_UINT, 4),
        "ple.eos_token_id": (_UINT, end_of_text),
        "embedding_length_per_layer_input": (_UINT, ROW_WIDTH),
        "ple.layer_multipliers": (ValueType.UINT64, [23703573157769, 20109073645365, 8052911324071]),
        "ple.head_vocab_sizes": (ValueType.UINT64, list(HEAD_SIZES)),
        "ple.head_offsets": (ValueType.UINT64, offsets),
    }


def _tokenizer_entry(key: str, value: object) -> tuple[ValueType, object]:
    if key.endswith(".token_type"):
        return ValueType.INT32, value
    if isinstance(value, bool):
        return ValueType.BOOL, value
    return (_UINT if isinstance(value, int) else _STRING), value


def _tensors(vocab_size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, features = STREAMS * HIDDEN, len(HEAD_SIZES) * ROW_WIDTH
    yield "token_embd.weight", (vocab_size, HIDDEN)
    yield "output.weight", (vocab_size, HIDDEN)
    yield "output_hc_norm.weight", (width,)
    yield "output_hc_down.weight", (16, width)
    yield "output_hc_up.weight", (width, 16)
    # A few rows more than the heads address, as in published files.
    yield "per_layer_token_embd.weight", (sum(HEAD_SIZES) + 4, ROW_WIDTH)
    ple = f"blk.{NGRAM_LAYER}.ple_"
    yield f"{ple}key.weight", (width, features)
    yield f"{ple}value.weight", (HIDDEN, features)
    yield f"{ple}conv1d.weight", (width, 4)
    for norm in ("key", "query", "conv"):
        yield f"{ple}norm_{norm}.weight", (width,)
    for layer in range(NUM_LAYERS):
        tensors = _attention() if layer == ATTENTION_LAYER else _delta_net()
        for name, shape in (*_mixers(width), *tensors, *_mixture()):
            yield f"blk.{layer}.{name}", shape


def _prediction() -> Iterator[tuple[str, tuple[int, ...]]]:
    width = STREAMS * HIDDEN
    yield from (*_mixers(width), *_attention(), *_mixture())
    yield "nextn.enorm.weight", (HIDDEN,)
    yield "nextn.hnorm.weight", (width,)
    yield "nextn.eh_proj.weight", (HIDDEN, 2 * HIDDEN)
    yield "nextn.hc_head_norm.weight", (width,)
    yield "nextn.hc_head_down.weight", (16, width)
    yield "nextn.hc_head_up.weight", (width, 16)


def _mixers(width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    for part in ("attn", "ffn"):
        yield f"hc_{part}_norm.weight", (width,)
        yield f"hc_{part}_down.weight", (16, width)
        yield f"hc_{part}_up.weight", (width, 16)
        yield f"hc_{part}_inject.weight", (STREAMS, width)


def _attention() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_q.weight", (2 * 2 * 32, HIDDEN)
    yield "attn_k.weight", (32, HIDDEN)
    yield "attn_v.weight", (32, HIDDEN)
    yield "attn_output.weight", (HIDDEN, 2 * 32)
    yield "attn_q_norm.weight", (32,)
    yield "attn_k_norm.weight", (32,)
    yield "indexer.q_proj.weight", (2 * 32, HIDDEN)
    yield "indexer.k_proj.weight", (32, HIDDEN)
    yield "indexer.q_norm.weight", (32,)
    yield "indexer.k_norm.weight", (32,)


def _delta_net() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "attn_qkv.weight", ((2 + 2 + 4) * 16, HIDDEN)
    yield "attn_gate.weight", (4 * 16, HIDDEN)
    yield "ssm_conv1d.weight", ((2 + 2 + 4) * 16, 4)
    yield "ssm_dt.bias", (4,)
    yield "ssm_a", (4,)
    yield "ssm_alpha.weight", (4, HIDDEN)
    yield "ssm_beta.weight", (4, HIDDEN)
    yield "ssm_norm.weight", (16,)
    yield "ssm_out.weight", (HIDDEN, 4 * 16)


def _mixture() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "ffn_gate_inp.weight", (NUM_EXPERTS, HIDDEN)
    yield "ffn_gate_exps.weight", (NUM_EXPERTS, EXPERT_WIDTH, HIDDEN)
    yield "ffn_up_exps.weight", (NUM_EXPERTS, EXPERT_WIDTH, HIDDEN)
    yield "ffn_down_exps.weight", (NUM_EXPERTS, HIDDEN, EXPERT_WIDTH)
    yield "ffn_gate_inp_shexp.weight", (HIDDEN,)
    yield "ffn_gate_shexp.weight", (48, HIDDEN)
    yield "ffn_up_shexp.weight", (48, HIDDEN)
    yield "ffn_down_shexp.weight", (HIDDEN, 48)
