"""Models to measure with: a few layers of the real dimensions, random weights, the types of published files.

    python -m benchmarks.slices --profile iq2_xs [--layers 4] [--slice-dir DIR]
    python -m benchmarks.slices --profile iq2_xs --experts 32 --ngram-base 5500000

A slice has all 512 experts of each layer, the whole vocabulary, and everything a real file has, but fewer
layers and a small n-gram table. Blocks are random, of a spread that keeps activations sane, and are streamed
to disk: 4 layers are 4 to 8 GB. Every token is a word of its own, so that every generated token is text and
can be clocked by a client. A slice that was written once is used again.

The second one is for measuring reads of the n-gram table (`benchmarks.cold_start`): few experts, and a table
of 7.4 GiB, which is a quarter of the real one.

The profiles follow the tensor lists of published files, class by class.
"""

import argparse
import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase

import numpy as np

from benchmarks.arguments import positive
from benchmarks.blocks import Floats, random_blocks
from shared.cli.progress import ProgressLine
from shared.gguf.types import TensorType, tensor_type_named
from tools.demo_model.config import CONTROL_TOKENS, ENDOFTEXT, DemoConfig
from tools.demo_model.metadata import byte_level_tokenizer, write_metadata
from tools.demo_model.ngrams import ngram_hash
from tools.gguf_writer import GGUFWriter, TensorData, ValueType, Write

VERSION = 1
"""Raised when slices are to be written anew."""

VOCABULARY = 248320

REAL = DemoConfig(
    vocab_size=VOCABULARY,
    hidden_size=2560,
    num_hidden_layers=4,
    full_attention_interval=4,
    max_position_embeddings=262144,
    num_attention_heads=24,
    num_key_value_heads=2,
    head_dim=256,
    partial_rotary_factor=0.25,
    rope_theta=1e7,
    mrope_section=(11, 11, 10),
    indexer_n_heads=4,
    indexer_head_dim=128,
    indexer_budget=2048,
    indexer_compress_ratio=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=48,
    num_experts=512,
    num_experts_per_tok=10,
    moe_intermediate_size=640,
    shared_expert_intermediate_size=640,
    hc_count=4,
    hc_lowrank=320,
    ple_layer=1,
    ple_embed_dim=2560,
    heads_per_ngram=8,
    # 20 million in the real model: the table's size decides nothing once its rows are in memory.
    ngram_vocab_size_base=100_000,
    eos_token_id=VOCABULARY - len(CONTROL_TOKENS),
)
"""Qwen3.8-Flash-Next, but for its depth and the length of its n-gram table."""

# Tensor types by part of a tensor's name; the first part found in a name decides. Rows that are no multiple
# of 256 wide (n-gram table, mixers' up, both kinds of down) need smaller blocks, as in published files.
PROFILES: Mapping[str, Mapping[str, str]] = {
    "ista-iq2xs": {
        "norm": "F32",
        "hc_": "BF16",
        "per_layer_token_embd": "IQ4_NL",
        "token_embd": "IQ4_XS",
        "attn_output": "IQ4_XS",
        "output.weight": "IQ4_XS",
        "ple_conv1d": "F16",
        "ple_": "BF16",
        "down_exps": "Q2_0",
        "_exps": "IQ2_S",
        "gate_inp": "F32",
        "down_shexp": "IQ4_NL",
        "_shexp": "IQ4_XS",
        "indexer": "BF16",
        "ssm_alpha": "BF16",
        "ssm_beta": "BF16",
        "ssm_out": "IQ4_XS",
        "ssm_": "F32",
        "attn_": "IQ4_XS",
    },
    "iq2_xs": {
        "norm": "F32",
        "inject": "F32",
        "hc_": "Q8_0",
        "per_layer_token_embd": "IQ4_NL",
        "token_embd": "Q4_K",
        "attn_output": "Q4_K",
        "output.weight": "Q4_K",
        "ple_conv1d": "F32",
        "ple_": "Q8_0",
        "down_exps": "IQ4_NL",
        "_exps": "IQ2_XS",
        "gate_inp": "F32",
        "down_shexp": "IQ4_NL",
        "_shexp": "Q4_K",
        "indexer": "BF16",
        "ssm_out": "Q4_K",
        "ssm_": "F32",
        "attn_": "Q4_K",
    },
    "q4_k": {
        "norm": "F32",
        "inject": "F32",
        "hc_": "Q8_0",
        "per_layer_token_embd": "IQ4_NL",
        "token_embd": "Q4_K",
        "attn_output": "Q4_K",
        "output.weight": "Q6_K",
        "ple_conv1d": "F32",
        "ple_": "Q8_0",
        "down_exps": "Q5_1",
        "_exps": "Q4_K",
        "gate_inp": "F32",
        "_shexp": "Q8_0",
        "indexer": "BF16",
        "ssm_out": "Q4_K",
        "ssm_": "F32",
        "attn_": "Q4_K",
    },
}

# How much larger than 1 / sqrt(row width) the entries of a matrix are: peaked enough that logits, routes and
# gates differ, as those of a trained model do.
_GAINS = (
    ("per_layer_token_embd", None),
    ("token_embd", None),
    ("attn_output", 1.0),
    ("output.weight", 2.5),
    ("gate_inp", 2.0),
    ("inject", 2.0),
)
_PIECE_BYTES = 16 << 20
_SPARE_DISK_BYTES = 1 << 30
_FILE_TYPES = {"ista-iq2xs": 28, "iq2_xs": 20, "q4_k": 15}
"""ggml's number for the mixture that a file is mostly of."""

Progress = Callable[[str, float], None]


def default_directory() -> Path:
    """Where slices are kept unless a caller says otherwise."""
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "strata-benchmarks"


def slice_path(directory: Path, profile: str, config: DemoConfig) -> Path:
    """Where a slice lies once it is written. Its name says in what it differs from the real model."""
    parts = [profile, f"{config.num_hidden_layers}-layers"]
    if config.num_experts != REAL.num_experts:
        parts.append(f"{config.num_experts}-experts")
    if config.ngram_vocab_size_base != REAL.ngram_vocab_size_base:
        parts.append(f"{config.ngram_vocab_size_base}-ngrams")
    return directory / f"{'-'.join(parts)}-v{VERSION}.gguf"


def ensure_slice(directory: Path, profile: str, config: DemoConfig) -> Path:
    """The slice's path, written first where it is not there. Raises OSError where the disk is too small."""
    path = slice_path(directory, profile, config)
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    num_bytes, room = slice_bytes(config, profile), shutil.disk_usage(directory).free
    if num_bytes + _SPARE_DISK_BYTES > room:
        raise OSError(f"{path} takes {num_bytes / 1e9:.1f} GB, {directory} has {room / 1e9:.1f} GB left")
    progress = ProgressLine()
    # Under its own name only once it is whole: what was interrupted is not taken for a slice.
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write_slice(part, config, profile, seed=0, report=progress.update)
        part.rename(path)
    finally:
        progress.done()
        part.unlink(missing_ok=True)
    return path


def add_model_arguments(
    parser: argparse.ArgumentParser,
    experts: int = REAL.num_experts,
    ngram_base: int = REAL.ngram_vocab_size_base,
) -> None:
    """What names the model to measure with: a slice by its profile, these being its defaults, or a file."""
    parser.add_argument(
        "--profile",
        help=f"a slice to measure with: {', '.join(PROFILES)}; with --model a name for the results",
    )
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="measure with this file instead")
    add_slice_arguments(parser, experts, ngram_base)


def add_slice_arguments(
    parser: argparse.ArgumentParser,
    experts: int = REAL.num_experts,
    ngram_base: int = REAL.ngram_vocab_size_base,
) -> None:
    """What a slice is like, with these defaults, and where it is."""
    for name, default, meaning in (
        ("layers", REAL.num_hidden_layers, "of a slice"),
        ("experts", experts, "of each layer of a slice"),
        ("ngram-base", ngram_base, "rows of each of the 16 parts of its n-gram table, about"),
    ):
        parser.add_argument(
            f"--{name}", type=positive, default=default, metavar="N", help=f"{meaning} (default %(default)s)"
        )
    parser.add_argument("--slice-dir", type=Path, default=default_directory(), help="default %(default)s")


def check_model_arguments(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Ends the program where they name none, or a slice that no model can be like."""
    if parsed.model is None and parsed.profile not in PROFILES:
        parser.error(f"name a --profile ({', '.join(PROFILES)}) or a --model")
    check_slice_arguments(parser, parsed)


def check_slice_arguments(parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Ends the program where no model can be like that."""
    for flag, value, least in (
        # The n-gram table is used in the second layer.
        ("--layers", parsed.layers, REAL.ple_layer + 1),
        ("--experts", parsed.experts, REAL.num_experts_per_tok),
    ):
        if value < least:
            parser.error(f"argument {flag}: {value} is too few, {least} is the least")


def model_path(parsed: argparse.Namespace) -> Path:
    """The file they name, a slice written first where it is not there. Raises OSError."""
    return parsed.model or ensure_slice(parsed.slice_dir, parsed.profile, slice_config(parsed))


def slice_config(parsed: argparse.Namespace) -> DemoConfig:
    """What the slice is like that they describe."""
    return replaced(
        REAL,
        num_hidden_layers=parsed.layers,
        num_experts=parsed.experts,
        ngram_vocab_size_base=parsed.ngram_base,
    )


def replaced(config: DemoConfig, **changes: int) -> DemoConfig:
    """A copy with other numbers."""
    values = {name: getattr(config, name) for name in DemoConfig.__dataclass_fields__}
    return DemoConfig(**values | changes)


def slice_bytes(config: DemoConfig, profile: str) -> int:
    """Bytes of all tensors."""
    return sum(_num_bytes(type_of(profile, name), shape) for name, shape in tensors(config))


def type_of(profile: str, name: str) -> TensorType:
    """The type that a tensor has in a profile."""
    is_vector = name.endswith(("ffn_gate_inp_shexp.weight", "ssm_a", "ssm_dt.bias"))
    types = PROFILES[profile]
    return tensor_type_named("F32" if is_vector else next(t for part, t in types.items() if part in name))


def write_slice(path: Path, config: DemoConfig, profile: str, seed: int, report: Progress) -> None:
    """Writes one file. `report` is told what is being written and how far it is, from 0 to 1."""
    rng = np.random.Generator(np.random.SFC64(seed))
    writer = _SliceWriter(f"Strata benchmark slice, {profile}, {config.num_hidden_layers} layers")
    tokenizer = byte_level_tokenizer(*_vocabulary(config.vocab_size - len(CONTROL_TOKENS)), CONTROL_TOKENS)
    assert tokenizer.token_to_id(ENDOFTEXT) == config.eos_token_id
    write_metadata(writer, config, tokenizer, has_prediction=False, file_type=_FILE_TYPES[profile])
    num_total = slice_bytes(config, profile)
    num_written = 0

    def told(name: str, data: Iterator[bytes]) -> TensorData:
        def stream(write: Write) -> None:
            nonlocal num_written
            for piece in data:
                write(piece)
                num_written += len(piece)
                report(f"writing the slice, {name}", num_written / num_total)

        return stream

    for name, shape in tensors(config):
        kind = type_of(profile, name)
        writer.add_tensor(name, kind.name, shape, told(name, _random_tensor(name, kind, shape, rng)))
    writer.write(path)


class _SliceWriter(GGUFWriter):
    """Takes the demo model's metadata under another name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def add(self, key: str, value_type: ValueType, value: object) -> None:
        super().add(key, value_type, self._name if key == "general.name" else value)


def _vocabulary(num_tokens: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """So many ordinary tokens and a few merges: every byte, and words of four letters and a blank."""
    spelling = byte_spelling()
    blank = spelling[0x20]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), (blank, "t")]
    tokens = [*spelling, *(left + right for left, right in merges)]
    words = (blank + "".join(letters) for letters in product(ascii_lowercase, repeat=4))
    tokens += islice(words, num_tokens - len(tokens))
    return {token: token_id for token_id, token in enumerate(tokens)}, merges


def byte_spelling() -> list[str]:
    """The character by which a byte-level vocabulary spells each byte: itself where Latin-1 shows it."""
    spelling, spare = [], 256
    for byte in range(256):
        if 0x21 <= byte < 0x7F or (byte >= 0xA1 and byte != 0xAD):
            spelling.append(chr(byte))
        else:
            spelling.append(chr(spare))
            spare += 1
    return spelling


def _num_bytes(kind: TensorType, shape: Sequence[int]) -> int:
    return math.prod(shape[:-1]) * kind.row_bytes(shape[-1])


def _random_tensor(
    name: str, kind: TensorType, shape: tuple[int, ...], rng: np.random.Generator
) -> Iterator[bytes]:
    """The bytes of one tensor, a piece at a time."""
    num_blocks = math.prod(shape) // kind.block_size
    blocks_per_piece = max(1, _PIECE_BYTES // kind.block_bytes)
    for first in range(0, num_blocks, blocks_per_piece):
        count = min(blocks_per_piece, num_blocks - first)
        if kind.name in ("F32", "F16", "BF16"):
            yield _encode(kind.name, _floats(name, count, shape, rng))
        else:
            yield random_blocks(kind.name, count, _spread(name, shape), rng).tobytes()


def _floats(name: str, count: int, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    if name.endswith("ssm_a"):
        # From hardly any decay to much of it within a token.
        return -np.exp(rng.uniform(math.log(0.05), math.log(2), count)).astype(np.float32)
    if name.endswith("ssm_dt.bias"):
        return rng.uniform(-3, 1, count).astype(np.float32)
    drawn = rng.standard_normal(count, np.float32)
    if "norm" in name:
        return np.float32(1) + np.float32(0.1) * drawn
    return np.float32(0.4 if "conv1d" in name else _spread(name, shape)) * drawn


def _spread(name: str, shape: tuple[int, ...]) -> float:
    gain = next((gain for part, gain in _GAINS if part in name), 1.0)
    # Rows that are looked up, not multiplied with, are as large as what they are added to.
    return 1.0 if gain is None else gain * shape[-1] ** -0.5


def _encode(type_name: str, values: Floats) -> bytes:
    if type_name == "F16":
        return values.astype(np.float16).tobytes()
    if type_name == "BF16":
        # The upper half of F32; which way random numbers are rounded is all the same.
        return values.view(np.uint16)[1::2].tobytes()
    return values.tobytes()


def tensors(config: DemoConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape, rows first, of every tensor of the file."""
    hidden, width = config.hidden_size, config.stream_width
    yield "token_embd.weight", (config.vocab_size, hidden)
    yield "output.weight", (config.vocab_size, hidden)
    yield from _named("output_hc_", _mixer(config, has_inject=False))
    row_width = config.ple_embed_dim // config.num_ngram_heads
    yield "per_layer_token_embd.weight", (ngram_hash(config).num_rows, row_width)
    for layer in range(config.num_hidden_layers):
        for part in ("attn", "ffn"):
            yield from _named(f"blk.{layer}.hc_{part}_", _mixer(config))
        mixing = _attention(config) if config.is_attention(layer) else _delta_net(config)
        yield from _named(f"blk.{layer}.", mixing)
        if layer == config.ple_layer:
            yield from _named(
                f"blk.{layer}.ple_",
                {
                    "key.weight": (width, config.ple_embed_dim),
                    "value.weight": (hidden, config.ple_embed_dim),
                    "conv1d.weight": (width, config.ple_conv_kernel_size),
                    **{f"norm_{part}.weight": (width,) for part in ("key", "query", "conv")},
                },
            )
        yield from _named(f"blk.{layer}.ffn_", _experts(config))


def _named(prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((prefix + name, shape) for name, shape in shapes.items())


def _mixer(config: DemoConfig, *, has_inject: bool = True) -> dict[str, tuple[int, ...]]:
    width, rank = config.stream_width, config.hc_lowrank
    shapes: dict[str, tuple[int, ...]] = {
        "norm.weight": (width,),
        "down.weight": (rank, width),
        "up.weight": (width, rank),
    }
    return shapes | ({"inject.weight": (config.hc_count, width)} if has_inject else {})


def _attention(config: DemoConfig) -> dict[str, tuple[int, ...]]:
    hidden, head_dim = config.hidden_size, config.head_dim
    query, key_value = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    return {
        # Each head's query, then its gate.
        "attn_q.weight": (2 * query, hidden),
        "attn_k.weight": (key_value, hidden),
        "attn_v.weight": (key_value, hidden),
        "attn_output.weight": (hidden, query),
        "attn_q_norm.weight": (head_dim,),
        "attn_k_norm.weight": (head_dim,),
        "indexer.q_proj.weight": (config.indexer_n_heads * config.indexer_head_dim, hidden),
        "indexer.k_proj.weight": (config.indexer_head_dim, hidden),
        "indexer.q_norm.weight": (config.indexer_head_dim,),
        "indexer.k_norm.weight": (config.indexer_head_dim,),
    }


def _delta_net(config: DemoConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads, inner = config.hidden_size, config.linear_num_value_heads, config.linear_value_dim
    channels = 2 * config.linear_key_dim + inner
    return {
        "attn_qkv.weight": (channels, hidden),
        "attn_gate.weight": (inner, hidden),
        "ssm_conv1d.weight": (channels, config.linear_conv_kernel_dim),
        "ssm_dt.bias": (heads,),
        "ssm_a": (heads,),
        "ssm_alpha.weight": (heads, hidden),
        "ssm_beta.weight": (heads, hidden),
        "ssm_norm.weight": (config.linear_value_head_dim,),
        "ssm_out.weight": (hidden, inner),
    }


def _experts(config: DemoConfig) -> dict[str, tuple[int, ...]]:
    hidden, experts = config.hidden_size, config.num_experts
    routed, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    return {
        "gate_inp.weight": (experts, hidden),
        "gate_exps.weight": (experts, routed, hidden),
        "up_exps.weight": (experts, routed, hidden),
        "down_exps.weight": (experts, hidden, routed),
        "gate_inp_shexp.weight": (hidden,),
        "gate_shexp.weight": (shared, hidden),
        "up_shexp.weight": (shared, hidden),
        "down_shexp.weight": (hidden, shared),
    }


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--profile", required=True, choices=list(PROFILES))
    add_slice_arguments(parser)
    parsed = parser.parse_args()
    check_slice_arguments(parser, parsed)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        path = ensure_slice(parsed.slice_dir, parsed.profile, slice_config(parsed))
    except OSError as error:
        print(f"slices: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{path} {path.stat().st_size / 1e9:.2f} GB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
