"""Concurrent work on several partitions, also in threads; the first error cancels the rest."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AT_ONCE = 4


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[R]]) -> list[R]:
    """Call `work` for each item, up to `AT_ONCE` at a time; return the results in the order of the items.

    The first error cancels the other calls, and is raised after they have ended.
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
