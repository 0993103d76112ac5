"""Delayed records over three members: a leader that was cut off says nothing that the next one may change."""

from __future__ import annotations

import asyncio
import time

import pytest

from laminar.batch import Header, build
from laminar.http.api.problems import Problem
from laminar.node.delay.publisher import Publisher, State
from laminar.node.partition.state.delayed_records import CANCELLED
from tests.node.trio import trio


async def test_a_leader_that_is_cut_off_does_not_say_that_a_record_is_pending() -> None:
    """The next leader may have cancelled or published it."""
    async with trio() as cluster:
        old = await cluster.leader()
        due_ms = time.time_ns() // 1_000_000 + 3_600_000
        frame = build([b"a"], delivery_times=[due_ms])
        receipt = await old.partition.appends.append_frame(frame, Header.unpack(frame))
        assert receipt.delayed == 0
        await cluster.settled()
        assert await Publisher(old.partition).state(0) is State.PENDING
        cluster.cut_off(old.node)
        asked = asyncio.create_task(Publisher(old.partition).state(0))

        new = await cluster.leader(among=[node for node in cluster.members if node != old.node])
        publisher = Publisher(new.partition)
        assert await publisher.change(0, CANCELLED, was_ms=due_ms) is State.PENDING
        assert await publisher.state(0) is State.CANCELLED

        cluster.heal()
        with pytest.raises(Problem) as refused:
            await asyncio.wait_for(asked, 60)
        assert refused.value.code == "not_leader"


async def test_a_leader_that_is_cut_off_does_not_say_that_a_record_is_cancelled() -> None:
    """Its entry is never committed: the next leader publishes the record when it is due."""
    async with trio() as cluster:
        old = await cluster.leader()
        due_ms = time.time_ns() // 1_000_000 + 3_600_000
        frame = build([b"a"], delivery_times=[due_ms])
        await old.partition.appends.append_frame(frame, Header.unpack(frame))
        await cluster.settled()
        cluster.cut_off(old.node)
        asked = asyncio.create_task(Publisher(old.partition).change(0, CANCELLED, was_ms=due_ms))

        new = await cluster.leader(among=[node for node in cluster.members if node != old.node])
        assert await Publisher(new.partition).state(0) is State.PENDING

        cluster.heal()
        with pytest.raises(Problem):
            await asyncio.wait_for(asked, 60)
        await cluster.settled()
        assert len(old.partition.state.delayed) == 1
