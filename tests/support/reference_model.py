"""Random models as GGUF files, each with transformers' own implementation as its reference.

Weights are drawn so that every part shows in the logits: experts and indexer blocks win by clear margins,
gates are neither open nor shut, states decay within one token or over hundreds. Changing any one tensor by a
twentieth of its spread moves some logit by 0.005 or more.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig
from transformers.utils import logging as transformers_logging

from tests.support.model_file import FileLayout, write_model
from tests.support.model_shapes import NUM_ORDINARY_TOKENS, Shape

# How much larger than 1 / sqrt(fan in) the entries of a matrix are, by part of its name.
_GAINS = (
    ("lm_head", 5.0),
    ("input_mix_weight", 3.0),
    ("block_inject_weight", 2.0),
    ("mlp.gate.", 2.0),
    ("index_qk_proj", 1.5),
    ("q_proj", 1.5),
    ("k_proj", 1.5),
)


@dataclass(frozen=True, slots=True)
class ReferenceModel:
    """A file, and the model that says what it computes."""

    shape: Shape
    paths: Sequence[Path]
    model: Qwen4ExpForCausalLM

    @property
    def path(self) -> Path:
        """The file, or the last part of a split set: any part opens the set."""
        return self.paths[-1]

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Of every position: [tokens, vocabulary]."""
        return reference_logits(self.model, token_ids)


@torch.inference_mode()
def reference_logits(model: Qwen4ExpForCausalLM, token_ids: Sequence[int]) -> NDArray[np.float32]:
    """The logits of every position by transformers: [tokens, vocabulary]."""
    logits: NDArray[np.float32] = model(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()
    return logits


def make_reference(
    directory: Path, shape: Shape, layout: FileLayout | None = None, seed: int = 0
) -> ReferenceModel:
    """Draws weights and writes them into `directory`."""
    model = random_model(shape, seed)
    paths = write_model(model, shape, layout or FileLayout(), directory / "model.gguf", seed)
    return ReferenceModel(shape, paths, model)


def random_model(shape: Shape, seed: int) -> Qwen4ExpForCausalLM:
    """transformers' model with random weights, in float32."""
    # Says on every start that slower, correct code is used.
    transformers_logging.set_verbosity_error()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    config = Qwen4ExpTextConfig(**shape.to_transformers())
    config.hc_count = shape.hc_count
    model = Qwen4ExpForCausalLM(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_random_weights(name, parameter.shape, generator))
    return model


def _random_weights(name: str, extents: torch.Size, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(extents, generator=generator)
    uniform = torch.rand(extents, generator=generator)
    if name.endswith("A_log"):
        return -3 + 3.7 * uniform
    if name.endswith("dt_bias"):
        return -3 + 4 * uniform
    if "conv1d" in name:
        return 0.5 * normal
    if name.endswith("linear_attn.norm.weight"):
        return 1 + 0.2 * normal
    if len(extents) == 1:
        # Every other norm is stored as what is added to 1.
        return 0.2 * normal
    if "embed" in name:
        return normal
    gain = next((gain for part, gain in _GAINS if part in name), 1.0)
    return gain * extents[-1] ** -0.5 * normal


def random_tokens(shape: Shape, num_tokens: int, seed: int) -> list[int]:
    """Ordinary tokens, without any that end text."""
    drawn = np.random.default_rng(seed).integers(0, NUM_ORDINARY_TOKENS, num_tokens)
    return [int(token_id) for token_id in drawn]
