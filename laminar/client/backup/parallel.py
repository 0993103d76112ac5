"""Concurrent work on several partitions; the first error cancels the rest."""

from __future__ import annotations

import asyncio
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
