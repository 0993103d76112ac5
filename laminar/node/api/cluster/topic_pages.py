"""A page of many names, chosen in slices of the loop, so that others are answered in between."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Final

from laminar.node.api.common.slices import in_slices
from laminar.node.host.clock import Clock

AT_ONCE: Final = 1_000
"""Names that are looked at together, in less than a millisecond."""

Place = tuple[int, str]


async def page_of(
    names: Iterable[str], place: Callable[[str], Place], *, begin: Place, limit: int, clock: Clock
) -> tuple[list[Place], int]:
    """Return the first places after `begin`, and the number of all names.

    The places are one more than `limit` if there are more. `place` returns what a name is sorted by, and it.
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
