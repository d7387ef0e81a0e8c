"""Experts that are read and locked at start: all pages, once, and the right words where that is not
allowed."""

import errno
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import ModelFileError, ResourceError
from shared.gguf.file import GGUFFile
from shared.gguf.model import GGUFModel
from shared.locked_memory import may_lock
from stager import ram_residency
from stager.ram_residency import RamResidency
from tests.support.tiny_model import NUM_LAYERS, tiny_model

Range = tuple[int, int]


@pytest.fixture
def file(tmp_path: Path) -> Iterator[GGUFModel]:
    with GGUFModel(tiny_model().write(tmp_path / "tiny.gguf")) as opened:
        yield opened


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> list[Range]:
    """What is locked, without doing so: not every machine allows it."""
    ranges: list[Range] = []
    monkeypatch.setattr(GGUFFile, "lock", lambda self, start, num_bytes: ranges.append((start, num_bytes)))
    monkeypatch.setattr(ram_residency, "may_lock", lambda num_bytes: True)
    return ranges


def residency(file: GGUFModel, reports: list[float] | None = None) -> RamResidency:
    return RamResidency(
        file, NUM_LAYERS, lambda activity, progress: reports.append(progress) if reports is not None else None
    )


def test_every_expert_is_locked(
    file: GGUFModel, locked: list[Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces on whole pages, with progress; a second call finds it done."""
    monkeypatch.setattr(ram_residency, "_PIECE_BYTES", 3 * 4096)
    reports: list[float] = []
    keeping = residency(file, reports)
    keeping.hold(is_required=True)
    pages = {
        page
        for start, num_bytes in locked
        for page in range(start // 4096, (start + num_bytes - 1) // 4096 + 1)
    }
    for name in file:
        info = file.info(name)
        if "_exps" in name:
            assert pages >= set(range(info.offset // 4096, (info.offset + info.num_bytes - 1) // 4096 + 1))
    assert all(start % 4096 == 0 for start, _ in locked)
    assert reports == sorted(reports)
    assert reports[0] == 0
    count = len(locked)
    keeping.hold(is_required=True)
    assert len(locked) == count
    released: list[Range] = []
    monkeypatch.setattr(
        GGUFFile, "unlock", lambda self, start, num_bytes: released.append((start, num_bytes))
    )
    keeping.release()
    assert released == locked
    keeping.hold(is_required=True)
    assert len(locked) == 2 * count


@pytest.mark.parametrize("is_known_before", [True, False])
def test_a_lock_that_is_not_allowed(
    file: GGUFModel,
    is_known_before: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Ends the start where it was asked for, with the limit and how to raise it; else it is said, once."""

    def refuse(self: GGUFFile, start: int, num_bytes: int) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(GGUFFile, "lock", refuse)
    monkeypatch.setattr(ram_residency, "may_lock", lambda num_bytes: not is_known_before)
    message = (
        r"^--experts resident: .* cannot be locked in RAM .*RLIMIT_MEMLOCK\) is .*ulimit -l.*docker: ulimits"
    )
    with pytest.raises(ResourceError, match=message):
        residency(file).hold(is_required=True)
    with caplog.at_level(logging.INFO):
        residency(file).hold(is_required=False)
    assert [message for message in caplog.messages if "cannot be locked in RAM" in message] == [
        caplog.messages[0]
    ]
    assert caplog.messages[-1].endswith("not locked")


def test_released_while_it_reads(
    file: GGUFModel, locked: list[Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is told to stop does not read on; who begins anew holds all of it."""
    keeping = residency(file)
    begun, proceed = threading.Event(), threading.Event()

    def wait(self: GGUFFile, start: int, num_bytes: int) -> None:
        begun.set()
        assert proceed.wait(10)

    monkeypatch.setattr(GGUFFile, "populate", wait)
    holding = threading.Thread(target=lambda: keeping.hold(is_required=True))
    holding.start()
    assert begun.wait(10)
    releasing = threading.Thread(target=keeping.release)
    releasing.start()
    while not keeping._is_released.is_set():
        threading.Event().wait(1e-3)
    proceed.set()
    holding.join(10)
    releasing.join(10)
    assert len(locked) == 1
    keeping.hold(is_required=True)
    assert len(locked) == 1 + len(keeping._pieces)


def test_experts_that_cannot_be_read(
    file: GGUFModel, locked: list[Range], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector: named at start, not found by a bus error later."""

    def fail(self: GGUFFile, start: int, num_bytes: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(GGUFFile, "populate", fail)
    with pytest.raises(
        ModelFileError, match=r"tiny\.gguf: bytes \d+ to \d+ cannot be read: Input/output error"
    ):
        residency(file).hold(is_required=False)


def test_pages_are_there_afterwards(file: GGUFModel) -> None:
    """The real calls, on a range that every limit allows."""
    (part,) = file.parts
    part.populate(0, 8192)
    part.lock(0, 4096)


def test_who_may_lock(tmp_path: Path) -> None:
    """A privileged process may, whatever its limit."""
    status = tmp_path / "status"
    status.write_text("Name:\tx\nCapEff:\t0000000000004000\n")
    assert may_lock(1 << 60, status)
    status.write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    assert may_lock(0, status)
