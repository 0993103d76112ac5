"""So many elections at once and no more: who stands when (`laminar.node.consensus.election_throttle`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from laminar.node.consensus.election_throttle import Elections
from laminar.node.host.clock import Clock

HOLD_MS = 40


class Core:
    """What `Elections` looks at."""

    is_electing = False
    is_hastened = False


class Standing:
    """A replica; `end` is what a later input does: it leads, or another does."""

    def __init__(self, name: str, line: Line, *, hastened: bool = False) -> None:
        self.name = name
        self.line = line
        self.core = Core()
        self.core.is_hastened = hastened

    def end(self) -> None:
        self.core.is_electing = False
        self.line.elections.settled(self.line.typed(self))


class Line:
    """Elections, two at once, and who stood so far."""

    def __init__(self) -> None:
        self.stood: list[str] = []
        self.gone: set[str] = set()
        self.errors: list[BaseException] = []
        self.clock = Clock()
        self.elections = Elections(
            self.clock,
            hold_ms=HOLD_MS,
            drives=lambda replica: replica.name not in self.gone,
            stand=self._stand,
            on_error=self.errors.append,
            most_at_once=2,
        )

    def typed(self, replica: Standing) -> Any:
        return replica

    def _stand(self, replica: Any, now_ms: int) -> None:
        self.stood.append(replica.name)
        replica.core.is_electing = True

    def due(self, names: Iterable[str], *, hastened: bool = False) -> list[Standing]:
        replicas = [Standing(name, self, hastened=hastened) for name in names]
        for replica in replicas:
            self.elections.due(self.typed(replica), self.clock.monotonic_ms())
        return replicas

    async def until(self, stood: str) -> None:
        async with asyncio.timeout(10):
            while "".join(self.stood) != stood:
                assert not self.errors, self.errors
                await asyncio.sleep(0.001)


async def test_so_many_stand_at_once_and_the_next_when_one_is_over() -> None:
    """In the order in which it was their time."""
    line = Line()
    a, b, *_ = line.due("abcd")
    assert (["a", "b"], 2) == (line.stood, len(line.elections))

    b.end()
    await line.until("abc")
    a.end()
    await line.until("abcd")
    assert 0 == len(line.elections)
    line.elections.close()


async def test_a_group_that_cannot_elect_holds_up_the_others_for_a_moment_only() -> None:
    """It lost its majority, perhaps for long; tens of thousands of others did not."""
    line = Line()
    began_ms = line.clock.monotonic_ms()
    line.due("abcdef")
    await line.until("abcdef")

    assert line.clock.monotonic_ms() - began_ms >= 2 * HOLD_MS
    line.elections.close()


async def test_one_that_tries_again_goes_behind_those_that_have_not_tried() -> None:
    """And is one of those under way once, however often it tries."""
    line = Line()
    a, _, _ = line.due("abc")
    line.elections.due(line.typed(a), line.clock.monotonic_ms())
    assert ["a", "b", "c"] == line.stood

    await line.until("abca")
    line.elections.close()


async def test_a_group_that_somebody_waits_for_goes_first() -> None:
    """Whether that is known before it is its time, or while it is in line."""
    line = Line()
    a, b, _, d = line.due("abcd")
    line.due("e", hastened=True)
    line.elections.hasten(line.typed(d))
    a.end()
    b.end()
    await line.until("abed")

    line.elections.close()


async def test_who_is_driven_no_more_does_not_stand_and_holds_up_nobody() -> None:
    """Neither one that stands nor one in line."""
    line = Line()
    a, _, c, _, _ = line.due("abcde")
    line.gone.add("d")
    line.elections.removed(line.typed(c))
    line.elections.removed(line.typed(a))
    line.elections.due(line.typed(Standing("f", line)), line.clock.monotonic_ms())

    assert ["a", "b", "e"] == line.stood
    line.elections.close()


async def test_one_that_need_not_stand_any_more_takes_no_place() -> None:
    """A leader was heard while it was in line."""
    line = Line()
    a, _, _, _ = line.due("abcd")
    stand = line._stand

    def led(replica: Any, now_ms: int) -> None:
        if replica.name != "c":
            stand(replica, now_ms)

    line.elections._stand = led
    a.end()
    await line.until("abd")
    line.elections.close()
