"""Shows what a model file is: architecture, tensor classes with their types and bytes, tokenizer.

Reads the header only, so the size of the file does not matter.
"""

import argparse
from collections import Counter, defaultdict
from pathlib import Path

from shared.draft_model import open_model
from shared.gguf.file import MetadataValue
from shared.gguf.model import GGUFModel
from shared.model_config import Qwen4ExpConfig, read_model_config
from shared.rope_scaling import ScalingType
from shared.tensor_catalog import TensorClass, check_tensors, classify


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `strata inspect`."""
    parser.add_argument("model_path", metavar="MODEL.gguf", type=Path, help="any one part of a split set")
    parser.add_argument(
        "--draft-model", metavar="PATH", type=Path, help="GGUF file with the model's prediction block"
    )


def run(parsed: argparse.Namespace) -> int:
    """Prints the report."""
    with open_model(parsed.model_path, parsed.draft_model) as model:
        config = read_model_config(model)
        print(
            "\n".join([*_files(model), *_architecture(config), *_tensors(model, config), *_tokenizer(model)])
        )
        check_tensors(model, config)
    return 0


def _files(model: GGUFModel) -> list[str]:
    parts = [
        f"  {part.path}  {_size(part.num_bytes)}, {len(part.tensors)} tensors, GGUF v{part.version}"
        for part in model.parts
    ]
    return ["files", *parts]


def _architecture(config: Qwen4ExpConfig) -> list[str]:
    num_recurrent = sum(config.is_recurrent)
    ngram = config.ngram
    lines = [
        "architecture qwen4exp",
        f"  layers              {config.num_layers}: {num_recurrent} delta net, "
        f"{config.num_layers - num_recurrent} attention; {config.num_prediction_layers} prediction block(s)",
        f"  hidden              {config.hidden}, {config.num_streams} streams of mixer rank "
        f"{config.stream_rank}",
        f"  experts             {config.num_experts}, {config.num_experts_used} used per token",
        f"  attention           {config.num_query_heads} query heads, {config.num_kv_heads} kv heads of "
        f"{config.head_dim}, rotary {config.rope_dim}, base {config.rope_base:g}",
        f"  indexer             {config.indexer.num_heads} heads of {config.indexer.head_dim}, "
        f"budget {config.indexer.token_budget} tokens, blocks of {max(config.compress_ratios)}",
        f"  delta net           {config.num_delta_key_heads} key heads, {config.num_delta_value_heads} value "
        f"heads of {config.delta_head_dim}",
        f"  context             {config.context_length} tokens{_scaling(config)}, "
        f"vocabulary {config.vocab_size}",
    ]
    if ngram is None:
        return [*lines, "  n-grams             none"]
    return [
        *lines,
        f"  n-grams             up to {ngram.ngram_size}, {ngram.num_heads} rows of {ngram.row_width} "
        f"per token, before layer {ngram.layer}",
    ]


def _scaling(config: Qwen4ExpConfig) -> str:
    scaling = config.rope_scaling
    return "" if scaling.type is ScalingType.NONE else f" ({scaling.description})"


def _tensors(model: GGUFModel, config: Qwen4ExpConfig) -> list[str]:
    num_bytes: Counter[TensorClass] = Counter()
    types: defaultdict[TensorClass, Counter[str]] = defaultdict(Counter)
    for name in model:
        info = model.info(name)
        tensor_class = classify(name, config)
        num_bytes[tensor_class] += info.num_bytes
        types[tensor_class][info.type.name] += 1
    lines = [f"tensors {_size(sum(num_bytes.values()))} in {sum(1 for _ in model)}"]
    for tensor_class in TensorClass:
        if tensor_class in num_bytes:
            kinds = ", ".join(f"{kind} x{count}" for kind, count in types[tensor_class].most_common())
            lines.append(f"  {tensor_class:<22}{_size(num_bytes[tensor_class]):>12}  {kinds}")
    return lines


def _tokenizer(model: GGUFModel) -> list[str]:
    def value(key: str) -> MetadataValue:
        return model.metadata.get(f"tokenizer.{key}", "missing")

    def length(key: str) -> int:
        found = value(key)
        return 0 if isinstance(found, str | int | float) else len(found)

    template = value("chat_template")
    template_text = f"{len(template.encode())} bytes" if isinstance(template, str) else "none"
    return [
        "tokenizer",
        f"  kind                {value('ggml.model')}, pre-tokenizer {value('ggml.pre')}",
        f"  tokens              {length('ggml.tokens')}, merges {length('ggml.merges')}",
        f"  end of text         {value('ggml.eos_token_id')}",
        f"  chat template       {template_text if template != 'missing' else 'none'}",
    ]


def _size(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
