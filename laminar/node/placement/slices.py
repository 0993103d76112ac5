"""Work over all partitions in slices, so that a controller's loop also answers the probes of other nodes.

Such work is a generator that yields after each slice and returns its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")

SLICE = 100
"""Partitions of a slice: one takes 10 to 40 us."""


async def in_slices(work: Generator[None, None, Result]) -> Result:
    """Run the generator, let the event loop run other tasks after each slice, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result
        await asyncio.sleep(0)
