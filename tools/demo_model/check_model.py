"""Shows that `model` computes what transformers' `Qwen4ExpForCausalLM` computes.

    python -m tools.demo_model.check_model [CHECKPOINT_OR_GGUF]

Without a checkpoint the weights are random. Exits non-zero where logits differ by more than 1e-5 of the
largest, or the gradient of any parameter by more than 1e-3 of its largest entry.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import Qwen4ExpForCausalLM, Qwen4ExpTextConfig

from tools.demo_model.checkpoint import Checkpoint
from tools.demo_model.config import DemoConfig
from tools.demo_model.kernels import compile_kernels
from tools.demo_model.model import DemoModel
from tools.demo_model.to_transformers import load_checkpoint, transformers_model

_LOGIT_TOLERANCE = 1e-5
_GRADIENT_TOLERANCE = 1e-3
"""Gradients are sums over all tokens in float32, in another order than transformers takes them."""


def random_reference(config: DemoConfig) -> Qwen4ExpForCausalLM:
    """transformers' model with every parameter, norms and convolutions too, away from its neutral value."""
    reference = Qwen4ExpForCausalLM(Qwen4ExpTextConfig(**config.to_transformers())).float()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() == 1 else 0.05))
    return reference


def largest_difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """The largest absolute difference over the largest absolute value."""
    return ((left - right).abs().max() / right.abs().max()).item()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, nargs="?", help="checkpoint directory or GGUF file")
    parser.add_argument("--compile", action="store_true", help="check the compiled kernels")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    source: Path | None = arguments.source
    if source is None:
        config = DemoConfig()
        reference = random_reference(config)
    else:
        checkpoint = Checkpoint.load(source) if source.is_dir() else load_checkpoint(source)
        config, reference = checkpoint.config, transformers_model(checkpoint)
    model = DemoModel(config)
    model.load_state_dict(reference.state_dict())
    if arguments.compile:
        compile_kernels()

    token_ids = torch.randint(0, config.vocab_size, (2, 96))
    token_ids[0, 40] = token_ids[1, 17] = config.eos_token_id
    expected = reference(input_ids=token_ids).logits
    actual = model(token_ids)
    differences = {"logits": largest_difference(actual, expected)}
    probe = torch.randn_like(expected) / expected.numel()
    (expected * probe).sum().backward()
    (actual * probe).sum().backward()
    gradients = dict(model.named_parameters())
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None and parameter.grad.abs().max() > 0:
            differences[name] = largest_difference(gradients[name].grad, parameter.grad)
    for name in sorted(differences, key=differences.__getitem__, reverse=True)[:4]:
        print(f"{differences[name]:.1e}  {name}")
    print(f"{differences['logits']:.1e}  logits, {len(differences) - 1} gradients compared")
    if differences["logits"] > _LOGIT_TOLERANCE or max(differences.values()) > _GRADIENT_TOLERANCE:
        sys.exit("the two models differ")


if __name__ == "__main__":
    main()
