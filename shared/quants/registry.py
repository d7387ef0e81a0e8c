"""Finds the block format of a tensor by ggml's type number."""

from shared.gguf.types import tensor_type
from shared.quants.block_format import BlockFormat
from shared.quants.formats.bf16 import BF16
from shared.quants.formats.f16 import F16
from shared.quants.formats.f32 import F32
from shared.quants.formats.iq1_m import IQ1_M
from shared.quants.formats.iq1_s import IQ1_S
from shared.quants.formats.iq2_s import IQ2_S
from shared.quants.formats.iq2_xs import IQ2_XS
from shared.quants.formats.iq2_xxs import IQ2_XXS
from shared.quants.formats.iq3_s import IQ3_S
from shared.quants.formats.iq3_xxs import IQ3_XXS
from shared.quants.formats.iq4_nl import IQ4_NL
from shared.quants.formats.iq4_xs import IQ4_XS
from shared.quants.formats.q1_0 import Q1_0
from shared.quants.formats.q2_0 import Q2_0
from shared.quants.formats.q2_k import Q2_K
from shared.quants.formats.q3_k import Q3_K
from shared.quants.formats.q4_0 import Q4_0
from shared.quants.formats.q4_1 import Q4_1
from shared.quants.formats.q4_k import Q4_K
from shared.quants.formats.q5_0 import Q5_0
from shared.quants.formats.q5_1 import Q5_1
from shared.quants.formats.q5_k import Q5_K
from shared.quants.formats.q6_k import Q6_K
from shared.quants.formats.q8_0 import Q8_0

_FORMATS = (
    *(F32, F16, BF16, Q1_0, Q2_0, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K),
    *(IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS),
)
_BY_ID = {block_format.type.type_id: block_format for block_format in _FORMATS}

SUPPORTED = tuple(block_format.type.name for block_format in _FORMATS)
"""The names of all formats."""


class UnsupportedTensorType(ValueError):
    """A tensor has a type that Strata cannot compute with."""

    def __init__(self, type_id: int) -> None:
        known = tensor_type(type_id)
        name = known.name if known else "unknown to this version"
        super().__init__(
            f"tensor type {type_id} ({name}) is not supported; supported are {', '.join(SUPPORTED)}"
        )
        self.type_id = type_id


def block_format(type_id: int) -> BlockFormat:
    """The format with ggml's type number `type_id`. Raises UnsupportedTensorType."""
    try:
        return _BY_ID[type_id]
    except KeyError:
        raise UnsupportedTensorType(type_id) from None
