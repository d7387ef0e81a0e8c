"""A few threads that run a list of tasks together with the caller. The tasks release the GIL.

An executor of `concurrent.futures` makes a future and a wake-up for every task; here a batch costs at most
one wake-up per thread, and the caller works too, so that a batch of one task never leaves its thread.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence

Task = Callable[[], None]


class TaskPool:
    """`num_threads` threads, the caller's counted among them."""

    def __init__(self, num_threads: int, cpus: Sequence[int] | None = None) -> None:
        """`cpus` pins the threads, each to one CPU of the list in turn; None leaves them alone."""
        self.num_threads = max(1, num_threads)
        self._tasks: deque[Task] = deque()
        self._work = threading.Semaphore(0)
        self._finished = threading.Condition()
        self._num_open = 0
        self._failure: BaseException | None = None
        self._is_closed = False
        self._threads = [
            threading.Thread(
                target=self._run_thread,
                args=(None if cpus is None else cpus[(number + 1) % len(cpus)],),
                name=f"compute {number + 1}",
                daemon=True,
            )
            for number in range(self.num_threads - 1)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs all tasks and returns when none runs any more; raises the first failure among them, after
        which tasks that had not begun may be left out.

        One batch at a time: only one thread may call this.
        """
        if len(tasks) == 1 or self.num_threads == 1:
            for task in tasks:
                task()
            return
        self._num_open = len(tasks)
        self._tasks.extend(tasks)
        for _ in range(min(len(tasks), self.num_threads) - 1):
            self._work.release()
        while self._run_one():
            pass
        with self._finished:
            self._finished.wait_for(lambda: self._num_open == 0)
        failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            # Its traceback has this frame: a cycle that would keep the arrays of the failed work.
            del failure

    def close(self) -> None:
        """Ends the threads."""
        self._is_closed = True
        for _ in self._threads:
            self._work.release()
        for thread in self._threads:
            thread.join()

    def _run_thread(self, cpu: int | None) -> None:
        if cpu is not None:
            os.sched_setaffinity(0, {cpu})
        while True:
            self._work.acquire()
            if self._is_closed:
                return
            while self._run_one():
                pass

    def _run_one(self) -> bool:
        try:
            task = self._tasks.popleft()
        except IndexError:
            return False
        try:
            task()
        except BaseException as error:  # handed to the caller of run
            self._failure = self._failure or error
        with self._finished:
            self._num_open -= 1
            if self._num_open == 0:
                self._finished.notify_all()
        return True
