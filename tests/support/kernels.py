"""Computing with other kernels than this process began with."""

from collections.abc import Iterator
from contextlib import contextmanager

from shared.gguf.types import tensor_type_named
from shared.quants import ACTIVATIONS, SUPPORTED, block_format, choose_kernels
from shared.quants.quantising import quantise_task


@contextmanager
def using_kernels(
    name: str, activations: str = ACTIVATIONS[0], *, deterministic: bool = False
) -> Iterator[None]:
    """Inside, whatever is newly made computes with the kernels of that name, one of `quants.CHOICES`, and
    activations rounded as said, one of `quants.ACTIVATIONS`."""
    _forget()
    choose_kernels(name, activations, deterministic=deterministic)
    try:
        yield
    finally:
        _forget()
        choose_kernels("auto")


def _forget() -> None:
    for supported in SUPPORTED:
        vars(block_format(tensor_type_named(supported).type_id)).pop("multiply_task", None)
    quantise_task.cache_clear()
