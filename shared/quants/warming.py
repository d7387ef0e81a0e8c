"""Compiles kernels before the first request needs them."""

from collections.abc import Callable, Iterable

from shared.quants.block_format import BlockFormat


def warm(formats: Iterable[BlockFormat], on_progress: Callable[[int, int, str], None] | None = None) -> None:
    """Compiles the kernels of `formats` (about a second each), or loads them from the cache (hundredths).

    `on_progress(num_done, num_total, name)` is called after each format.
    """
    wanted = sorted({fmt.type.name: fmt for fmt in formats}.items())
    for num_done, (name, fmt) in enumerate(wanted, start=1):
        if fmt.decode_block is not None:
            _ = fmt.kernels
        if on_progress is not None:
            on_progress(num_done, len(wanted), name)
