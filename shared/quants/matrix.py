"""The records of the matrix tasks: what is multiplied with what.

An activation plane is the input of one or several matrices: a few tokens, in float32 and, where a kernel
wants that, rounded to one byte or two with a scale for every 32 values. `quantise_plane` fills that form in.

All fields are int64; addresses are of C-contiguous memory.
"""

import numpy as np

GROUP = 32
"""Neighbouring activations that share a scale."""

HALF_GROUP = 16
"""Neighbouring activations whose sum is kept: the smallest number of weights that share a scale."""

MAX_WIDTH = 16384
"""Weights in a row, at most: a tile of 16 rows in float32 then just fills the scratch memory of a task."""

NUM_STEPS = {1: 127, 2: 32767}
"""By the bytes of a rounded activation: how many scales the largest of a group is."""

CODE_STRIDE = 2
"""Bytes between the codes of tokens, for each value. Codes of one byte leave the second half unused."""

PLANE = np.dtype(
    [
        ("floats", np.int64),  # f32 [num_tokens, width]
        # Of each token CODE_STRIDE * width bytes: i16 [width], value = code * scale; or u8 [width] at their
        # begin, value = (code - 128) * scale.
        ("codes", np.int64),
        ("scales", np.int64),  # f32 [num_tokens, width / 32]
        ("sums", np.int64),  # f32 [num_tokens, width / 16]: the sum of 16 values as they were rounded
        ("width", np.int64),
        ("num_tokens", np.int64),
    ]
)

MATRIX = np.dtype(
    [
        ("weights", np.int64),  # u8 [num_rows, row_bytes], blocks of the kernel's format
        ("row_bytes", np.int64),
        ("plane", np.int64),  # address of a PLANE
        ("out", np.int64),  # f32; row r of token t goes to out[t * out_stride + r]
        ("out_stride", np.int64),
    ]
)
"""Params of a format's multiply task, whose items are rows of weights."""

GATHERED = np.dtype(
    [
        ("weights", np.int64),  # u8 [num_rows, row_bytes], blocks of the kernel's format
        ("row_bytes", np.int64),
        ("num_rows", np.int64),
        ("numbers", np.int64),  # i64: which rows are wanted
        ("out", np.int64),  # f32: each of them decoded, one after the other
        ("num_blocks", np.int64),  # of a row
    ]
)
"""Params of a format's gather task, whose items are numbers of rows. A row that does not exist decodes to
NaN."""
