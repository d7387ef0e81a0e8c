"""A checkpoint on disk: a directory that transformers loads as it stands.

`model.safetensors` holds the trunk as `model.*` and `lm_head.*`, and the prediction block, once trained, as
`mtp.*` (transformers skips those); `config.json`, `tokenizer.json` and `tokenizer_config.json` lie beside it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_model.config import CHAT_TEMPLATE, ENDOFTEXT, IM_END, DemoConfig


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Weights with all that is needed to use them."""

    config: DemoConfig
    state: dict[str, Tensor]
    tokenizer: Tokenizer

    @property
    def has_prediction(self) -> bool:
        """Whether the prediction block has been trained."""
        return any(name.startswith("mtp.") for name in self.state)

    @property
    def trunk(self) -> dict[str, Tensor]:
        """The weights without the prediction block."""
        return {name: weight for name, weight in self.state.items() if not name.startswith("mtp.")}

    @property
    def prediction(self) -> dict[str, Tensor]:
        """The weights of the prediction block, named without their `mtp.`."""
        return {name[4:]: weight for name, weight in self.state.items() if name.startswith("mtp.")}

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Reads a directory, all weights as float32. Raises FileNotFoundError where a file is missing."""
        stored = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        state = load_file(directory / "model.safetensors")
        return cls(
            DemoConfig.from_transformers(stored),
            {
                name: weight.float() if weight.is_floating_point() else weight
                for name, weight in state.items()
            },
            Tokenizer.from_file(str(directory / "tokenizer.json")),
        )

    def save(self, directory: Path, dtype: torch.dtype = torch.float32) -> None:
        """Writes the directory; matrices in `dtype`, everything with fewer dimensions in float32."""
        directory.mkdir(parents=True, exist_ok=True)
        state = {
            name: weight.to(
                dtype if weight.dim() > 1 and weight.is_floating_point() else weight.dtype
            ).contiguous()
            for name, weight in self.state.items()
        }
        partial = directory / "model.safetensors.partial"
        save_file(state, partial, {"format": "pt"})
        partial.rename(directory / "model.safetensors")
        config = {"architectures": ["Qwen4ExpForCausalLM"], "model_type": "qwen4_exp_text"}
        _write_json(directory / "config.json", config | self.config.to_transformers())
        stop_ids = [self.tokenizer.token_to_id(token) for token in (IM_END, ENDOFTEXT)]
        _write_json(directory / "generation_config.json", {"eos_token_id": stop_ids})
        _write_json(
            directory / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": IM_END,
                "pad_token": ENDOFTEXT,
                "clean_up_tokenization_spaces": False,
                "model_max_length": self.config.max_position_embeddings,
                "chat_template": CHAT_TEMPLATE,
            },
        )
        self.tokenizer.save(str(directory / "tokenizer.json"))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
