"""Work on several partitions at a time, and in threads; the first error ends all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 4


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[R]]) -> list[R]:
    """Return what `work` returns for each item, in their order; `AT_ONCE` are under way at a time.

    The first error is raised, after what else was under way is cancelled.
    """
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(item: T) -> R:
        async with turns:
            return await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(item)) for item in items]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def in_thread(work: Callable[..., R], *arguments: object) -> R:
    """Run `work` in a thread and return its result.

    If the caller is cancelled, the error is raised only after the thread has ended, because the thread uses
    the file that the caller closes next.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # so that it does not count as lost
        raise
