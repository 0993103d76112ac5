"""A stream is told which of its deliveries are over."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from laminar.http.api.problems import Problem
from laminar.node.channels.requests import Step, Verb
from laminar.wire.channels import ChannelSettings, Named
from tests.node.channels.delivering import CHANNEL, append, delivering, given, offsets, steps


async def test_a_stream_is_told_which_of_its_deliveries_are_over(tmp_path: Path) -> None:
    """Acknowledged, failed, released, moved past, or out under another number; at once if it is so."""
    async with delivering(tmp_path, ChannelSettings(retry_ms=3_600_000)) as (partition, delivery):
        await append(partition, *(b"%d" % i for i in range(6)))
        number = (await given(delivery, 5)).runs[0].delivery

        def of(*offsets: int) -> list[Named]:
            return [Named(0, offset, offset + 1, number) for offset in offsets]

        async def ended(left: list[int], wait_s: float) -> tuple[list[Named], int]:
            return await delivery.ended(CHANNEL, 1, of(*left), wait_s=wait_s)

        left = [0, 1, 2, 3, 4]
        ways: list[tuple[Verb, int]] = [("ack", 1), ("nack", 2), ("release", 0)]
        for verb, offset in ways:
            waits = asyncio.create_task(ended(left, 20.0))
            await asyncio.sleep(0)
            await delivery.settle(CHANNEL, [Step(verb, of(offset)[0])])
            assert (of(offset), 0) == await waits == await ended(left, 0.0)
            left.remove(offset)
        assert ([], 0) == await ended(left, 0.05)
        assert [0, 5] == offsets(await given(delivery))
        assert (of(0), 0) == await ended([0], 0.0)

        waits = asyncio.create_task(ended(left, 20.0))
        await asyncio.sleep(0)
        await delivery.seek(CHANNEL, 6, drop=True)
        assert (of(3, 4), 0) == await waits


async def test_a_stream_is_told_of_what_was_late(tmp_path: Path) -> None:
    """Also with the record, when that comes again before the stream has asked."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        first = await given(delivery, 1, timeout_ms=1_000)
        named = steps("ack", first)[0].named
        asked = asyncio.create_task(delivery.ended(CHANNEL, 1, [named], wait_s=20.0))

        assert ([named], 1) == await asked
        again = await given(delivery, 2)
        assert ([0, 1], [0]) == (offsets(again), list(again.late))
        await delivery.settle(CHANNEL, steps("nack", again))
        assert [] == list((await given(delivery, 2)).late)


async def test_of_a_stream_one_question_waits(tmp_path: Path) -> None:
    """A later one ends it: who asked has given up. Others go on, and all end with the delivery."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a")
        named = [steps("ack", await given(delivery))[0].named]
        asked = []
        for stream in (1, 2, 1):
            asked.append(asyncio.create_task(delivery.ended(CHANNEL, stream, named, wait_s=20.0)))
            await asyncio.sleep(0)
        assert ([], 0) == await asked[0]
        assert not asked[1].done() and not asked[2].done()

        delivery.stop()
        for each in asked[1:]:
            with pytest.raises(Problem, match="not_leader"):
                await each
