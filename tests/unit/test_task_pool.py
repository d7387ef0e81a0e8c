"""The pool of threads that compute experts: every task once, failures to the caller, nothing left behind."""

import os
import threading
from collections.abc import Iterator
from functools import partial

import pytest

from shared.task_pool import TaskPool


@pytest.fixture(params=[1, 2, 5])
def pool(request: pytest.FixtureRequest) -> Iterator[TaskPool]:
    """Pools of several sizes, the caller alone among them."""
    made = TaskPool(request.param)
    yield made
    made.close()


def test_every_task_runs_once(pool: TaskPool) -> None:
    """Batches of every size, one after the other: a thread that wakes late finds the next batch, not the
    last one again."""
    for size in (0, 1, 2, 3, 50, 1, 200):
        done: list[int] = []
        pool.run([partial(done.append, n) for n in range(size)])
        assert sorted(done) == list(range(size))


def test_tasks_run_at_the_same_time() -> None:
    """Three tasks that wait for each other can only end together."""
    pool = TaskPool(3)
    meeting = threading.Barrier(3)
    pool.run([lambda: meeting.wait(60) and None] * 3)
    pool.close()


def test_one_task_stays_with_the_caller() -> None:
    """A batch of one costs no wake-up."""
    pool = TaskPool(3)
    threads: list[threading.Thread] = []
    pool.run([lambda: threads.append(threading.current_thread())])
    assert threads == [threading.current_thread()]
    pool.close()


def test_a_failure_reaches_the_caller(pool: TaskPool) -> None:
    """The error of a task is raised where the batch was started, when nothing of it runs any more; the next
    batch knows nothing of it."""
    running = 0

    def fail() -> None:
        raise ValueError("expert 7")

    def work() -> None:
        nonlocal running
        running += 1
        running -= 1

    with pytest.raises(ValueError, match="expert 7"):
        pool.run([work, fail, work, work])
    assert running == 0
    done: list[int] = []
    pool.run([lambda: done.append(1), lambda: done.append(2)])
    assert sorted(done) == [1, 2]


def test_a_failure_of_any_kind(pool: TaskPool) -> None:
    """A thread survives even what is no Exception, and the caller learns of it."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            pool.run([interrupt] * 8)
    pool.run([lambda: None] * 8)


def test_a_failure_is_not_kept() -> None:
    """The error's traceback holds the arrays of the batch; the pool must not keep them alive."""
    pool = TaskPool(2)

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        pool.run([fail, fail])
    assert pool._failure is None
    pool.close()


def test_close_ends_the_threads() -> None:
    """After close nobody is left, idle threads included."""
    before = threading.active_count()
    pool = TaskPool(4)
    assert threading.active_count() == before + 3
    pool.run([lambda: None] * 20)
    pool.close()
    assert threading.active_count() == before


def test_threads_are_pinned() -> None:
    """Each thread to one CPU of the list; the caller is left where it is."""
    cpus = sorted(os.sched_getaffinity(0))[:2]
    before = os.sched_getaffinity(0)
    pool = TaskPool(3, cpus)
    meeting = threading.Barrier(3)
    seen: list[set[int]] = []

    def look() -> None:
        meeting.wait(60)
        if threading.current_thread() is not threading.main_thread():
            seen.append(os.sched_getaffinity(0))

    pool.run([look] * 3)
    pool.close()
    assert sorted(map(sorted, seen)) == sorted([cpus[number % len(cpus)]] for number in (1, 2))
    assert os.sched_getaffinity(0) == before


def test_there_is_always_a_thread() -> None:
    """Nonsense counts mean the caller alone."""
    assert TaskPool(0).num_threads == TaskPool(-3).num_threads == 1
