"""Turns a demo GGUF file back into a transformers model: what numeric tests compare Strata with."""

from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from tokenizers import Tokenizer
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from tools.demo_model.checkpoint import Checkpoint
from tools.demo_model.metadata import read_config, read_tokenizer
from tools.demo_model.ngrams import ngram_hash
from tools.demo_model.tensor_map import join_fused, links


def load_checkpoint(path: Path) -> Checkpoint:
    """Decodes every tensor of the file to float32, the prediction block included."""
    reader = GGUFReader(path)
    config = read_config(reader)
    arrays = {}
    for tensor in reader.tensors:
        shape = tuple(int(extent) for extent in reversed(tensor.shape))
        kind = GGMLQuantizationType(tensor.tensor_type)
        arrays[tensor.name] = dequantize(tensor.data, kind).astype(np.float32).reshape(shape)
    has_prediction = any(".nextn." in name for name in arrays)
    split = {
        link.checkpoint_name: link.decode(arrays[link.gguf_name]) for link in links(config, has_prediction)
    }
    state = {name: torch.from_numpy(np.array(array)) for name, array in join_fused(split).items()}
    constants = ngram_hash(config)
    prefix = f"model.layers.{config.ple_layer}.ple.ple_embedding."
    state[prefix + "layer_multipliers"] = torch.tensor(constants.multipliers)
    state[prefix + "ngram_heads_vocab_sizes"] = torch.tensor(constants.head_vocab_sizes)
    state[prefix + "ngram_heads_offsets"] = torch.tensor(constants.head_offsets)
    return Checkpoint(config, state, read_tokenizer(reader))


def transformers_model(checkpoint: Checkpoint) -> Qwen4ExpForCausalLM:
    """transformers' own model with the weights of `checkpoint`, in float32, for evaluation."""
    config = Qwen4ExpTextConfig(**checkpoint.config.to_transformers())
    model = Qwen4ExpForCausalLM(config).float()
    model.load_state_dict(checkpoint.trunk)
    return model.eval()


def load(gguf_path: str | Path) -> tuple[Qwen4ExpForCausalLM, Tokenizer]:
    """The model and the tokenizer of a demo GGUF file."""
    checkpoint = load_checkpoint(Path(gguf_path))
    return transformers_model(checkpoint), checkpoint.tokenizer
