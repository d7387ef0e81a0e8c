"""Compiles kernels before the first request needs them."""

from collections.abc import Callable, Iterable
from functools import partial

from shared.quants.block_format import BlockFormat
from shared.quants.quantising import quantise_task


def warm(
    multiplied: Iterable[BlockFormat] = (),
    decoded: Iterable[BlockFormat] = (),
    gathered: Iterable[BlockFormat] = (),
    on_progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Compiles what multiplies, decodes and gathers rows of these formats (about a second each), or loads it
    from the cache (hundredths).

    `on_progress(num_done, num_total, name)` is called after each.
    """
    jobs: dict[str, Callable[[], object]] = {}
    for fmt in multiplied:
        jobs[f"products with {fmt.type.name}"] = partial(getattr, fmt, "multiply_task")
        if fmt.activation_bytes:
            jobs["activations"] = quantise_task
    for fmt in decoded:
        jobs[f"rows of {fmt.type.name}"] = partial(getattr, fmt, "decode")
    for fmt in gathered:
        jobs[f"single rows of {fmt.type.name}"] = partial(getattr, fmt, "gather_task")
    for num_done, (name, compile_it) in enumerate(sorted(jobs.items()), start=1):
        compile_it()
        if on_progress is not None:
            on_progress(num_done, len(jobs), name)
