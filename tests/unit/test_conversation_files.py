"""Conversations on the disk: they come back as they were, or not at all."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from gpu_worker.conversation_files import Arrays, ConversationFiles, Leaving, Saved
from shared.errors import ConfigError

TIMEOUT_S = 30.0
MANY = 1 << 30


def token_ids(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


PROMPT = token_ids(*range(100))


def leaving(length: int, salt: str = "", size: int = 1000) -> Leaving:
    """Of the first tokens of the prompt."""
    arrays: Arrays = {
        "floats": np.arange(size, dtype=np.float32).reshape(2, -1) + length,
        "bytes": np.full((3, 1, 4), length, np.uint8),
        "none": np.zeros((0, 5), np.float16),
    }
    return Leaving(salt, PROMPT[:length], 1, lambda: arrays)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ConversationFiles]:
    made = ConversationFiles(tmp_path, "model", MANY)
    yield made
    made.close()


def reopened(files: ConversationFiles, folder: Path, identity: str = "model") -> ConversationFiles:
    """As after a restart."""
    files.close()
    return ConversationFiles(folder, identity, MANY)


def loaded(files: ConversationFiles) -> Saved:
    """The next one that comes."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        for saved in files.take_loaded():
            return saved
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_there_and_back(files: ConversationFiles, tmp_path: Path) -> None:
    """In the same process and after a restart, the longest beginning of a prompt."""
    for length in (20, 60, 40):
        files.save(leaving(length), is_last=True)
    wait(lambda: len(files) == 3)
    for is_restarted in (False, True):
        opened = reopened(files, tmp_path) if is_restarted else files
        assert not opened.is_coming(PROMPT, "other", 0)
        assert not opened.is_coming(PROMPT, "", 60)
        assert not opened.is_coming(PROMPT[:20], "", 0)
        assert not opened.is_coming(PROMPT, "", 0, max_bytes=1000)
        assert opened.is_coming(PROMPT, "", 10)
        saved = loaded(opened)
        assert saved.token_ids.tolist() == PROMPT[:60].tolist()
        assert (saved.salt, saved.num_pending) == ("", 1)
        expected = leaving(60).arrays()
        assert saved.arrays.keys() == expected.keys()
        for name, array in expected.items():
            assert saved.arrays[name].dtype == array.dtype
            assert np.array_equal(saved.arrays[name], array)
        # It is in memory now; what is shorter is still to be had.
        assert opened.is_coming(PROMPT, "", 30)
        assert len(loaded(opened).token_ids) == 40
        opened.save(leaving(60), is_last=True)
        wait(lambda opened=opened: opened.is_coming(PROMPT, "", 50))  # type: ignore[misc]
        loaded(opened)
    opened.close()


def test_other_models_have_other_files(files: ConversationFiles, tmp_path: Path) -> None:
    """In the same folder."""
    files.save(leaving(50), is_last=True)
    other = reopened(files, tmp_path, "another model")
    assert len(other) == 0
    assert not other.is_coming(PROMPT, "", 0)
    same = reopened(other, tmp_path)
    assert len(same) == 1
    same.close()


@pytest.mark.parametrize("place", [0, 30, 200, -2000, -1])
@pytest.mark.parametrize("is_cut", [False, True])
def test_damaged_files(tmp_path: Path, place: int, is_cut: bool) -> None:
    """Are of no use, and are removed: at the start, or when they are read."""
    files = ConversationFiles(tmp_path, "model", MANY)
    files.save(leaving(50), is_last=True)
    files.close()
    (path,) = tmp_path.glob("*/*.conversation")
    content = bytearray(path.read_bytes())
    content[place] ^= 0x55
    path.write_bytes(content[:place] if is_cut else content)
    files = ConversationFiles(tmp_path, "model", MANY)
    if files.is_coming(PROMPT, "", 0):
        wait(lambda: not files.is_coming(PROMPT, "", 0))
        assert list(files.take_loaded()) == []
    files.close()
    assert not path.exists()


def test_what_is_there_of_others_is_left_alone(tmp_path: Path) -> None:
    """What a killed process has left half-written is not."""
    files = ConversationFiles(tmp_path, "model", MANY)
    files.save(leaving(50), is_last=True)
    files.close()
    (folder,) = tmp_path.iterdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "half.partial").write_bytes(b"x")
    # One that another process writes.
    (folder / f"half.{os.getppid()}.partial").write_bytes(b"x")
    (folder / "folder.conversation").mkdir()
    (folder / "folder.partial").mkdir()
    (folder / "link.conversation").symlink_to(tmp_path / "nowhere")
    files = ConversationFiles(tmp_path, "model", MANY)
    assert len(files) == 1
    files.close()
    assert (folder / f"half.{os.getppid()}.partial").exists()
    assert (folder / "folder.conversation").is_dir()
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "half.partial").exists()


def test_the_disk_is_bounded(tmp_path: Path) -> None:
    """Those that were not used for the longest time go; what is too large by itself is not written."""
    files = ConversationFiles(tmp_path, "model", 3 * 4400)
    for length in (20, 30, 40):
        files.save(leaving(length), is_last=True)
    wait(lambda: len(files) == 3)
    assert files.is_coming(PROMPT[:21], "", 0)
    loaded(files)
    files.save(leaving(50), is_last=True)
    files.save(leaving(60, size=10_000), is_last=True)
    files.close()
    files = ConversationFiles(tmp_path, "model", 3 * 4400)
    kept = [
        length for length in (20, 30, 40, 50, 60) if files.is_coming(PROMPT[: length + 1], "", length - 1)
    ]
    assert kept == [20, 40, 50]
    assert files.num_bytes <= 3 * 4400
    files.close()
    # Also of what is there already.
    files = ConversationFiles(tmp_path, "model", 5000)
    assert len(files) == len(list(tmp_path.glob("*/*.conversation"))) == 1
    files.close()


def test_too_many_at_once(tmp_path: Path) -> None:
    """Are dropped, since they are in memory while they wait; the last ones are not."""
    files = ConversationFiles(tmp_path, "model", MANY)
    slow = leaving(20)

    def arrays() -> Arrays:
        time.sleep(0.3)
        return slow.arrays()

    for length in range(20, 40):
        files.save(Leaving("", PROMPT[:length], 1, arrays))
    files.save(leaving(90), is_last=True)
    files.close()
    assert 4 <= len(files) <= 6


def test_nobody_else_may_read_them(files: ConversationFiles, tmp_path: Path) -> None:
    """They are what people have said."""
    files.save(leaving(50), is_last=True)
    wait(lambda: len(files) == 1)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o077 == 0
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o077 == 0


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    """Are named, with what to do."""
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"--conversation-cache-dir: .*file.* cannot be used: .*; name another"
    ):
        ConversationFiles(tmp_path / "file", "model", MANY)
    if os.geteuid():
        tmp_path.chmod(0o500)
        with pytest.raises(ConfigError, match="Permission denied"):
            ConversationFiles(tmp_path, "model", MANY)


def test_a_full_disk_costs_nothing_but_what_was_to_be_kept(files: ConversationFiles, tmp_path: Path) -> None:
    """Nor does one that fails: the thread goes on."""

    def fail() -> Arrays:
        raise OSError(28, "No space left on device")

    files.save(Leaving("", PROMPT[:30], 1, fail), is_last=True)
    files.save(leaving(50), is_last=True)
    wait(lambda: len(files) == 1)
    assert not list(tmp_path.glob("*/*.partial"))
