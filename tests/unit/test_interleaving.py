"""Several sources as one."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from gateway.interleaving import interleaved


class Source:
    """Gives what a test puts there, until None; an error is raised."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[int | Exception | None] = asyncio.Queue()
        self.is_closed = False

    async def read(self) -> AsyncGenerator[int]:
        try:
            while (item := await self.items.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.is_closed = True


@pytest.mark.parametrize("number", [1, 2, 3])
async def test_all_items_come_in_the_order_of_their_source(number: int) -> None:
    sources = [Source() for _ in range(number)]
    for place, source in enumerate(sources):
        for item in (*range(place * 10, place * 10 + 4), None):
            source.items.put_nowait(item)
    found: dict[int, list[int]] = {}
    async with aclosing(interleaved([source.read() for source in sources])) as items:
        async for place, item in items:
            found.setdefault(place, []).append(item)
    assert found == {place: list(range(place * 10, place * 10 + 4)) for place in range(number)}
    assert all(source.is_closed for source in sources)


async def test_an_item_comes_while_another_source_has_none() -> None:
    first, second = Source(), Source()
    async with aclosing(interleaved([first.read(), second.read()])) as items:
        second.items.put_nowait(7)
        assert await anext(items) == (1, 7)
        second.items.put_nowait(None)
        first.items.put_nowait(8)
        assert await anext(items) == (0, 8)
    assert first.is_closed


@pytest.mark.parametrize("number", [1, 3])
async def test_a_failure_ends_all(number: int) -> None:
    sources = [Source() for _ in range(number)]
    sources[-1].items.put_nowait(5)
    sources[-1].items.put_nowait(ValueError("broken"))
    async with aclosing(interleaved([source.read() for source in sources])) as items:
        assert await anext(items) == (number - 1, 5)
        with pytest.raises(ValueError, match="broken"):
            await anext(items)
    assert all(source.is_closed for source in sources)


async def test_being_cancelled_ends_all() -> None:
    sources = [Source(), Source()]

    async def read_all() -> None:
        async with aclosing(interleaved([source.read() for source in sources])) as items:
            async for _ in items:
                pass

    reading = asyncio.create_task(read_all())
    sources[0].items.put_nowait(1)
    await asyncio.sleep(0.01)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert all(source.is_closed for source in sources)
