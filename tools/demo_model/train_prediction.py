"""Trains, with the trunk frozen, the prediction block and the indexers of sparse attention.

    python -m tools.demo_model.train_prediction OUTPUT --trunk CHECKPOINT
    python -m tools.demo_model.train_prediction OUTPUT --resume

The block learns to draft what the trunk would write, its second and third draft from its own streams
(`prediction`). The indexers, the trunk's and the block's, learn on long sequences to score a block of the
past as much as attention, which is dense in training, looks at it.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from tools.demo_model.attention import GatedAttention, Projected, Rotation
from tools.demo_model.batches import Batch
from tools.demo_model.checkpoint import Checkpoint
from tools.demo_model.conversations import held_out_prompts
from tools.demo_model.evaluate import acceptance, encode
from tools.demo_model.model import DemoModel, Trace
from tools.demo_model.prediction import PredictionBlock
from tools.demo_model.workers import add_run_arguments, run_of, train

_DRAFT_WEIGHTS = (1.0, 0.6, 0.4)
_INDEXER_LENGTH = 2048
_LENGTHS = {128: 0.3, 256: 0.4, 512: 0.1, _INDEXER_LENGTH: 0.2}
_NUM_INDEXER_QUERIES = 256
_FIRST_INDEXER_QUERY = 64
"""Where there is something to choose from."""


def indexer_loss(attention: GatedAttention, seen: tuple[Tensor, Projected], batch: int) -> Tensor:
    """Divergence of block scores from the attention each block gets, mean over random queries and heads."""
    x, projected = seen
    length = x.shape[0] // batch
    indexer = attention.indexer
    places = torch.randperm(length - _FIRST_INDEXER_QUERY)[:_NUM_INDEXER_QUERIES] + _FIRST_INDEXER_QUERY
    rotation = Rotation.of(attention.config, torch.arange(length))
    scores = indexer.scores(x.view(batch, length, -1), rotation)[:, places]
    is_complete = torch.arange(scores.shape[-1]) < (places[:, None] + 1) // indexer.block_length
    with torch.no_grad():
        group_size = projected.query.shape[1] // projected.key.shape[1]
        keys = projected.key.repeat_interleave(group_size, 1)
        logits = projected.query[:, :, places] @ keys.transpose(-1, -2) * attention.head_dim**-0.5
        logits = logits.masked_fill(torch.arange(length) > places[:, None], -torch.inf)
        on_blocks = logits.softmax(-1).mean(1).unflatten(-1, (-1, indexer.block_length)).sum(-1)
        on_blocks = on_blocks.masked_fill(~is_complete, 0)
        on_blocks = on_blocks / on_blocks.sum(-1, keepdim=True).clamp_min(1e-9)
    log_scores = scores.masked_fill(~is_complete, -1e30).log_softmax(-1)
    divergence = on_blocks * (on_blocks.clamp_min(1e-9).log() - log_scores)
    return divergence.sum(-1).mean()


class PredictionTask:
    """Drafts on short sequences, indexers on long ones."""

    lengths = _LENGTHS

    def __init__(self, trunk: DemoModel, block: PredictionBlock) -> None:
        self.config = trunk.config
        self.module = nn.ModuleDict({"trunk": trunk, "block": block})
        self._trunk, self._block = trunk, block
        for name, parameter in trunk.named_parameters():
            parameter.requires_grad_("indexer" in name)

    def loss(self, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """The drafts' cross-entropy with the trunk's choices, or the indexers' divergence."""
        num_sequences, length = batch.token_ids.shape
        trace, draft_trace = Trace(), Trace()
        with torch.no_grad():
            streams = self._trunk.streams(batch.token_ids, trace)
            embedded = self._trunk.model.embed_tokens(batch.token_ids.flatten())
        if length == _INDEXER_LENGTH:
            with torch.no_grad():
                self._block.chain(embedded, streams, num_sequences, 1, draft_trace)
            layers = self._trunk.model.attentions()
            pairs = [
                *zip(layers, trace.attention, strict=True),
                (self._block.attention, draft_trace.attention[0]),
            ]
            losses = [indexer_loss(attention, seen, num_sequences) for attention, seen in pairs]
            return torch.stack(losses).sum(), {
                "indexer": losses[0].item(),
                "draft_indexer": losses[-1].item(),
            }

        places = batch.weights.flatten().nonzero().squeeze(1)
        with torch.no_grad():
            hidden = self._trunk.model.hyper_connection_mixer.read(streams)
            targets = self._trunk.lm_head(hidden[places]).argmax(-1)
        drafts = self._block.chain(embedded, streams, num_sequences, len(_DRAFT_WEIGHTS), draft_trace)
        total = torch.zeros(())
        figures = {}
        for order, (drafted, weight) in enumerate(zip(drafts, _DRAFT_WEIGHTS, strict=True), 1):
            logits = self._trunk.lm_head(drafted[places])
            total = total + weight * F.cross_entropy(logits, targets)
            figures[f"draft{order}"] = (logits.detach().argmax(-1) == targets).float().mean().item()
        return total, {"loss": total.item(), **figures}

    def evaluate(self, tokenizer: Tokenizer) -> str:
        """Share of drafts accepted."""
        rates = acceptance(self._trunk, self._block, encode(held_out_prompts(), tokenizer)).rates()
        return "accepted " + " ".join(f"{rate:.3f}" for rate in rates)

    def state(self) -> dict[str, Tensor]:
        """Trunk and block."""
        block = {f"mtp.{name}": weight for name, weight in self._block.state_dict().items()}
        return self._trunk.state_dict() | block


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--trunk", type=Path, help="checkpoint of the trained trunk")
    start.add_argument("--resume", action="store_true", help="go on with the run in OUTPUT")
    add_run_arguments(parser, num_steps=1200)
    parser.set_defaults(recall_start=0.0, recall_end=0.0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    checkpoint = Checkpoint.load(arguments.output if arguments.resume else arguments.trunk)
    trunk, block = DemoModel(checkpoint.config), PredictionBlock(checkpoint.config)
    trunk.load_state_dict(checkpoint.trunk)
    if arguments.resume:
        block.load_state_dict(checkpoint.prediction)
    else:
        for attention in trunk.model.attentions():
            attention.initialize_indexer()
        block.initialize(trunk)
    train(PredictionTask(trunk, block), run_of(arguments, checkpoint.tokenizer, arguments.resume))


if __name__ == "__main__":
    main()
