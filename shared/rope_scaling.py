"""How rotary positions are scaled for contexts beyond the trained length: as a model file says, or as
settings say, which win.

What is rotated by how much, and what scores are multiplied by, `gpu_worker.model.rotary` computes from it.
"""

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from shared.config import DEFAULT_MAX_CONTEXT, GpuWorkerConfig
from shared.errors import ConfigError

DEFAULT_BETA_FAST = 32.0
DEFAULT_BETA_SLOW = 1.0
"""Both as Peng et al. (2023) recommend for Llama models, as transformers and llama.cpp have them too."""

# Positions are multiplied in float32, which has every whole number up to here.
_MOST_POSITIONS = 1 << 24


class ScalingType(StrEnum):
    """The method, by its name in GGUF metadata and in `--rope-scaling`."""

    NONE = "none"
    LINEAR = "linear"
    """All positions are divided by the factor."""
    YARN = "yarn"
    """As linear for pairs of dimensions that turn slowly, not at all for those that turn fast, and something
    in between for those between."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How positions are scaled, whatever the length of the prompt (static YaRN).

    `original_context` is the length that the model was trained for. Pairs of dimensions that turn more than
    `beta_fast` times in it are left alone, those that turn less than `beta_slow` times are stretched by
    `factor`. `attention_multiplier` is what the recommended factor of cosines and sines is multiplied by.
    """

    type: ScalingType
    original_context: int
    factor: float = 1.0
    attention_multiplier: float = 1.0
    beta_fast: float = DEFAULT_BETA_FAST
    beta_slow: float = DEFAULT_BETA_SLOW

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by: scores of rotated dimensions grow by its square."""
        if self.type is not ScalingType.YARN:
            return 1.0
        return self.attention_multiplier * recommended_attention_factor(self.factor)

    @property
    def context_length(self) -> int:
        """The tokens that scaled positions are good for."""
        return max(1, int(min(self.factor * self.original_context, _MOST_POSITIONS)))

    @property
    def description(self) -> str:
        """In a few words, for reports: `yarn, 4 times 262144 tokens`."""
        if self.type is ScalingType.NONE:
            return "positions are not scaled"
        return f"{self.type}, {self.factor:g} times {self.original_context} tokens"

    def shortfall(self, max_context: int) -> str | None:
        """Why sequences end before `--max-context`, and what would help; None where they do not, nor for the
        default, which nobody asked for."""
        if max_context <= self.context_length or max_context == DEFAULT_MAX_CONTEXT:
            return None
        scale = math.ceil(max_context / self.original_context)
        return (
            f"--max-context is {max_context}, but the model reaches {self.context_length} tokens "
            f"({self.description}); for more, add --rope-scaling yarn --rope-scale {scale}"
        )


def recommended_attention_factor(factor: float) -> float:
    """0.1 ln(factor) + 1: the square root of 1 / t in Peng et al. (2023)."""
    return 0.1 * math.log(factor) + 1.0


def with_settings(written: RopeScaling, settings: GpuWorkerConfig) -> RopeScaling:
    """What the flags make of what the file says. Raises ConfigError for flags that do not go together."""
    scaling = ScalingType(written.type if settings.rope_scaling == "auto" else settings.rope_scaling)
    _check_use(scaling, settings)
    if scaling is ScalingType.NONE:
        return RopeScaling(scaling, written.original_context)
    if settings.rope_scale is None and written.type is ScalingType.NONE:
        raise ConfigError(
            f"--rope-scaling is '{scaling}', but neither --rope-scale nor the file says by how much; add "
            "--rope-scale 2 for twice the context"
        )
    resolved = replace(
        written,
        type=scaling,
        original_context=settings.yarn_orig_ctx or written.original_context,
        factor=_first(settings.rope_scale, written.factor),
        attention_multiplier=_first(settings.yarn_attn_factor, written.attention_multiplier),
        beta_fast=_first(settings.yarn_beta_fast, written.beta_fast),
        beta_slow=_first(settings.yarn_beta_slow, written.beta_slow),
    )
    if resolved.beta_fast <= resolved.beta_slow:
        raise ConfigError(
            f"--yarn-beta-fast is {resolved.beta_fast:g} and --yarn-beta-slow {resolved.beta_slow:g}; fast "
            "has to be above slow"
        )
    return resolved


def _check_use(scaling: ScalingType, settings: GpuWorkerConfig) -> None:
    """A flag that would do nothing is taken for a mistake: who gives it expects a longer context."""
    given = {
        "--yarn-orig-ctx": settings.yarn_orig_ctx or None,
        "--yarn-attn-factor": settings.yarn_attn_factor,
        "--yarn-beta-fast": settings.yarn_beta_fast,
        "--yarn-beta-slow": settings.yarn_beta_slow,
    }
    needed = "yarn"
    if scaling is ScalingType.YARN:
        return
    if scaling is ScalingType.NONE:
        given, needed = {"--rope-scale": settings.rope_scale, **given}, "yarn (or linear)"
    for flag, value in given.items():
        if value is not None:
            origin = ", as the file says" if settings.rope_scaling == "auto" else ""
            raise ConfigError(
                f"{flag} is {value:g}, but --rope-scaling is '{scaling}'{origin}; "
                f"add --rope-scaling {needed}, or leave {flag} out"
            )


def _first(given: float | None, otherwise: float) -> float:
    return otherwise if given is None else given
