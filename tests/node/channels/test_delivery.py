"""Records that are given out, come back, and end: one voter, a real log, real time."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from laminar.batch import Batch
from laminar.http.api.problems import Problem
from laminar.node.channels.deliveries import Deliveries
from laminar.node.channels.requests import Step
from laminar.node.partition.state.channels import Why
from laminar.wire.channels import ChannelSettings, Filter, Named
from tests.node.alone import lone_partition
from tests.node.channels.delivering import (
    CHANNEL,
    QUICK,
    append,
    attempts,
    delivering,
    given,
    nothing,
    offsets,
    steps,
    values,
)


async def test_each_record_goes_to_one_consumer_and_is_done_when_acknowledged(tmp_path: Path) -> None:
    """Two that ask at once share; what is acknowledged never comes again, in any order."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, *(b"%d" % i for i in range(10)))

        first, second = await asyncio.gather(given(delivery, 4), given(delivery, 4))
        third = await given(delivery, 100)

        assert (offsets(first), offsets(second), offsets(third)) == ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])
        assert values(second) == [b"4", b"5", b"6", b"7"]
        for jobs in (second, third, first):
            assert await delivery.settle(CHANNEL, steps("ack", jobs)) == (jobs.total, [])
        channel = partition.state.channels.by_id[CHANNEL]
        assert (channel.open, channel.next, channel.floor) == (0, 10, 10)
        await nothing(delivery)


async def test_a_consumer_waits_for_a_record_and_gets_it_when_it_is_committed(tmp_path: Path) -> None:
    """Without a record it is answered after its wait; one that only asks is told when there is one."""
    async with delivering(tmp_path) as (partition, delivery):
        await nothing(delivery, 0.05)
        asked = asyncio.create_task(delivery.receive(CHANNEL, wanted=0, wait_s=60.0))
        await asyncio.sleep(0)
        await append(partition, b"a")

        told = await asked
        assert told is not None and told.runs == [], "it is told, and given nothing"
        waiting = asyncio.create_task(given(delivery))
        assert values(await waiting) == [b"a"]
        await append(partition, b"b")
        assert values(await given(delivery)) == [b"b"]


async def test_a_record_comes_again_until_it_is_dead(tmp_path: Path) -> None:
    """By nack with its attempts counted, by release without; the dead wait for a person."""
    async with delivering(tmp_path, ChannelSettings(retry_ms=0, max_attempts=3)) as (partition, delivery):
        await append(partition, b"a", b"b")
        seen = []
        for verb in ("nack", "release", "nack"):
            jobs = await given(delivery, 1)
            seen.append((offsets(jobs), attempts(jobs)))
            await delivery.settle(CHANNEL, steps(verb, jobs, reason="no luck"))
        assert seen == [([0], [1]), ([0], [2]), ([0], [2])]
        jobs = await given(delivery, 1)
        assert attempts(jobs) == [3]
        await delivery.settle(CHANNEL, steps("nack", jobs, reason="no luck"))

        assert values(await given(delivery, 10)) == [b"b"]
        aside = partition.state.channels.by_id[CHANNEL].aside[0]
        assert (aside.why, aside.attempts, aside.reason) == (Why.DEAD, 3, "no luck")
        assert await delivery.retry_dead(CHANNEL, None) == 1
        jobs = await given(delivery)
        assert (values(jobs), attempts(jobs)) == ([b"a"], [1])


async def test_of_a_reason_so_many_bytes_are_kept(tmp_path: Path) -> None:
    """Characters of four bytes would make the table too large for the entry that moves the log's start."""
    async with delivering(tmp_path, ChannelSettings(max_attempts=1)) as (partition, delivery):
        kept = {"x" * 200: "x" * 200, "🙂" * 200: "🙂" * 50, "x" * 199 + "é": "x" * 199}
        for offset, (reason, wanted) in enumerate(kept.items()):
            await append(partition, b"a")
            await delivery.settle(CHANNEL, steps("nack", await given(delivery), reason=reason))
            assert partition.state.channels.by_id[CHANNEL].aside[offset].reason == wanted


async def test_a_request_that_ends_as_it_is_answered_is_given_nothing(tmp_path: Path) -> None:
    """Its records are out by then: they are released, and it costs no attempt."""
    async with delivering(tmp_path) as (partition, delivery):
        asked = [asyncio.create_task(delivery.receive(CHANNEL, wanted=1, wait_s=60.0)) for _ in range(2)]
        await asyncio.sleep(0)
        # Of two that are answered in one turn the second is cancelled before it runs.
        one, _ = [each.future for each in delivery._lines.by_id[CHANNEL].waiting]
        one.add_done_callback(lambda done: asked[1].cancel())
        await append(partition, b"a", b"b")
        await asyncio.wait(asked)

        assert [False, True] == [each.cancelled() for each in asked]
        jobs = await given(delivery, wait_s=0.5)
        assert ([1], [1]) == (offsets(jobs), attempts(jobs))


async def test_what_a_consumer_that_is_gone_was_given_is_released(tmp_path: Path) -> None:
    """A request that is cancelled, before or after its entry is committed, costs no attempt and no wait."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b", b"c")
        for turns in range(12):
            asked = asyncio.create_task(delivery.receive(CHANNEL, wanted=2, wait_s=60.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
            if not asked.cancelled():  # it was answered before
                jobs = asked.result()
                assert jobs is not None
                await delivery.settle(CHANNEL, steps("release", jobs))
            await delivery.settle(CHANNEL, [])

        jobs = await given(delivery)
        assert (sorted(offsets(jobs)), attempts(jobs)) == ([0, 1, 2], [1, 1, 1])


async def test_a_filter_passes_over_what_it_does_not_take(tmp_path: Path) -> None:
    """By any tag and all headers; what is passed over is done, and nothing of it is kept."""
    settings = ChannelSettings(filter=Filter(tags=["red", "blue"], headers={"to": "me"}))
    async with delivering(tmp_path, settings) as (partition, delivery):
        mine = {"to": b"me"}
        await append(
            partition,
            *(b"0", b"1", b"2", b"3"),
            tags=["red", "green", "blue", "red"],
            headers=[mine, mine, {"to": b"you"}, mine],
        )
        jobs = await given(delivery)
        assert values(jobs) == [b"0", b"3"]
        await delivery.settle(CHANNEL, steps("ack", jobs))
        channel = partition.state.channels.by_id[CHANNEL]
        assert (channel.next, channel.open) == (4, 0)


async def test_so_much_may_be_out_and_no_more(tmp_path: Path) -> None:
    """`max_in_flight` bounds what is out; a request that names too many records is refused."""
    async with delivering(tmp_path, ChannelSettings(max_in_flight=3)) as (partition, delivery):
        await append(partition, *([b"x"] * 5))
        jobs = await given(delivery)
        assert offsets(jobs) == [0, 1, 2]
        await nothing(delivery)
        with pytest.raises(Problem, match="10,000 records at most"):
            await delivery.settle(CHANNEL, [Step("ack", Named(0, 0, 1 << 40, 1))])
        await delivery.settle(CHANNEL, steps("ack", jobs))
        assert offsets(await given(delivery)) == [3, 4]


@pytest.mark.parametrize("seed", range(6))
async def test_consumers_that_fail_stall_and_repeat_lose_nothing(tmp_path: Path, seed: int) -> None:
    """Each record is done once by a consumer that held it; in order by key, one of a key at a time."""
    chance = random.Random(seed)
    ordered = seed % 2 == 1
    settings = ChannelSettings(
        order="key" if ordered else "none",
        retry_ms=0,
        max_attempts=0,
        max_in_flight=50,
        timeout_ms=60_000 if ordered else 1_000,
    )
    count = 300
    async with delivering(tmp_path, settings) as (partition, delivery):
        done: set[int] = set()
        order: dict[bytes, list[int]] = {}
        held: dict[bytes, int] = {}

        async def produce() -> None:
            at = 0
            while at < count:
                size = min(chance.randint(1, 40), count - at)
                keys = [b"k%d" % chance.randint(0, 9) if chance.random() < 0.9 else None for _ in range(size)]
                await append(partition, *(b"%d" % i for i in range(at, at + size)), keys=keys)
                at += size

        async def consume() -> None:
            while len(done) < count:
                jobs = await delivery.receive(CHANNEL, wanted=chance.randint(1, 20), wait_s=0.2)
                if jobs is None:
                    continue
                keys = {
                    batch.base_offset + at: key
                    for batch in map(Batch, jobs.frames)
                    for at, key in enumerate(batch.keys or [None] * len(batch))
                }
                for run in jobs.runs:
                    for offset in range(run.first, run.end):
                        named = Named(0, offset, offset + 1, run.delivery)
                        verb: Any = chance.choice([*["ack"] * 12, *["nack"] * 4, *["release"] * 4, "forget"])
                        if ordered and verb == "forget":
                            verb = "nack"
                        key = keys[offset]
                        if verb == "forget":
                            continue  # its time runs out
                        if ordered and key is not None:
                            assert held.setdefault(key, offset) == offset, f"two of {key!r} are out"
                        if chance.random() < 0.2:
                            await asyncio.sleep(0)
                        settled = await delivery.settle(CHANNEL, [Step(verb, named)] * chance.randint(1, 2))
                        if ordered and key is not None:
                            held.pop(key, None)
                        if verb == "ack" and not settled.late and offset not in done:
                            done.add(offset)
                            if key is not None:
                                order.setdefault(key, []).append(offset)

        async with asyncio.timeout(60):
            await asyncio.gather(produce(), *(consume() for _ in range(5)))
        assert done == set(range(count))
        if ordered:
            assert all(found == sorted(found) for found in order.values())
        channel = partition.state.channels.by_id[CHANNEL]
        assert (channel.open, channel.next) == (0, count)


async def test_what_becomes_of_records_is_counted_by_channel_until_that_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what came again later than it was due; another channel has its own counts, and none is kept."""
    monkeypatch.setattr("laminar.node.channels.giver.OVERDUE_MS", 20)
    async with lone_partition(tmp_path) as partition:
        deliveries = Deliveries()
        delivery = deliveries.of(partition)
        await delivery.open(CHANNEL, "billing", 1, ChannelSettings(retry_ms=0, max_attempts=2))
        await delivery.open(8, "idle", 1, QUICK)
        await append(partition, b"a", b"b", b"c")
        jobs = await given(delivery)
        await delivery.settle(CHANNEL, steps("ack", jobs)[:1])
        assert deliveries.counts.rows() == [("t", "billing", 3, 0, 0, 0, 0)]

        await append(partition, b"d", b"e")
        jobs = await given(delivery)
        await delivery.settle(CHANNEL, steps("nack", jobs))
        late = await delivery.settle(CHANNEL, steps("nack", jobs))
        assert late.done == 0
        await asyncio.sleep(0.05)  # it is the time that counts
        again = await given(delivery)
        await delivery.settle(CHANNEL, steps("nack", again))
        assert attempts(again) == [2, 2]
        assert deliveries.counts.rows() == [("t", "billing", 3, 2, 2, 2, 2)]

        await delivery.close(CHANNEL)
        deliveries.check([partition])
        assert deliveries.counts.rows() == []
        deliveries.stop()


async def test_a_full_disk_has_a_reserve_for_those_who_work_off_what_is_there(tmp_path: Path) -> None:
    """Records are refused before. What is acknowledged is taken always: it is of what was given out."""

    def full() -> Problem:
        return Problem("disk_full", outcome="not_applied")

    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        partition.appends.refusal = full
        with pytest.raises(Problem) as refused:
            await append(partition, b"c")
        assert refused.value.code == "disk_full"

        jobs = await given(delivery, 1)
        await partition.cursor_commands.set("c", 1, expected=None, check=False, owner="", now_ms=1)

        partition.appends.consumer_refusal = full
        assert await delivery.settle(CHANNEL, steps("ack", jobs)) == (1, [])
        with pytest.raises(Problem) as refused:
            await given(delivery, 1)
        assert refused.value.code == "disk_full"
        with pytest.raises(Problem) as refused:
            partition.cursor_commands.set("c", 2, expected=None, check=False, owner="", now_ms=2)
        assert refused.value.code == "disk_full"
        partition.appends.consumer_refusal = lambda: None
        assert offsets(await given(delivery)) == [1]
