"""Which kernels this process computes with: the best its CPU has, unless it was told otherwise."""

from shared.errors import ResourceError
from shared.quants.simd.instruction_set import ALL, InstructionSet, Target, supported

PORTABLE = "portable"
CHOICES = ("auto", *(instructions.name for instructions in ALL), PORTABLE)

_BYTES = {"int16": 2, "int8": 1}
ACTIVATIONS = tuple(_BYTES)
"""What activations are rounded to; the first unless told otherwise."""

_is_portable = False
_chosen: InstructionSet | None = None
_activations = ACTIVATIONS[0]
_is_row_wise = False


def choose_kernels(setting: str, activations: str = ACTIVATIONS[0], *, deterministic: bool = False) -> str:
    """Takes the kernels named by `setting`, one of `CHOICES`, with activations as one of `ACTIVATIONS`;
    returns the names of what is used, with `-rows` for `deterministic` kernels.

    These take rows of weights as they lie however many tokens there are, so that a token's products do not
    depend on the others. (The portable kernels always do.) The others keep that up to
    `shared.window.WINDOW_TOKENS` tokens, and are faster with more.

    To be called before the first kernel is compiled. Raises ResourceError where this CPU lacks them.
    """
    global _is_portable, _chosen, _activations, _is_row_wise
    by_name = {instructions.name: instructions for instructions in supported()}
    if setting not in ("auto", PORTABLE) and setting not in by_name:
        raise ResourceError(
            f"--cpu-kernels is {setting!r}, but this CPU has not all the instructions they need; it can use"
            f" {', '.join([*by_name, PORTABLE])}; use --cpu-kernels auto"
        )
    _is_portable = setting == PORTABLE
    _chosen = by_name.get(setting)
    _activations = activations
    _is_row_wise = deterministic
    target = kernel_target()
    name = target.name if target is not None else PORTABLE
    return f"{name}-rows" if deterministic else name


def takes_rows_only() -> bool:
    """Whether products with any number of tokens are computed as those with one are."""
    return _is_row_wise


def kernel_target() -> Target | None:
    """What the kernels are made for; None are the portable ones."""
    if _is_portable:
        return None
    instructions = _chosen or next(iter(supported()), None)
    return Target(instructions, _BYTES[_activations]) if instructions is not None else None
