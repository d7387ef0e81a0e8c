"""Locks that say whether their holder lives."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shared.locks import directory_held, is_locked, is_path_locked, try_lock
from tests.support.second_process import second_process

HOLDER = """
import os, sys
from shared.locks import try_lock
descriptor = os.open(sys.argv[1], os.O_RDWR)
print(try_lock(descriptor), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An empty file to lock."""
    file = tmp_path / "lock"
    file.touch()
    return file


def test_one_holder(path: Path) -> None:
    """A second opening of the file, in the same process too, does not get the lock; closing gives it back."""
    first, second = (os.open(path, os.O_RDWR) for _ in range(2))
    assert try_lock(first)
    assert try_lock(first), "taking it again changes nothing"
    assert not try_lock(second)
    os.close(first)
    assert try_lock(second)
    os.close(second)


def test_looking_takes_nothing(path: Path) -> None:
    """Looking neither takes the lock nor, as closing a file does with POSIX locks, releases the owner's."""
    owner, other = (os.open(path, os.O_RDWR) for _ in range(2))
    assert not is_path_locked(path)
    assert try_lock(owner)
    for _ in range(3):
        assert is_path_locked(path)
        assert is_locked(other)
    assert not is_locked(owner), "the owner's own lock is not somebody else's"
    assert not try_lock(other)
    os.close(owner)
    assert not is_path_locked(path)
    assert try_lock(other)
    os.close(other)


def test_kill_releases(path: Path) -> None:
    """The lock of a process that is killed is free before anyone can see the process gone."""
    with second_process(HOLDER, str(path)) as holder:
        assert holder.line() == "True"
        assert is_path_locked(path)
        descriptor = os.open(path, os.O_RDWR)
        assert not try_lock(descriptor)
        holder.kill()
        assert not is_path_locked(path)
        assert try_lock(descriptor)
        os.close(descriptor)


def test_children_do_not_inherit(path: Path) -> None:
    """A program that the holder starts must not keep the lock alive after it."""
    descriptor = os.open(path, os.O_RDWR)
    assert try_lock(descriptor)
    with second_process("import sys; print('up', flush=True); sys.stdin.read()") as child:
        assert child.line() == "up"
        os.close(descriptor)
        assert not is_path_locked(path)


def test_missing_file_is_not_locked(tmp_path: Path) -> None:
    """A role that was never there is not alive."""
    assert not is_path_locked(tmp_path / "gone")


def test_unreadable_is_not_free(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is out of file descriptors must not take every peer for dead."""

    def no_descriptors(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "open", no_descriptors)
    with pytest.raises(OSError, match="Too many open files"):
        is_path_locked(path)


def test_holding_a_directory_keeps_others_out(tmp_path: Path) -> None:
    """While one looks and removes, nobody begins to live there."""
    other = os.open(tmp_path, os.O_RDONLY)
    with directory_held(tmp_path), pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(other)


def test_a_directory_that_was_replaced_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waited for a directory that was then removed must not go on in it, nor in its successor."""
    path = tmp_path / "run"
    path.mkdir()
    flock = fcntl.flock

    def removed_meanwhile(descriptor: int, operation: int) -> None:
        flock(descriptor, operation)
        path.rename(tmp_path / "old")
        path.mkdir()

    monkeypatch.setattr(fcntl, "flock", removed_meanwhile)
    with pytest.raises(FileNotFoundError), directory_held(path):
        pytest.fail("held a directory that is gone")
