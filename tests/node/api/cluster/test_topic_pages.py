"""Pages of names: which are on them, and how long a turn of the loop takes."""

from __future__ import annotations

import asyncio

import pytest

from laminar.node.api.cluster.topic_pages import AT_ONCE, Place, page_of
from laminar.node.host.clock import Clock

NAMES = [f"topic-{number}" for number in range(10_000)]


class Slow(Clock):
    """A clock by which each portion takes longer than a slice may."""

    __slots__ = ("_now_ms",)

    def __init__(self) -> None:
        """Begin at 0."""
        self._now_ms = 0

    def monotonic_ms(self) -> int:
        """See `Clock`."""
        self._now_ms += 10
        return self._now_ms


def by_size(name: str) -> Place:
    """The place of a topic of this name, when those with the most are first."""
    return (-(int(name.removeprefix("topic-")) * 7919 % 10_000), name)


@pytest.mark.parametrize("limit", [1, 100, 1_000])
async def test_the_pages_have_each_name_once_in_order(limit: int) -> None:
    """`begin` is the last place of the page before."""
    begin: Place = (-10_001, "")
    seen: list[Place] = []
    for _ in range(3):
        found, total = await page_of(NAMES, by_size, begin=begin, limit=limit, clock=Clock())
        assert len(NAMES) == total
        assert limit + 1 == len(found)
        seen += found[:limit]
        begin = seen[-1]

    assert sorted(map(by_size, NAMES))[: 3 * limit] == seen


async def test_others_are_answered_between_portions_of_many_names() -> None:
    """Turns are counted, by a clock that says that each portion takes long."""
    page = asyncio.ensure_future(page_of(NAMES, by_size, begin=(-10_001, ""), limit=100, clock=Slow()))
    turns = 0
    while not page.done():
        await asyncio.sleep(0)
        turns += 1

    assert turns >= len(NAMES) // AT_ONCE


async def test_of_no_name_there_is_an_empty_page() -> None:
    """And a total of 0."""
    assert ([], 0) == await page_of([], by_size, begin=(0, ""), limit=10, clock=Clock())
