"""Shared-memory segments: what both sides see, who may attach, and that nothing is left behind."""

import mmap
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shared import arena
from shared.arena import SHARED_MEMORY, Segment, SegmentDescriptor, SegmentLayout, sweep_segments
from shared.errors import ProtocolError, ResourceError
from tests.support.second_process import second_process

LAYOUT = SegmentLayout({"numbers": (np.int32, (3, 5)), "values": (np.float32, (7,))})

OWNER = """
import sys
import numpy as np
from shared.arena import Segment, SegmentLayout
layout = SegmentLayout({"numbers": (np.int32, (3, 5)), "values": (np.float32, (7,))})
segment = Segment.create("test", sys.argv[1], layout)
segment.arrays["numbers"][...] = 7
print(segment.descriptor.name, segment.descriptor.num_bytes, flush=True)
sys.stdin.readline()
print(segment.arrays["values"].tolist(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def owner() -> Iterator[str]:
    """An incarnation of its own; nothing of it may be left in /dev/shm afterwards."""
    incarnation = secrets.token_hex(8)
    yield incarnation
    left = list(SHARED_MEMORY.glob(f"*{incarnation}*"))
    for path in left:
        path.unlink()
    assert not left


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_both_sides_see_the_same(owner: str) -> None:
    """Zeros at first, then what either side writes; each array on its own cache lines."""
    made = Segment.create("test", owner, LAYOUT)
    attached = Segment.attach(made.descriptor, LAYOUT)
    assert not made.arrays["numbers"].any()
    made.arrays["numbers"][1] = np.arange(5)
    attached.arrays["values"][6] = 2.5
    assert attached.arrays["numbers"][1].tolist() == [0, 1, 2, 3, 4]
    assert made.arrays["values"][6] == 2.5
    assert [made.layout.offset(name) % 64 for name in made.arrays] == [0, 0]
    assert made.address("values", 4) % 64 == 4
    attached.close()
    made.close()


def test_across_processes(owner: str) -> None:
    """The descriptor that travels in a message is all that another process needs."""
    with second_process(OWNER, owner) as process:
        name, num_bytes = process.line().split()
        segment = Segment.attach(SegmentDescriptor(name, int(num_bytes)), LAYOUT)
        assert (segment.arrays["numbers"] == 7).all()
        segment.arrays["values"][...] = 0.5
        process.say("look")
        assert process.line() == str([0.5] * 7)
        segment.close()
        process.kill()
        sweep_segments()


def test_kill_and_sweep(owner: str) -> None:
    """A living owner's segment is left alone however often others start; a killed one's goes at the next."""
    with second_process(OWNER, owner) as process:
        name, _ = process.line().split()
        assert name not in sweep_segments()
        assert (SHARED_MEMORY / name).exists()
        process.kill()
        sweep_segments()
        assert not (SHARED_MEMORY / name).exists()


def test_sweep_leaves_what_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of other programs that happen to be called alike, directories, links and pipes stay."""
    monkeypatch.setattr(arena, "SHARED_MEMORY", tmp_path)
    (tmp_path / "strata-notes").write_bytes(b"of somebody else")
    (tmp_path / "strata-empty").touch()
    (tmp_path / "strata-folder").mkdir()
    (tmp_path / "strata-link").symlink_to("elsewhere")
    (tmp_path / "elsewhere").write_bytes(b"STRATA01")
    os.mkfifo(tmp_path / "strata-pipe")
    (tmp_path / "strata-dead").write_bytes(b"STRATA01")
    assert sweep_segments() == ["strata-dead"]
    assert len(list(tmp_path.iterdir())) == 6


def test_close(owner: str) -> None:
    """The owner removes the name; views that a thread still holds stay readable; a second close is nothing.
    The other side's close removes nothing."""
    made = Segment.create("test", owner, LAYOUT)
    path = SHARED_MEMORY / made.name
    attached = Segment.attach(made.descriptor, LAYOUT)
    attached.close()
    assert path.exists()
    view = made.arrays["values"]
    view[0] = 3
    made.close()
    made.close()
    assert not path.exists()
    assert view[0] == 3


def test_no_room(owner: str) -> None:
    """Shortage is an error when a segment is made, with both sizes and what to do, not a bus error in the
    middle of an answer; and nothing of the attempt is left."""
    before = open_descriptors()
    layout = SegmentLayout({"huge": (np.uint8, (1 << 50,))})
    with pytest.raises(
        ResourceError,
        match=r"/dev/shm: no room for 1073741824 MiB .*, \d+ MiB are free; enlarge it .* or lower --prefill",
    ):
        Segment.create("test", owner, layout)
    assert open_descriptors() == before


def test_a_name_that_is_taken(owner: str) -> None:
    """Not said to be a shortage; and whoever has the name keeps it."""
    made = Segment.create("test", owner, LAYOUT)
    with pytest.raises(ResourceError, match=rf"{made.name}: shared memory cannot be made: File exists"):
        Segment.create("test", owner, LAYOUT)
    assert (SHARED_MEMORY / made.name).exists()
    made.close()


def test_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container without /dev/shm is told so."""
    monkeypatch.setattr(arena, "SHARED_MEMORY", tmp_path / "gone")
    with pytest.raises(ResourceError, match="gone/strata-test-x: shared memory cannot be made: No such file"):
        Segment.create("test", "x", LAYOUT)


@pytest.mark.parametrize(
    "other",
    [
        SegmentLayout({"numbers": (np.int32, (5, 3)), "values": (np.float32, (7,))}),
        SegmentLayout({"numbers": (np.uint32, (3, 5)), "values": (np.float32, (7,))}),
        SegmentLayout({"numbers": (np.int32, (3, 5)), "value": (np.float32, (7,))}),
        SegmentLayout({"values": (np.float32, (7,)), "numbers": (np.int32, (3, 5))}),
        SegmentLayout({"numbers": (np.int32, (3, 5))}),
        SegmentLayout({"numbers": (np.int32, (3, 5)), "values": (np.float32, (70000,))}),
    ],
)
def test_another_layout_is_refused(other: SegmentLayout, owner: str) -> None:
    """Sides that would read each other's bytes differently never begin: shape, type, name, order or size."""
    made = Segment.create("test", owner, LAYOUT)
    before = open_descriptors()
    with pytest.raises(ProtocolError, match=r"has another layout; are both sides the same version\?"):
        Segment.attach(made.descriptor, other)
    assert open_descriptors() == before
    made.close()


@pytest.mark.parametrize("num_bytes", [0, 10, 4096])
def test_a_cut_segment_is_refused(num_bytes: int, owner: str) -> None:
    """Mapping more than the file has would be a bus error on the first touch."""
    made = Segment.create("test", owner, LAYOUT)
    assert made.descriptor.num_bytes == 2 * mmap.PAGESIZE
    os.truncate(SHARED_MEMORY / made.name, num_bytes)
    with pytest.raises(ProtocolError, match="has another layout"):
        Segment.attach(made.descriptor, LAYOUT)
    made.close()


def test_a_segment_that_is_gone() -> None:
    """A descriptor of an owner that has ended in the meantime."""
    with pytest.raises(ProtocolError, match="strata-test-gone: the segment cannot be opened: No such file"):
        Segment.attach(SegmentDescriptor("strata-test-gone", 8192), LAYOUT)


@pytest.mark.parametrize("name", ["strata-../../etc/passwd", "passwd", "", "/etc/passwd"])
def test_names_that_are_none(name: str) -> None:
    """A message cannot make a process map any file it can read."""
    with pytest.raises(ProtocolError, match="is not the name of a segment"):
        Segment.attach(SegmentDescriptor(name, 8192), LAYOUT)
