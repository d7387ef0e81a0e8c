"""The prediction block of a file in float64, all positions at once, straight from the formulas.

Nothing is kept from one call to the next: to predict further, what came before is computed again.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from shared.gguf.model import GGUFModel
from shared.model_config import read_model_config

Array = NDArray[np.float64]


class ReferencePrediction:
    """The block of a file whose tensors are all F32."""

    def __init__(self, path: Path) -> None:
        with GGUFModel(path) as file:
            self._config = read_model_config(file)
            self._block = f"blk.{self._config.num_layers}."
            kept = [name for name in file if name.startswith((self._block, "token_embd", "output."))]
            self._tensors: dict[str, Array] = {
                name: np.frombuffer(file.rows(name).tobytes(), np.float32)
                .reshape(file.info(name).shape)
                .astype(np.float64)
                for name in kept
            }

    def streams(self, token_ids: list[int], streams: NDArray[np.float32]) -> Array:
        """Of positions 0 to n - 1: the tokens that come after them, and streams [n, streams, hidden] there ->
        the block's streams [n, streams, hidden]."""
        token = _rms(self._tensors["token_embd.weight"][token_ids], self._of("nextn.enorm"), self._epsilon)
        hidden = self._each_stream(streams.astype(np.float64), "nextn.hnorm")
        joined = np.concatenate([np.broadcast_to(token[:, None], hidden.shape), hidden], -1)
        x = joined @ self._of("nextn.eh_proj").T
        y, gains = self._read(x, "hc_attn")
        x = x + gains[:, :, None] * self._attention(y)[:, None]
        y, gains = self._read(x, "hc_ffn")
        return x + gains[:, :, None] * self._experts(y)[:, None]

    def logits(self, streams: Array) -> Array:
        """[n, streams, hidden] -> [n, vocabulary]."""
        head = self._tensors.get("output.weight", self._tensors["token_embd.weight"])
        return self._read(streams, "nextn.hc_head")[0] @ head.T

    @property
    def _epsilon(self) -> float:
        return self._config.rms_epsilon

    def _of(self, name: str) -> Array:
        return self._tensors[f"{self._block}{name}.weight"]

    def _each_stream(self, x: Array, name: str) -> Array:
        return _rms(x, self._of(name).reshape(x.shape[1:]), self._epsilon)

    def _read(self, x: Array, name: str) -> tuple[Array, Array]:
        """The input of a part, and the gains of its output; these are nothing where it writes nothing."""
        num_tokens, num_streams, hidden = x.shape
        normed = self._each_stream(x, f"{name}_norm").reshape(num_tokens, -1)
        low = _silu(normed @ self._of(f"{name}_down").T / num_streams)
        gated = (_sigmoid(low @ self._of(f"{name}_up").T) * normed).reshape(num_tokens, num_streams, hidden)
        gains = np.empty(0)
        if f"{self._block}{name}_inject.weight" in self._tensors:
            gains = 2 * _sigmoid(normed @ self._of(f"{name}_inject").T / num_streams)
        return gated.mean(1), gains

    def _attention(self, y: Array) -> Array:
        config, num_tokens = self._config, len(y)
        heads, kv_heads, dim = config.num_query_heads, config.num_kv_heads, config.head_dim
        query_and_gate = (y @ self._of("attn_q").T).reshape(num_tokens, heads, 2, dim)
        query = self._rotated(_rms(query_and_gate[:, :, 0], self._of("attn_q_norm"), self._epsilon))
        key = (y @ self._of("attn_k").T).reshape(num_tokens, kv_heads, dim)
        key = self._rotated(_rms(key, self._of("attn_k_norm"), self._epsilon))
        value = (y @ self._of("attn_v").T).reshape(num_tokens, kv_heads, dim)
        of_head = np.arange(heads) // (heads // kv_heads)
        scores = np.einsum("qhd,khd->hqk", query, key[:, of_head]) / np.sqrt(dim)
        weights = _softmax(np.where(self._seen(y), scores, -np.inf))
        attended = np.einsum("hqk,khd->qhd", weights, value[:, of_head]) * _sigmoid(query_and_gate[:, :, 1])
        return attended.reshape(num_tokens, -1) @ self._of("attn_output").T

    def _seen(self, y: Array) -> NDArray[np.bool_]:
        """Which positions [queries, positions] each query sees."""
        config, num_tokens = self._config, len(y)
        seen = np.tri(num_tokens, dtype=np.bool_)
        ratio, dim = config.compress_ratios[config.num_layers], config.indexer.head_dim
        if ratio == 0:
            return seen
        queries = (y @ self._of("indexer.q_proj").T).reshape(num_tokens, -1, dim)
        queries = self._rotated(_rms(queries, self._of("indexer.q_norm"), self._epsilon))
        raw = y @ self._of("indexer.k_proj").T
        pooled = raw[: num_tokens // ratio * ratio].reshape(-1, ratio, dim).mean(1)
        normed = _rms(pooled, self._of("indexer.k_norm"), self._epsilon)
        keys = self._rotated(normed[:, None], ratio)[:, 0]
        scores = np.maximum(np.einsum("qhd,bd->qhb", queries, keys), 0).sum(1) / np.sqrt(dim)
        num_kept = config.indexer.token_budget // ratio
        for position in range(num_tokens):
            num_blocks = (position + 1) // ratio
            if num_blocks > num_kept:
                # Ties are common; which block wins is what torch makes of them.
                best = torch.from_numpy(scores[position, :num_blocks]).topk(num_kept).indices.numpy()
                seen[position, : num_blocks * ratio] = np.isin(np.arange(num_blocks), best).repeat(ratio)
        return seen

    def _experts(self, y: Array) -> Array:
        logits = y @ self._of("ffn_gate_inp").T
        shared = self._gated(y, self._of("ffn_gate_shexp"), self._of("ffn_up_shexp"))
        gate = _sigmoid(y @ self._of("ffn_gate_inp_shexp").reshape(-1))
        out = gate[:, None] * (shared @ self._of("ffn_down_shexp").T)
        for token, chosen in enumerate(np.argsort(-logits)[:, : self._config.num_experts_used]):
            weights = _softmax(logits[token, chosen]) * self._config.expert_weights_scale
            for expert, weight in zip(chosen, weights, strict=True):
                inner = self._gated(
                    y[token], self._of("ffn_gate_exps")[expert], self._of("ffn_up_exps")[expert]
                )
                out[token] += weight * (self._of("ffn_down_exps")[expert] @ inner)
        return out

    @staticmethod
    def _gated(y: Array, gate: Array, up: Array) -> Array:
        return _silu(y @ gate.T) * (y @ up.T)

    def _rotated(self, x: Array, stride: int = 1) -> Array:
        """x [n, heads, dim], whose rows have the positions 0, stride, 2 * stride and so on."""
        half = self._config.rope_dim // 2
        frequencies = self._config.rope_base ** (-np.arange(half) / half)
        angles = (stride * np.arange(len(x)))[:, None, None] * frequencies
        first, second, rest = np.split(x, [half, 2 * half], -1)
        return np.concatenate(
            [
                first * np.cos(angles) - second * np.sin(angles),
                second * np.cos(angles) + first * np.sin(angles),
                rest,
            ],
            -1,
        )


def _rms(x: Array, weight: Array, epsilon: float) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * weight


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _silu(x: Array) -> Array:
    return x * _sigmoid(x)


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
