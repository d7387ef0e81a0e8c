"""Quantised weights decoded by torch operations, on any device: bit for bit what `shared.quants` makes
of them.

`decode_blocks` decodes blocks of every format of `shared.quants.SUPPORTED`.
"""

from gpu_worker.device.torch_decode.registry import decode_blocks

__all__ = ["decode_blocks"]
