"""Trains the trunk of the demo model on a CPU.

    python -m tools.demo_model.train OUTPUT --tokenizer TOKENIZER.json     from scratch
    python -m tools.demo_model.train OUTPUT --init CHECKPOINT              from other weights
    python -m tools.demo_model.train OUTPUT --resume                       where a stopped run was last saved

The loss is the cross-entropy of the answers' tokens alone, and a little for using all experts. A first part
of the run also has recall exercises (`recall`), which form the circuit that copies.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.batches import LENGTHS, Batch
from tools.demo_model.checkpoint import Checkpoint
from tools.demo_model.config import DemoConfig
from tools.demo_model.conversations import held_out_prompts
from tools.demo_model.evaluate import encode, score
from tools.demo_model.experts import Routing
from tools.demo_model.initialization import initialize
from tools.demo_model.model import DemoModel, Trace
from tools.demo_model.workers import add_run_arguments, run_of, train

_BALANCE_WEIGHT = 0.005


def balance_loss(routing: list[Routing], is_text: Tensor) -> Tensor:
    """How unevenly tokens use the experts, 1 where evenly: mean over layers (Fedus et al. 2021, eq. 4)."""
    losses = []
    for layer in routing:
        num_experts = layer.probabilities.shape[1]
        chosen = layer.chosen[is_text].flatten()
        used = torch.bincount(chosen, minlength=num_experts).float() / len(chosen)
        probable = layer.probabilities[is_text].mean(0)
        losses.append(num_experts * (used * probable).sum())
    return torch.stack(losses).mean()


class TrunkTask:
    """Answers, token by token."""

    lengths = LENGTHS

    def __init__(self, model: DemoModel) -> None:
        self.config = model.config
        self.module = model

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Cross-entropy where the batch has weight, and the balance of experts."""
        trace = Trace()
        hidden = self.module.hidden(batch.token_ids, trace)
        places = batch.weights.flatten().nonzero().squeeze(1)
        logits = self.module.lm_head(hidden.index_select(0, places))
        targets = batch.targets.flatten()[places]
        answers = F.cross_entropy(logits, targets)
        balance = balance_loss(trace.routing, batch.is_text.flatten())
        right = (logits.detach().argmax(-1) == targets).float().mean()
        figures = {"loss": answers.item(), "right": right.item(), "balance": balance.item()}
        return answers + _BALANCE_WEIGHT * balance, figures

    def evaluate(self, tokenizer: Tokenizer) -> str:
        """Share of exact answers for each skill."""
        scores, _ = score(self.module, encode(held_out_prompts(), tokenizer))
        return " ".join(f"{name} {entry.exact:.2f}" for name, entry in scores.items())

    def state(self) -> dict[str, Tensor]:
        """The trunk."""
        return self.module.state_dict()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--tokenizer", type=Path, help="start from scratch with this tokenizer")
    start.add_argument("--init", type=Path, help="start from the weights of this checkpoint")
    start.add_argument("--resume", action="store_true", help="go on with the run in OUTPUT")
    add_run_arguments(parser, num_steps=5000)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    origin: Path | None = arguments.output if arguments.resume else arguments.init
    if origin is None:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
        model = DemoModel(DemoConfig())
        initialize(model, tokenizer)
    else:
        checkpoint = Checkpoint.load(origin)
        tokenizer = checkpoint.tokenizer
        model = DemoModel(checkpoint.config)
        model.load_state_dict(checkpoint.trunk)
    for name, parameter in model.named_parameters():
        # The indexer decides nothing while attention is dense; `train_prediction` trains it.
        parameter.requires_grad_("indexer" not in name)
    train(TrunkTask(model), run_of(arguments, tokenizer, arguments.resume))


if __name__ == "__main__":
    main()
