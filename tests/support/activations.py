"""What the codes of rounded activations stand for."""

import numpy as np
from numpy.typing import NDArray

from shared.quants import ActivationPlane


def steps_of(plane: ActivationPlane, num_bytes: int) -> NDArray[np.float64]:
    """How many scales each activation was rounded to: [num_tokens, width]."""
    if num_bytes == 2:
        return plane.codes.view(np.int16).astype(np.float64)
    return plane.codes[:, : plane.floats.shape[1]].astype(np.float64) - 128
