"""How much memory there is for experts: what is available, what must stay free, what else will be needed.

*Available* is what the kernel could give without swapping: MemAvailable, or what a control group (of version
1 or 2, or one above it) leaves to its limit, whichever is less. Pages of files count as available there,
since they can be given back; what of them will be needed all the time is subtracted as a need.

The *floor* is what loading never takes: a sixteenth of all memory (of the machine, or of the group that
limits it), and at least 128 MiB. It is for what cannot be known: other programs, and pages of files that are
read again and again.

*Needs* are what the stack will take beside experts. Estimates, each said to the log; `--ram-budget` overrules
them, but not the floor.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shared.gguf.model import GGUFModel
from shared.kv_format import EXACT, KvFormat
from shared.model_config import Qwen4ExpConfig
from shared.placement.sizes import context_bytes, dense_file_bytes, prediction_expert_bytes, state_bytes

_FLOOR_PART = 16
_SMALLEST_FLOOR = 128 << 20
# Private memory of the four processes once they serve, measured; torch is a third of it.
_PROCESSES_BYTES = 800 << 20
COUNTED_CONTEXT_TOKENS = 8192
"""Tokens of context, of all requests together, that keys and values in RAM are accounted for, whatever
`--max-context` is: few requests are that long, and what they take is not reserved."""
SMALL_TABLE_BYTES = 64 << 20
"""An n-gram table of this size is loaded: the programs are larger."""
_ROW_CACHE_PART, _LARGEST_ROW_CACHE = 32, 1 << 30
_CONVERSATIONS_PART, _LARGEST_CONVERSATIONS = 16, 2 << 30
# Rings, and what the steps of a model keep between layers.
_BUFFERS_BYTES = 128 << 20


@dataclass(frozen=True, slots=True)
class Memory:
    """What this process and its peers can have, in bytes. `total` is of the machine, or of the group whose
    limit `available` comes from."""

    total: int
    available: int

    @property
    def floor(self) -> int:
        """What has to stay free."""
        return max(_SMALLEST_FLOOR, self.total // _FLOOR_PART)

    def with_locked(self, held: "Held") -> "Memory":
        """As if the stack had locked nothing: what it has locked is what it would take again."""
        return replace(self, available=min(self.total, self.available + held.locked))


def read_memory(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Memory:
    """What is available now. Raises OSError where /proc does not say."""
    lines = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines())
    total, available = (1024 * int(lines[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    found = [Memory(total, available), *(group for group in _groups(proc, groups) if group.total < total)]
    return min(found, key=lambda memory: memory.available)


def _groups(proc: Path, root: Path) -> Iterator[Memory]:
    """Every group this process is in that has a limit."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            mount, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        elif number == "0" and not controllers:
            mount, names = root, ("memory.max", "memory.current", "")
        else:
            continue
        # In a container the path may be one that only the host sees; the group is then at the root.
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if folder.is_relative_to(mount) and (memory := _group(folder, *names)) is not None:
                yield memory


def _group(folder: Path, limit_name: str, usage_name: str, prefix: str) -> Memory | None:
    try:
        limit = (folder / limit_name).read_text().strip()
        usage = int((folder / usage_name).read_text())
        lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        stat = {name: int(value) for name, value in lines}
    except (OSError, ValueError):
        return None
    if not limit.isdigit():
        return None
    # Pages of files that are locked are in neither of these lists.
    files = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
    return Memory(int(limit), max(0, int(limit) - usage + files))


def row_cache_bytes(memory: Memory, table_bytes: int, ple_io: str, asked_bytes: int | None) -> int:
    """What rows of the n-gram table take: all of it where it is loaded, else the row cache, of `asked_bytes`
    unless that is None. By total memory, so that it comes out the same whoever asks when."""
    if ple_io == "ram" or (ple_io == "auto" and table_bytes <= SMALL_TABLE_BYTES):
        return table_bytes
    # More than two times the table is never used.
    if asked_bytes is not None:
        return min(asked_bytes, 2 * table_bytes)
    return min(memory.total // _ROW_CACHE_PART, _LARGEST_ROW_CACHE, 2 * table_bytes)


def conversation_cache_bytes(memory: Memory, asked_mib: int | None) -> int:
    """What kept conversations may take (`--conversation-cache-mib`): a sixteenth of all memory, but no more
    than 2 GiB, unless that is not None."""
    if asked_mib is not None:
        return asked_mib << 20
    return min(memory.total // _CONVERSATIONS_PART, _LARGEST_CONVERSATIONS)


@dataclass(frozen=True, slots=True)
class Needs:
    """What the stack will take beside experts, in bytes."""

    dense: int
    """Weights that every token needs, where the file maps them; none where they are on a CUDA device."""
    context: int
    """Keys and values, unless they are on a CUDA device."""
    rows: int
    """Rows of the n-gram table."""
    processes: int
    """Programs, and what they keep in their own memory, beyond what they have already."""
    slots: int = 0
    """Slots of experts where RAM plays the memory of a device."""
    states: int = 0
    """What each request that runs keeps beside, likewise."""
    conversations: int = 0
    """Checkpoints of conversations, which are in RAM whatever device computes."""
    lent: int = 0
    """What RAM keeps of slots that are lent to prompts. Not in the total: where all experts are resident they
    are there already."""
    prediction: int = 0
    """The experts of the prediction block. Not in the total: they are kept as other experts are."""

    @property
    def total(self) -> int:
        """All of it, whether or not slots are lent."""
        return (
            self.dense
            + self.context
            + self.states
            + self.conversations
            + self.rows
            + self.processes
            + self.slots
        )


def needs_of(
    model: GGUFModel,
    config: Qwen4ExpConfig,
    held: "Held",
    row_bytes: int,
    *,
    kv_format: KvFormat = EXACT,
    is_on_cuda: bool = False,
    slot_bytes: int = 0,
    lent_bytes: int = 0,
    conversation_bytes: int = 0,
    parallel: int = 0,
) -> Needs:
    """What a stack with this model will take, less what it has of that already; `row_bytes` for rows of the
    n-gram table, `slot_bytes` for slots of experts that are in RAM, `lent_bytes` for those that are lent,
    `conversation_bytes` for conversations that are kept, `parallel` for the requests that run at a time;
    `kv_format` is how keys and values are kept. A model that runs on a CUDA device has its dense weights,
    keys and values there."""
    context = context_bytes(config, min(COUNTED_CONTEXT_TOKENS, config.context_length), kv_format)
    return Needs(
        dense=0 if is_on_cuda else dense_file_bytes(model, config),
        context=0 if is_on_cuda else context,
        rows=row_bytes,
        processes=max(0, _PROCESSES_BYTES - held.private) + _BUFFERS_BYTES,
        # What processes have beyond their own is slots that are there already.
        slots=max(0, slot_bytes - max(0, held.private - _PROCESSES_BYTES)),
        lent=lent_bytes,
        conversations=conversation_bytes,
        states=0 if is_on_cuda else parallel * state_bytes(config),
        prediction=prediction_expert_bytes(model, config),
    )


@dataclass(frozen=True, slots=True)
class Held:
    """What the stack's processes hold already: memory of their own, and pages they have locked, in bytes."""

    private: int
    locked: int


def held_by_stack(proc: Path = Path("/proc"), *, is_supervised: bool) -> Held:
    """Of this process, and of its siblings where one supervisor has started them all. Of processes in other
    containers nothing is known, so that too much is kept free for them rather than too little."""
    processes = [proc / "self"]
    if is_supervised:
        parent = proc / str(os.getppid()) / "task"
        try:
            children = [pid for task in parent.iterdir() for pid in (task / "children").read_text().split()]
            processes = [proc / pid for pid in children]
        except OSError:
            pass
    statuses = [_status(folder) for folder in processes]
    return Held(
        private=sum(status.get("RssAnon", 0) for status in statuses),
        locked=sum(status.get("VmLck", 0) for status in statuses),
    )


def _status(folder: Path) -> dict[str, int]:
    """The numbers of a process's status that are in kB, in bytes; none where it is gone."""
    try:
        lines = (line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return {name: 1024 * int(value.split()[0]) for name, value in lines if value.endswith(" kB")}
    except OSError:
        return {}
