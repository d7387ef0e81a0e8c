"""The learned profile: how often each expert is used, kept from one run to the next, and what it is good for,
the choice of experts that are loaded at the start.
"""

import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from shared.errors import ConfigError
from shared.gguf.model import GGUFModel
from shared.model_config import Qwen4ExpConfig
from shared.placement.hotness import Counts
from shared.placement.sizes import SLOT_ALIGNMENT

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Whose experts were counted."""

    model: str
    num_layers: int
    num_experts: int
    fingerprint: str


def model_identity(model: GGUFModel, config: Qwen4ExpConfig) -> ModelIdentity:
    """Of a model that is open. Experts of one number are other ones in another model, so all has to agree."""
    return ModelIdentity(model.name, config.num_layers, config.num_experts, model.fingerprint())


def save(path: Path, counts: Counts, identity: ModelIdentity) -> None:
    """Writes the profile (`Hotness.profile`): float32 [layers, experts], in a folder that is there. The file
    is the old one or the new one at any time. Raises OSError."""
    content = {"format": _FORMAT, **asdict(identity), "counts": counts.astype("<f4").tobytes()}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            file.write(msgpack.packb(content))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def load(path: Path, identity: ModelIdentity, remedy: str = "name another file") -> Counts:
    """The counts, float32 [layers, experts]. Raises ConfigError for a file that cannot be read, is no
    profile, or is one of another model, and says what differs, and the remedy: whoever calls knows whose file
    it is."""
    try:
        # Nor a pipe, which would be waited for.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"the expert profile {path} is no file; {remedy}")
        content: Any = msgpack.unpackb(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"the expert profile {path} cannot be read: {error.strerror}; {remedy}") from None
    except (ValueError, msgpack.UnpackException) as error:
        raise ConfigError(f"{path} is no expert profile: {error}; {remedy}") from None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ConfigError(f"{path} is no expert profile that this version reads; {remedy}")
    for name, ours in asdict(identity).items():
        if content.get(name) != ours:
            raise ConfigError(
                f"the expert profile {path} is of another model: its {name} is {content.get(name)!r}, here "
                f"it is {ours!r}; {remedy}"
            )
    stored, shape = content.get("counts"), (identity.num_layers, identity.num_experts)
    if not isinstance(stored, bytes) or len(stored) != 4 * shape[0] * shape[1]:
        raise ConfigError(f"{path}: the counts are not those of {shape[0]} x {shape[1]} experts; {remedy}")
    counts = np.frombuffer(stored, "<f4").reshape(shape).astype(np.float32)
    if not np.isfinite(counts).all() or (counts < 0).any():
        raise ConfigError(f"{path}: there are counts that are negative or no numbers; {remedy}")
    return counts


Experts = tuple[NDArray[np.int32], NDArray[np.int32]]
"""Layers and experts, int32 [pairs] each."""


def fill_order(counts: Counts) -> Experts:
    """All experts of all layers, the hottest first; as hot as each other, as without a profile (zeros), in
    turns of the layers."""
    layers, experts = np.divmod(np.arange(counts.size, dtype=np.int32), np.int32(counts.shape[1]))
    order = np.lexsort((layers, experts, -counts.reshape(-1)))
    return layers[order], experts[order]


def slot_bytes(blob_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of slots for blobs of these sizes."""
    rounded: NDArray[np.int64] = -(-blob_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
    return rounded


def assign_slots(
    order: Experts,
    blob_bytes: NDArray[np.int64],
    *,
    budget_bytes: int | None = None,
    num_slots: int | None = None,
) -> Experts:
    """Slots, in that order, for as many experts as fit: of each slot its layer, and the expert to begin with.

    `blob_bytes`: int64 [layers], of one expert. Slots of the coldest experts are the last ones, so who lends
    slots begins at the end. At least one bound has to be given.
    """
    if budget_bytes is None and num_slots is None:
        raise ValueError("neither a budget in bytes nor a number of slots bounds the slots")
    layers, experts = order
    count = len(layers) if num_slots is None else min(num_slots, len(layers))
    if budget_bytes is not None:
        ends = np.cumsum(slot_bytes(np.asarray(blob_bytes, np.int64))[layers[:count]])
        count = int(np.searchsorted(ends, budget_bytes, side="right"))
    return layers[:count], experts[:count]
