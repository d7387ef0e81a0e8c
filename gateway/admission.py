"""Who may run now, who waits, and who is turned away.

As many requests run as the gpu_worker computes at once; a bounded number waits in the order of arrival, also
while a worker is being restarted; more are refused, so that a client learns within a moment that it should
come back later. A request gives its place back when the gpu_worker is done with it: a client that is slow to
read its answer keeps nobody waiting.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from shared.errors import DrainingError, QueueFullError

_FIRST_GUESS_S = 5.0
_MAX_RETRY_AFTER_S = 120


class Place:
    """One request's place: waiting until `granted`, running until it is given back."""

    def __init__(self) -> None:
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.running_since: float | None = None


class Admission:
    """Running and waiting requests of one gateway."""

    def __init__(self, max_running: int, queue_size: int) -> None:
        self._max_running = max_running
        self._queue_size = queue_size
        self._waiting: deque[Place] = deque()
        self._mean_duration_s = _FIRST_GUESS_S
        self._num_inside = 0
        self.num_running = 0
        self.is_draining = False

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether every request has been answered to its end."""
        return self._num_inside == 0

    def num_ahead(self, place: Place) -> int:
        """Requests whose turn comes before that of this one; those that run are not counted."""
        return self._waiting.index(place) if place in self._waiting else 0

    def drain(self) -> None:
        """Takes nobody new from now on; who is here may finish."""
        self.is_draining = True

    def dismiss(self) -> None:
        """Sends away who still waits. Their `granted` raises DrainingError."""
        self.drain()
        for place in self._waiting:
            if not place.granted.done():
                place.granted.set_exception(_draining_error())
        self._waiting.clear()

    @property
    def capacity(self) -> int:
        """The most requests that can be here at once, running and waiting."""
        return self._max_running + self._queue_size

    def check_room(self, count: int = 1) -> None:
        """Raises DrainingError or QueueFullError where so many requests that came now would not be let in."""
        if self.is_draining:
            raise _draining_error()
        num_free = self._num_free_places + self._queue_size - len(self._waiting)
        if num_free < count:
            too_many = "as many as --queue-size allows"
            if count > 1:
                too_many = f"which leaves {num_free} places (--parallel, --queue-size) for {count} answers"
            raise QueueFullError(
                f"{self.num_running} requests run and {len(self._waiting)} wait, {too_many}; try again later",
                retry_after_s=self._retry_after_s(),
            )

    @property
    def _num_free_places(self) -> int:
        """Places of requests that could run at once."""
        return max(0, self._max_running - self.num_running) if not self._waiting else 0

    @asynccontextmanager
    async def enter(self) -> AsyncIterator[Place]:
        """A place for one request, given back when the context is left, in whatever way, if not before.

        Raises DrainingError or QueueFullError at once. Otherwise the request may begin when the place is
        granted.
        """
        self.check_room()
        place = Place()
        if self._num_free_places:
            self._grant(place)
        else:
            self._waiting.append(place)
        self._num_inside += 1
        try:
            yield place
        finally:
            self._num_inside -= 1
            self.give_back(place)

    def give_back(self, place: Place) -> None:
        """Lets the next request run, while this one perhaps still sends what it has to a slow client. Does
        nothing the second time."""
        if place in self._waiting:
            self._waiting.remove(place)
        if place.running_since is not None:
            duration_s = time.monotonic() - place.running_since
            place.running_since = None
            self.num_running -= 1
            self._mean_duration_s += 0.2 * (duration_s - self._mean_duration_s)
        while self._waiting and self.num_running < self._max_running:
            successor = self._waiting.popleft()
            # The request that waits may have been cancelled in this very moment; it is then about to leave.
            if not successor.granted.done():
                self._grant(successor)

    def _grant(self, place: Place) -> None:
        self.num_running += 1
        place.running_since = time.monotonic()
        place.granted.set_result(None)

    def _retry_after_s(self) -> int:
        expected_s = self._mean_duration_s * (len(self._waiting) + 1) / self._max_running
        return max(1, min(_MAX_RETRY_AFTER_S, math.ceil(expected_s)))


def _draining_error() -> DrainingError:
    return DrainingError("the server is stopping and takes no new requests", retry_after_s=5)
