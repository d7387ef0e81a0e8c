"""Run directories: who is alive, who may have a role, and what is swept away."""

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.errors import ResourceError
from shared.run_directory import Role, RoleLock, RunDirectory, Sighting, base_directory, sweep_deserted
from tests.support.run_directories import temporary_run_directory
from tests.support.second_process import second_process

HOLDER = """
import sys
from pathlib import Path
from shared.run_directory import Role, RoleLock, RunDirectory
lock = RoleLock(RunDirectory(Path(sys.argv[1])), Role.GATEWAY, "second")
print("held", flush=True)
sys.stdin.read()
"""

# Takes the role and gives it up again and again, as processes that start and end in one directory do.
COMING_AND_GOING = """
import sys
from pathlib import Path
from shared.errors import ResourceError
from shared.run_directory import Role, RoleLock, RunDirectory
path = Path(sys.argv[1])
for _ in range(int(sys.argv[3])):
    directory = RunDirectory(path)
    lock = RoleLock(directory, Role(sys.argv[2]), "x")
    assert directory.look_at(Role(sys.argv[2])).is_alive, "its lock was removed while it lived"
    lock.release()
    directory.remove_if_deserted()
print("done", flush=True)
"""


@pytest.fixture
def directory() -> Iterator[RunDirectory]:
    """A run directory of its own."""
    with temporary_run_directory() as made:
        yield made


def test_a_living_role_is_seen(directory: RunDirectory) -> None:
    """Alive with its incarnation while the lock is held; afterwards dead, and still known by name."""
    assert directory.look_at(Role.GATEWAY) == Sighting(is_alive=False, incarnation="")
    lock = RoleLock(directory, Role.GATEWAY, "abc")
    assert directory.look_at(Role.GATEWAY) == Sighting(is_alive=True, incarnation="abc")
    assert not directory.look_at(Role.STAGER).is_alive
    lock.release()
    assert directory.look_at(Role.GATEWAY) == Sighting(is_alive=False, incarnation="abc")


def test_shorter_incarnation_after_longer(directory: RunDirectory) -> None:
    """Nothing of the predecessor's name is left in the file."""
    RoleLock(directory, Role.GATEWAY, "longer").release()
    lock = RoleLock(directory, Role.GATEWAY, "new")
    assert directory.look_at(Role.GATEWAY).incarnation == "new"
    lock.release()


def test_a_role_that_is_taken(directory: RunDirectory) -> None:
    """The second process of a role learns where the first runs and what to do; the first is not disturbed."""
    lock = RoleLock(directory, Role.GATEWAY, "first")
    with pytest.raises(
        ResourceError,
        match=rf"{directory.path}: a gateway is already running there; stop it, .* own --run-dir",
    ):
        RoleLock(directory, Role.GATEWAY, "second")
    assert directory.look_at(Role.GATEWAY) == Sighting(is_alive=True, incarnation="first")
    lock.release()


def test_kill_frees_the_role(directory: RunDirectory) -> None:
    """After kill -9 the role is free at once, and its last holder known."""
    with second_process(HOLDER, str(directory.path)) as holder:
        assert holder.line() == "held"
        assert directory.look_at(Role.GATEWAY) == Sighting(is_alive=True, incarnation="second")
        holder.kill()
    assert directory.look_at(Role.GATEWAY) == Sighting(is_alive=False, incarnation="second")
    RoleLock(directory, Role.GATEWAY, "third").release()


def test_looking_without_descriptors(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that has used up its file descriptors on connections keeps its workers: it believes what it
    saw last."""
    lock = RoleLock(directory, Role.STAGER, "abc")
    assert directory.look_at(Role.STAGER).is_alive

    def no_descriptors(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", no_descriptors)
        assert directory.look_at(Role.STAGER) == Sighting(is_alive=True, incarnation="abc")
        assert not directory.look_at(Role.GATEWAY).is_alive
        assert not directory.remove_if_deserted()
    lock.release()
    assert not directory.look_at(Role.STAGER).is_alive


def test_removal_waits_for_everyone(directory: RunDirectory) -> None:
    """Whoever leaves last takes the directory with it, and nobody before."""
    gateway = RoleLock(directory, Role.GATEWAY, "a")
    stager = RoleLock(directory, Role.STAGER, "b")
    (directory.path / "gateway.sock").touch()
    gateway.release()
    assert not directory.remove_if_deserted()
    stager.release()
    assert directory.remove_if_deserted()
    assert not directory.path.exists()
    assert directory.remove_if_deserted(), "it is gone"


def test_a_users_own_files_stay(directory: RunDirectory) -> None:
    """--run-dir may name a directory that holds other things: those are not ours to remove."""
    RoleLock(directory, Role.GATEWAY, "a").release()
    (directory.path / "gateway.sock").touch()
    (directory.path / "thesis").mkdir()
    (directory.path / "thesis" / "chapter.lock").touch()
    theirs = ["Cargo.lock", "bookmark.url", "my.sock", "notes.txt", "odds.logits", "poetry.lock"]
    for name in theirs:
        (directory.path / name).touch()
    assert not directory.remove_if_deserted()
    left = sorted(entry.name for entry in directory.path.rglob("*"))
    assert left == sorted([*theirs, "chapter.lock", "thesis"])


def test_a_role_is_taken_while_others_remove(directory: RunDirectory) -> None:
    """A process that starts just as the last one leaves has its lock in a directory that exists."""
    directory.remove_if_deserted()
    lock = RoleLock(directory, Role.GATEWAY, "late")
    assert directory.look_at(Role.GATEWAY) == Sighting(is_alive=True, incarnation="late")
    lock.release()


def test_coming_and_going(directory: RunDirectory) -> None:
    """Processes that start and end in one directory at the same time, with a sweeper beside them, never
    remove the lock of one that lives."""
    path = str(directory.path)
    is_over = threading.Event()

    def sweep() -> None:
        while not is_over.is_set():
            sweep_deserted(directory.path.parent)

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        with (
            second_process(COMING_AND_GOING, path, "gateway", "150") as one,
            second_process(COMING_AND_GOING, path, "stager", "150") as two,
        ):
            assert (one.line(), two.line()) == ("done", "done")
    finally:
        is_over.set()
        sweeper.join()


def test_sweep(directory: RunDirectory) -> None:
    """What a killed stack left goes, what lives stays; so does what is no directory, or a link to one."""
    base = directory.path.parent
    living, dead = RunDirectory(base / "living"), RunDirectory(base / "dead")
    lock = RoleLock(living, Role.SUPERVISOR, "a")
    RoleLock(dead, Role.GATEWAY, "b").release()
    (dead.path / "gateway.sock").touch()
    (base / "file").touch()
    elsewhere = base / "living" / "kept"
    elsewhere.mkdir()
    (base / "link").symlink_to(elsewhere)
    sweep_deserted(base)
    assert sorted(entry.name for entry in base.iterdir()) == ["file", "link", "living"]
    assert elsewhere.exists()
    lock.release()


def test_sweep_of_nothing(tmp_path: Path) -> None:
    """The first stack of a user finds no base directory."""
    sweep_deserted(tmp_path / "gone")


def test_sweep_beside_another(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stacks that start at once sweep the same directories: what the other has removed is no error."""
    listed = list(directory.path.parent.iterdir())
    monkeypatch.setattr(Path, "iterdir", lambda _: iter([*listed, directory.path.parent / "gone"]))
    sweep_deserted(directory.path.parent)
    assert not directory.path.exists()


def test_what_is_made(directory: RunDirectory) -> None:
    """The directory is its user's alone, and addresses are places in it."""
    assert directory.path.stat().st_mode & 0o777 == 0o700
    assert directory.address(Role.GATEWAY) == f"ipc://{directory.path}/gateway.sock"
    (directory.path / "gateway.sock").touch()
    directory.remove_sockets(Role.GATEWAY)
    directory.remove_sockets(Role.GATEWAY)
    assert not any(directory.path.iterdir())


def test_fresh_directories_differ(monkeypatch: pytest.MonkeyPatch, directory: RunDirectory) -> None:
    """Two stacks of one user never meet."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory.path))
    one, two = RunDirectory.fresh(), RunDirectory.fresh()
    assert one.path != two.path
    assert one.path.parent == two.path.parent == directory.path / "strata"
    assert RunDirectory(None).path == directory.path / "strata" / "default"


def test_base_directory_without_a_runtime_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No runtime directory, one that is not there, or one too long for sockets: /tmp, by user."""
    fallback = base_directory.__globals__["tempfile"].gettempdir() + f"/strata-{os.getuid()}"
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert str(base_directory()) == fallback
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "gone"))
    assert str(base_directory()) == fallback
    long = tmp_path / ("x" * 60)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert str(base_directory()) == fallback


def test_places_that_will_not_do(directory: RunDirectory) -> None:
    """Too long for a socket, not a directory: the message names the path, the limit and the setting."""
    long = directory.path / ("x" * 80)
    with pytest.raises(
        ResourceError, match=r"has \d+ bytes, the limit for sockets is 80; .*shorter --run-dir"
    ):
        RunDirectory(long)
    file = directory.path / "file"
    file.touch()
    for path in (file, file / "below"):
        with pytest.raises(
            ResourceError, match=rf"{path}: the run directory cannot be made: .*other --run-dir"
        ):
            RunDirectory(path)


def test_a_directory_of_somebody_else(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name in /tmp can be guessed: what another user made there is neither used nor swept."""
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    with pytest.raises(ResourceError, match="belongs to another user; choose another --run-dir"):
        RunDirectory(directory.path)
    sweep_deserted(directory.path.parent)
    assert directory.path.exists()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory.path))
    (directory.path / "strata").mkdir()
    with pytest.raises(ResourceError, match="strata: the run directory belongs to another user"):
        RunDirectory(None)


def test_lock_that_cannot_be_made(directory: RunDirectory) -> None:
    """A directory in the lock's place is a clear error, not a traceback."""
    directory.lock_path(Role.GATEWAY).mkdir()
    with pytest.raises(
        ResourceError, match=r"gateway\.lock: the lock cannot be made: Is a directory; choose"
    ):
        RoleLock(directory, Role.GATEWAY, "a")
