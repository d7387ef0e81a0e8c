"""Who runs, who waits, who is turned away: also in the moments when somebody leaves."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import Admission, Place
from shared.errors import DrainingError, QueueFullError


async def enter(entered: AsyncExitStack, admission: Admission) -> Place:
    return await entered.enter_async_context(admission.enter())


async def test_as_many_run_as_there_are_places_and_the_rest_wait_in_order() -> None:
    admission = Admission(max_running=2, queue_size=2)
    async with AsyncExitStack() as entered:
        places = [await enter(entered, admission) for _ in range(4)]
        assert [place.granted.done() for place in places] == [True, True, False, False]
        assert (admission.num_running, admission.num_waiting) == (2, 2)
        admission.give_back(places[1])
        assert [place.granted.done() for place in places] == [True, True, True, False]
        admission.give_back(places[0])
        assert places[3].granted.done()
        assert (admission.num_running, admission.num_waiting) == (2, 0)
    assert admission.is_idle
    assert (admission.num_running, admission.num_waiting) == (0, 0)


async def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    admission = Admission(max_running=1, queue_size=1)
    async with AsyncExitStack() as entered:
        await enter(entered, admission)
        await enter(entered, admission)
        with pytest.raises(QueueFullError, match="1 requests run and 1 wait") as refused:
            await enter(entered, admission)
        assert refused.value.retry_after_s is not None
        assert 1 <= refused.value.retry_after_s <= 120
        assert (admission.num_running, admission.num_waiting) == (1, 1)
    async with admission.enter() as place:
        assert place.granted.done()


async def test_a_queue_of_none_still_lets_run_what_can() -> None:
    admission = Admission(max_running=1, queue_size=0)
    async with admission.enter():
        with pytest.raises(QueueFullError):
            await admission.enter().__aenter__()


async def test_giving_back_twice_gives_one_place() -> None:
    """The gpu_worker's last word gives it back, and so does the end of the handler."""
    admission = Admission(max_running=1, queue_size=5)
    async with AsyncExitStack() as entered:
        first = await enter(entered, admission)
        second, third = await enter(entered, admission), await enter(entered, admission)
        admission.give_back(first)
        admission.give_back(first)
        assert second.granted.done()
        assert not third.granted.done()
        assert admission.num_running == 1


async def test_whoever_gave_back_its_place_is_still_inside() -> None:
    """A drain waits for it: it may be sending the rest of its answer."""
    admission = Admission(max_running=1, queue_size=0)
    async with admission.enter() as place:
        admission.give_back(place)
        assert admission.num_running == 0
        assert not admission.is_idle
    assert admission.is_idle


async def test_leaving_while_waiting_frees_the_queue() -> None:
    admission = Admission(max_running=1, queue_size=1)
    async with admission.enter():
        async with admission.enter():
            assert admission.num_waiting == 1
        assert (admission.num_running, admission.num_waiting) == (1, 0)


async def test_a_place_is_not_given_to_a_request_that_is_being_cancelled() -> None:
    """Cancelling a task cancels the future it awaits at once, while its clean-up runs a turn later.
    A place freed in between must go to the next in the queue, and harm neither."""
    admission = Admission(max_running=1, queue_size=5)

    async def request(outcomes: list[str], name: str) -> None:
        async with admission.enter() as place:
            await place.granted
            outcomes.append(name)

    outcomes: list[str] = []
    async with AsyncExitStack() as entered:
        running = await enter(entered, admission)
        waiting = [asyncio.create_task(request(outcomes, name)) for name in ("first", "second")]
        await asyncio.sleep(0)
        assert admission.num_waiting == 2
        waiting[0].cancel()
        admission.give_back(running)
        await asyncio.gather(*waiting, return_exceptions=True)
    assert outcomes == ["second"]
    assert admission.is_idle
    assert admission.num_running == 0


async def test_a_drain_refuses_newcomers_and_lets_the_others_finish() -> None:
    admission = Admission(max_running=1, queue_size=5)
    async with AsyncExitStack() as entered:
        running, waiting = await enter(entered, admission), await enter(entered, admission)
        admission.drain()
        with pytest.raises(DrainingError) as refused:
            await enter(entered, admission)
        assert refused.value.retry_after_s is not None
        admission.give_back(running)
        assert waiting.granted.done()
        await waiting.granted
    assert admission.is_idle


async def test_dismissal_ends_the_wait_with_an_error() -> None:
    admission = Admission(max_running=1, queue_size=5)
    async with AsyncExitStack() as entered:
        running = await enter(entered, admission)
        waiting = [await enter(entered, admission) for _ in range(2)]
        waiting[0].granted.cancel()
        admission.dismiss()
        assert running.granted.done()
        with pytest.raises(DrainingError):
            await waiting[1].granted
        assert admission.num_waiting == 0
    assert admission.is_idle


async def test_the_time_to_come_back_follows_how_long_requests_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """From when a request began to run, not from when it came: the wait is not part of it."""
    now = 0.0
    monkeypatch.setattr("gateway.admission.time.monotonic", lambda: now)
    admission = Admission(max_running=1, queue_size=1)

    async def hint() -> int:
        async with AsyncExitStack() as entered:
            await enter(entered, admission)
            await enter(entered, admission)
            with pytest.raises(QueueFullError) as refused:
                await enter(entered, admission)
            assert refused.value.retry_after_s is not None
            return refused.value.retry_after_s

    for _ in range(50):
        async with AsyncExitStack() as entered:
            first, second = await enter(entered, admission), await enter(entered, admission)
            now += 30
            admission.give_back(first)
            now += 30
            admission.give_back(second)
    assert await hint() == pytest.approx(60, abs=1)
    for _ in range(50):
        async with admission.enter():
            now += 1000
    assert await hint() == 120


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "give back", "cancel"]), st.integers(0, 9))))
def test_no_place_is_lost_or_given_twice(steps: list[tuple[str, int]]) -> None:
    """Whatever comes and goes in whatever order, and with the queue's order kept."""

    async def play() -> None:
        admission = Admission(max_running=2, queue_size=3)
        inside: list[tuple[AsyncExitStack, Place]] = []
        for what, which in steps:
            if what == "enter":
                entered = AsyncExitStack()
                try:
                    place = await enter(entered, admission)
                except QueueFullError:
                    assert admission.num_running == 2
                    assert admission.num_waiting == 3
                    continue
                inside.append((entered, place))
            elif inside:
                entered, place = inside[which % len(inside)]
                if what == "give back" and place.granted.done() and not place.granted.cancelled():
                    admission.give_back(place)
                elif what == "leave":
                    inside.remove((entered, place))
                    await entered.aclose()
                elif what == "cancel":
                    place.granted.cancel()
            running = [place for _, place in inside if place.running_since is not None]
            assert admission.num_running == len(running) <= 2
            waiting = [place for _, place in inside if not place.granted.done()]
            assert not waiting or admission.num_running == 2
        for entered, _ in inside:
            await entered.aclose()
        assert (admission.num_running, admission.num_waiting, admission.is_idle) == (0, 0, True)

    asyncio.run(play())


async def test_room_is_told_before_anything_is_done_for_a_request() -> None:
    """As `enter` would find it, and without taking a place."""
    admission = Admission(max_running=1, queue_size=1)
    admission.check_room()
    async with admission.enter(), AsyncExitStack() as waiting:
        admission.check_room()
        await waiting.enter_async_context(admission.enter())
        with pytest.raises(QueueFullError, match="1 requests run and 1 wait"):
            admission.check_room()
    admission.drain()
    with pytest.raises(DrainingError):
        admission.check_room()


async def test_several_places_are_free_together_or_not_at_all() -> None:
    """Those that run and those that wait; what is too much is said in numbers."""
    admission = Admission(max_running=2, queue_size=2)
    assert admission.capacity == 4
    async with admission.enter():
        admission.check_room(3)
        with pytest.raises(QueueFullError, match=r"leaves 3 places .* for 4 answers"):
            admission.check_room(4)
        async with admission.enter(), admission.enter():
            admission.check_room(1)
            with pytest.raises(QueueFullError, match="1 places"):
                admission.check_room(2)
