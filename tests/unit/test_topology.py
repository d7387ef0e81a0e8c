"""How CPUs are divided between processes, on machines of every size."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared import topology
from shared.errors import ConfigError
from shared.topology import cpu_quota, cpu_set, meeting_cpu, num_threads_on, spin_time_s, usable_cpus

Machine = Callable[[set[int]], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Makes this process one that may run on a set of CPUs, as it would be right after its start."""

    def become(cpus: set[int]) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus)
        usable_cpus.cache_clear()

    yield become
    monkeypatch.undo()
    usable_cpus.cache_clear()


def halves() -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (
        cpu_set("auto", flag="--cpu-worker-cpus", second_half=False),
        cpu_set("auto", flag="--stager-cpus", second_half=True),
    )


@pytest.mark.parametrize(
    ("cpus", "first", "second"),
    [
        ({0}, (0,), (0,)),
        ({0, 1}, (0, 1), (0, 1)),
        ({0, 1, 2}, (0, 1, 2), (0, 1, 2)),
        ({0, 1, 2, 3}, (0, 1), (2, 3)),
        ({0, 1, 2, 3, 4}, (0, 1), (2, 3, 4)),
        (set(range(16)), tuple(range(8)), tuple(range(8, 16))),
        ({2, 3, 10, 11}, (2, 3), (10, 11)),
    ],
)
def test_division(cpus: set[int], first: tuple[int, ...], second: tuple[int, ...], machine: Machine) -> None:
    """0-7 and 8-15 on the machine this is made for; halves elsewhere, of what the process may use; everything
    for everybody where there is too little to divide."""
    machine(cpus)
    assert halves() == (first, second)


@pytest.mark.parametrize(("num_cpus", "spins"), [(1, False), (2, False), (3, False), (4, True), (16, True)])
def test_spinning(num_cpus: int, spins: bool, machine: Machine) -> None:
    """Only where the other side has a core of its own."""
    machine(set(range(num_cpus)))
    assert (spin_time_s() > 0) is spins


def test_pinning_changes_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has pinned itself to its half must not take half of that when it asks again, nor stop to
    spin because it counts its own CPUs only."""
    machine(set(range(4)))
    before = halves(), spin_time_s()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(before[0][0]))
    assert (halves(), spin_time_s()) == before


@pytest.mark.parametrize(
    ("setting", "cpus"),
    [
        ("0-7", (0, 1, 2, 3)),
        ("2", (2,)),
        ("0, 2,9", (0, 2)),
        ("1-2,0", (0, 1, 2)),
        ("8-15", (0, 1, 2, 3)),
        ("0-999999", (0, 1, 2, 3)),
    ],
)
def test_named_cpus(setting: str, cpus: tuple[int, ...], machine: Machine) -> None:
    """What this machine lacks is left out; where nothing is left, one compose file still runs everywhere."""
    machine(set(range(4)))
    assert cpu_set(setting, flag="--stager-cpus", second_half=True) == cpus


@pytest.mark.parametrize(
    "setting", ["", "a", "0-", "-3", "1,,2", "0-3-5", "1.5", "²", "0x1", "1-9999999", "-"]
)
def test_unreadable_cpus(setting: str, machine: Machine) -> None:
    """The message has the flag, what was given and what is expected."""
    machine(set(range(4)))
    with pytest.raises(
        ConfigError, match=f"^--stager-cpus is {setting!r}; expected CPUs as 0-7 or 0,2,4, or"
    ):
        cpu_set(setting, flag="--stager-cpus", second_half=True)


def test_backward_cpus(machine: Machine) -> None:
    """A range that runs backwards is more likely a slip than an empty set."""
    machine(set(range(4)))
    with pytest.raises(ConfigError, match="--stager-cpus is '0,3-1'; the CPUs 3-1 run backwards"):
        cpu_set("0,3-1", flag="--stager-cpus", second_half=True)


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        ({}, None),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "nonsense"}, None),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "50000", "cpu/cpu.cfs_period_us": "100000"}, 0.5),
    ],
)
def test_limit_of_a_container(files: dict[str, str], granted: float | None, tmp_path: Path) -> None:
    """Both versions of control groups."""
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content + "\n")
    assert cpu_quota(tmp_path) == granted


@pytest.mark.parametrize(("granted", "num_threads"), [(None, 8), (16.0, 8), (2.0, 2), (1.5, 2), (0.5, 1)])
def test_threads_within_the_limit(
    granted: float | None, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with a share of a large machine is not given a thread for each of its CPUs."""
    monkeypatch.setattr(topology, "cpu_quota", lambda: granted)
    assert num_threads_on(range(8)) == num_threads


@pytest.mark.parametrize(
    ("cpus", "meeting"), [({5}, None), ({3, 4}, 3), ({0, 1, 2}, 0), ({0, 1, 2, 3}, None)]
)
def test_where_threads_meet(cpus: set[int], meeting: int | None, machine: Machine) -> None:
    """Only where processes share all CPUs, and there is another one for the helpers."""
    machine(cpus)
    assert meeting_cpu() == meeting
