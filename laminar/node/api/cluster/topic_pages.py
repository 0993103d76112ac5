"""Select one page of many names, in slices, so that the event loop answers other requests in between."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Final

from laminar.node.api.common.slices import in_slices
from laminar.node.host.clock import Clock

AT_ONCE: Final = 1_000
"""The number of names that are examined without a yield, in less than a millisecond."""

Place = tuple[int, str]


async def page_of(
    names: Iterable[str], place: Callable[[str], Place], *, begin: Place, limit: int, clock: Clock
) -> tuple[list[Place], int]:
    """Return the first places (pairs of sort key and name) after `begin`, and the number of all names.

    If there are more than `limit` places, it returns `limit` + 1. `place` returns the place of a name.
    """
    found: list[Place] = []
    total = 0

    def look(some: list[str]) -> None:
        nonlocal found, total
        total += len(some)
        places = (each for each in map(place, some) if each > begin)
        found = heapq.nsmallest(limit + 1, chain(found, places))

    await in_slices(_portions(names), look, clock=clock)
    return found, total


def _portions(names: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while portion := list(islice(rest, AT_ONCE)):
        yield portion
