"""Which kernels this process computes with: the best its CPU has, unless it was told otherwise."""

from shared.errors import ResourceError
from shared.quants.simd.instruction_set import ALL, InstructionSet, supported

PORTABLE = "portable"
CHOICES = ("auto", *(instructions.name for instructions in ALL), PORTABLE)

_is_portable = False
_chosen: InstructionSet | None = None


def choose_kernels(setting: str) -> str:
    """Takes the kernels named by the setting, one of `CHOICES`; returns the name of what is used.

    To be called before the first kernel is compiled. Raises ResourceError where this CPU lacks them.
    """
    global _is_portable, _chosen
    by_name = {instructions.name: instructions for instructions in supported()}
    if setting not in ("auto", PORTABLE) and setting not in by_name:
        raise ResourceError(
            f"--cpu-kernels is {setting!r}, but this CPU has not all the instructions they need; it can use"
            f" {', '.join([*by_name, PORTABLE])}; use --cpu-kernels auto"
        )
    _is_portable = setting == PORTABLE
    _chosen = by_name.get(setting)
    instructions = instruction_set()
    return instructions.name if instructions is not None else PORTABLE


def instruction_set() -> InstructionSet | None:
    """What the kernels are made for; None are the portable ones."""
    if _is_portable:
        return None
    if _chosen is not None:
        return _chosen
    return next(iter(supported()), None)
