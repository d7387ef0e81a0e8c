"""Reads several asynchronous sources at once, as items come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def interleaved(sources: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """The items of all sources, each with its source's number, in the order in which they come; those of one
    source stay in order. The first failure of a source is raised, and ends the others, as leaving does."""
    if len(sources) == 1:
        # No task in between, which would cost every token a change of tasks.
        async with aclosing(sources[0]) as items:
            async for item in items:
                yield 0, item
        return
    arrived: asyncio.Queue[tuple[int, Item] | None] = asyncio.Queue()

    async def read(number: int, source: AsyncGenerator[Item]) -> None:
        try:
            async with aclosing(source) as items:
                async for item in items:
                    arrived.put_nowait((number, item))
        finally:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(read(number, source)) for number, source in enumerate(sources)]
    num_open = len(tasks)
    try:
        while num_open:
            if (entry := await arrived.get()) is not None:
                yield entry
                continue
            num_open -= 1
            # Whoever has put its end there is done by now.
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
