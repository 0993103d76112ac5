"""What is received and not stored stays below a budget: reading stops, and goes on behind the disk."""

from __future__ import annotations

import asyncio

from laminar.node.transport.receive_budget import ReceiveBudget
from tests.node.trio import CALM, CALM_S, batch, send, trio

VALUE = b"x" * 50_000


class Noted:
    """What a budget asked for."""

    def __init__(self, limit_bytes: int) -> None:
        self.asked: list[str] = []
        self.budget = ReceiveBudget(
            limit_bytes, pause=lambda: self.asked.append("pause"), resume=lambda: self.asked.append("resume")
        )

    def turn(self, *sizes: int) -> int:
        for size in sizes:
            self.budget.received(size)
        return self.budget.hold()


def test_reading_stops_above_the_limit_and_goes_on_at_half_of_it() -> None:
    """Once each, however far above it is."""
    noted = Noted(100)
    first = noted.turn(100)
    assert [] == noted.asked
    noted.turn(1)
    third = noted.turn(30, 30)
    assert ["pause"] == noted.asked and 161 == noted.budget.waiting_bytes

    noted.budget.release(first)
    assert ["pause"] == noted.asked, "61 are more than half"
    noted.budget.release(third)
    assert ["pause", "resume"] == noted.asked and 1 == noted.budget.waiting_bytes


def test_a_frame_that_changed_nothing_does_not_count() -> None:
    noted = Noted(100)
    noted.budget.received(1_000)
    noted.budget.forget()
    noted.turn(1)

    assert 1 == noted.budget.waiting_bytes and [] == noted.asked


async def test_a_follower_whose_disk_stands_still_stops_reading_and_then_has_it_all() -> None:
    """Meanwhile the others commit, heartbeats go on, and nobody stands for election."""
    limit = 4 * len(VALUE)
    async with trio(receive_budget_bytes=limit, settings=CALM) as cluster:
        leader = await cluster.leader()
        await send(leader, batch(0, b"first"))
        await cluster.settled()
        term = leader.replica.core.term
        slow = cluster.followers(leader)[0]
        budget = slow.driver.receive_budget
        slow.hold_disk()
        for number in range(1, 40):
            await send(leader, batch(number, VALUE))
        await cluster.until(lambda: budget.paused, what="reading stops")
        received = budget.waiting_bytes
        for number in range(40, 80):
            await send(leader, batch(number, VALUE))
        await asyncio.sleep(CALM_S)
        assert limit < received <= budget.waiting_bytes < 40 * len(VALUE)
        assert leader.partition.leads and term == leader.replica.core.term
        slow.release_disk()
        await cluster.settled()
        cluster.check_equal()

        await cluster.until(lambda: not budget.waiting_bytes, what="all is stored")
        assert not budget.paused and 1 <= slow.driver.statistics()["receive_pauses"]
