"""The prediction block (MTP, "nextn"): from the trunk's streams at a position and the token after it, the
token after that.

Parameter names are those of the original checkpoints, `mtp.*` without the `mtp.`. It shares embedding and
head with the trunk. Row `j` of its input joins token `j` with the streams of position `j - 1`, so rows have
the positions of their tokens and the first has no streams; llama.cpp does the same.

Drafts follow each other: the second is computed from the first draft and the block's own streams, and so
on. While drafting, attention sees the block's entries for accepted tokens, which were made with the trunk's
streams, and then the entries of the drafts so far. `chain` computes that for drafts from every position at
once, given the true tokens: a draft after a wrong one is rejected in any case.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model.attention import GatedAttention, Rotation
from tools.demo_model.config import DemoConfig
from tools.demo_model.hyper_connection import HyperConnection
from tools.demo_model.kernels import ZeroCentredNorm, unit_rms
from tools.demo_model.model import Block, DemoModel, Trace


class PredictionBlock(nn.Module):
    """One attention block with experts, the projection of its input and a mixer of its own."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.layers = nn.ModuleList([Block(config, is_attention=True)])
        self.fc_embedding = nn.Linear(width, width, bias=False)
        self.fc_hidden = nn.Linear(width, width, bias=False)
        self.pre_fc_norm_embedding = ZeroCentredNorm(width)
        self.pre_fc_norm_hidden = ZeroCentredNorm(config.stream_width)
        self.hyper_connection_mixer = HyperConnection(config, has_inject=False)

    @torch.no_grad()
    def initialize(self, trunk: DemoModel) -> None:
        """Starts from the trunk's last layer and mixer, which do nearly the same task."""
        self.layers[0].load_state_dict(trunk.model.layers[-1].state_dict())
        self.hyper_connection_mixer.load_state_dict(trunk.model.hyper_connection_mixer.state_dict())
        identity = torch.eye(self.config.hidden_size)
        self.fc_embedding.weight.copy_(0.5 * identity)
        self.fc_hidden.weight.copy_(identity)

    @property
    def attention(self) -> GatedAttention:
        """The block's attention."""
        block = self.layers[0]
        assert isinstance(block, Block)
        return block.self_attn

    def chain(self, embedded: Tensor, streams: Tensor, batch: int, depth: int, trace: Trace) -> list[Tensor]:
        """What the head multiplies for each of `depth` drafts, `[T, H]` each.

        `embedded` `[T, H]` are the trunk's embeddings of the tokens, `streams` `[T, C, H]` its residual at
        them. Row `j` of draft `d` (from 0) is a guess at token `j + 1`, made when the tokens up to `j - d`
        were accepted.
        """
        length = embedded.shape[0] // batch
        rotation = Rotation.of(self.config, torch.arange(length))
        block = self.layers[0]
        assert isinstance(block, Block)
        rows = torch.arange(length)
        distance = rows[:, None] - rows[None, :]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        hidden = []
        for draft in range(depth):

            def attend(x: Tensor, draft: int = draft) -> Tensor:
                projected = block.self_attn.project(x, batch, rotation)
                keys.append(projected.key)
                values.append(projected.value)
                trace.attention.append((x, projected))
                # Entries of accepted tokens; then, for each earlier draft and this one, one entry.
                visible = [
                    distance >= draft,
                    *(distance == draft - earlier for earlier in range(1, draft + 1)),
                ]
                attended = F.scaled_dot_product_attention(
                    projected.query,
                    torch.cat(keys, 2),
                    torch.cat(values, 2),
                    attn_mask=torch.cat(visible, 1),
                    enable_gqa=True,
                )
                return block.self_attn.output(attended, projected.gate)

            entry = self._entry(embedded, _one_later(streams, batch))
            streams = block.mix_features(block.attn_hyper_connection.around(attend, entry), trace)
            hidden.append(self.hyper_connection_mixer.read(streams))
        return hidden

    def _entry(self, embedded: Tensor, streams: Tensor) -> Tensor:
        factor = 1 + self.pre_fc_norm_hidden.weight.view(self.config.hc_count, -1)
        token = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        result: Tensor = token.unsqueeze(1) + self.fc_hidden(unit_rms(streams) * factor)
        return result


def _one_later(streams: Tensor, batch: int) -> Tensor:
    """`[T, C, H]` moved one position on in each of the `batch` sequences, with zeros at the start."""
    rows = streams.view(batch, -1, *streams.shape[1:])
    return torch.cat([torch.zeros_like(rows[:, :1]), rows[:, :-1]], 1).view_as(streams)
