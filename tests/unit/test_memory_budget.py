"""How much memory there is: of a machine, of control groups of both versions, and what has to be left."""

from pathlib import Path

import pytest

from shared.gguf.model import GGUFModel
from shared.kv_format import KV_FORMATS
from shared.memory_budget import Held, Memory, held_by_stack, needs_of, read_memory
from shared.model_config import read_model_config
from tests.support.tiny_model import tiny_model

MIB = 1 << 20
UNLIMITED_V1 = 0x7FFFFFFFFFFFF000


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A /proc of a machine with 32 GiB, 20 GiB of them available, and no control groups."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    lines = {"MemTotal": 32 << 20, "MemFree": 1 << 20, "MemAvailable": 20 << 20}
    (proc / "meminfo").write_text("".join(f"{name}:   {kib} kB\n" for name, kib in lines.items()))
    (proc / "self/cgroup").write_text("0::/\n")
    return tmp_path


def group(folder: Path, version: int, limit: int | str, usage: int, **stat: int) -> None:
    """A control group's files; `stat` in MiB."""
    folder.mkdir(parents=True, exist_ok=True)
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    for name, value in zip(names, (limit, usage), strict=True):
        (folder / name).write_text(f"{value}\n")
    lines = [f"{name} {value * MIB}\n" for name, value in stat.items()]
    (folder / "memory.stat").write_text("".join(lines))


def memory(root: Path) -> Memory:
    return read_memory(root / "proc", root / "cgroup")


def test_a_machine_without_limits(machine: Path) -> None:
    """What the kernel says, and a floor of a sixteenth."""
    assert memory(machine) == Memory(total=32 << 30, available=20 << 30)
    assert memory(machine).floor == 2 << 30


def test_a_group_of_version_1(machine: Path) -> None:
    """Its pages of files are available, locked ones are not among them; those of its children count."""
    (machine / "proc/self/cgroup").write_text("9:cpu:/other\n4:memory:/a/b\n0::/\n")
    group(machine / "cgroup/memory/a/b", 1, UNLIMITED_V1, 900 * MIB)
    group(
        machine / "cgroup/memory/a",
        1,
        2500 * MIB,
        2000 * MIB,
        inactive_file=1,
        total_inactive_file=300,
        total_active_file=200,
        total_unevictable=600,
    )
    assert memory(machine) == Memory(total=2500 * MIB, available=1000 * MIB)
    assert memory(machine).floor == 2500 * MIB // 16


@pytest.mark.parametrize("path", ["/", "/not/seen/in/the/container"])
def test_a_group_of_version_2(machine: Path, path: str) -> None:
    """Also where the path is one that only the host sees."""
    (machine / "proc/self/cgroup").write_text(f"0::{path}\n")
    group(machine / "cgroup", 2, 4096 * MIB, 1000 * MIB, inactive_file=100, active_file=50)
    assert memory(machine) == Memory(total=4096 * MIB, available=3246 * MIB)


def test_groups_that_say_nothing(machine: Path) -> None:
    """No limit, files that are missing or odd, a limit above what the machine has: as if there were none."""
    without = memory(machine)
    (machine / "proc/self/cgroup").write_text("4:memory:/a\n0::/b\n")
    group(machine / "cgroup/b", 2, "max", 5)
    group(machine / "cgroup/memory/a", 1, 64 << 30, 0)
    (machine / "cgroup/memory/memory.limit_in_bytes").write_text("nonsense")
    assert memory(machine) == without


def test_a_group_that_is_over_its_limit(machine: Path) -> None:
    """Has nothing to give, rather than less than nothing."""
    group(machine / "cgroup", 2, 100 * MIB, 180 * MIB)
    assert memory(machine).available == 0
    assert memory(machine).floor == 128 * MIB


def test_what_else_is_needed(tmp_path: Path) -> None:
    """Everything but experts, table and embedding; of processes, what they have not taken already."""
    with GGUFModel(tiny_model().write(tmp_path / "tiny.gguf")) as model:
        config = read_model_config(model)
        needs = needs_of(model, config, Held(private=0, locked=0), row_bytes=5000)
        left_out = ("_exps.", "per_layer", "token_embd")
        expected = sum(
            model.info(name).num_bytes for name in model if not any(part in name for part in left_out)
        )
        assert needs.dense == expected
        # A head of keys and one of values of 32 each for the 512 tokens there can be, one of the indexer for
        # every four.
        assert needs.context == 4 * (512 * 2 * 32 + 512 // 4 * 32)
        as_int8 = needs_of(
            model, config, Held(private=0, locked=0), row_bytes=5000, kv_format=KV_FORMATS["int8"]
        )
        assert as_int8.context == 512 * 2 * (32 + 2) + 4 * 512 // 4 * 32
        assert needs.total - as_int8.total == needs.context - as_int8.context
        held = needs_of(model, config, Held(private=100 * MIB, locked=1000), row_bytes=0)
        assert held.dense == needs.dense
        assert needs.processes - held.processes == 100 * MIB
        assert needs_of(model, config, Held(private=1 << 40, locked=0), row_bytes=0).processes >= 0


def test_what_a_device_takes_over(tmp_path: Path) -> None:
    """On a CUDA device dense weights and the context are there; where RAM plays a device, slots are in it."""
    with GGUFModel(tiny_model().write(tmp_path / "tiny.gguf")) as model:
        config = read_model_config(model)
        nothing = Held(private=0, locked=0)
        alone = needs_of(model, config, nothing, row_bytes=5)
        on_cuda = needs_of(model, config, nothing, row_bytes=5, is_on_cuda=True)
        assert (on_cuda.dense, on_cuda.context, on_cuda.slots) == (0, 0, 0)
        assert on_cuda.total == alone.total - alone.dense - alone.context
        played = needs_of(model, config, nothing, row_bytes=5, slot_bytes=7000)
        assert played.total == alone.total + 7000


def test_what_the_stack_has_locked_is_its_own() -> None:
    """A cpu_worker that comes back finds all experts locked by the stager: they still fit."""
    memory = Memory(total=64 << 30, available=10 << 30)
    assert memory.with_locked(Held(private=0, locked=40 << 30)).available == 50 << 30
    assert memory.with_locked(Held(private=0, locked=60 << 30)).available == 64 << 30


def test_what_the_stack_holds() -> None:
    """This process alone, or with all that its parent has started."""
    alone = held_by_stack(is_supervised=False)
    assert alone.private > 10 * MIB
    assert held_by_stack(is_supervised=True).private >= alone.private // 2
