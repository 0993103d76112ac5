"""How long a job is out: until its time is over, longer if extended, its whole time after a restart."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from laminar.node.channels.delivery import Delivery
from laminar.node.channels.queue import MIN_OUTDATED
from laminar.node.channels.requests import Step, Verb
from laminar.wire.channels import Named
from tests.node.alone import lone_partition
from tests.node.channels.delivering import (
    CHANNEL,
    HOURS_MS,
    QUICK,
    SHORT_MS,
    append,
    attempts,
    delivering,
    given,
    nothing,
    offsets,
    steps,
    values,
)


async def test_a_consumer_whose_time_is_over_is_late(tmp_path: Path) -> None:
    """Its record goes to another under another delivery; only that one may end it."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a")
        slow = await given(delivery, timeout_ms=1_000)

        quick = await given(delivery)

        assert (offsets(quick), attempts(quick)) == ([0], [2])
        named = steps("ack", slow)[0].named
        assert await delivery.settle(CHANNEL, steps("ack", slow)) == (0, [named])
        assert await delivery.settle(CHANNEL, steps("ack", quick)) == (1, [])
        assert await delivery.settle(CHANNEL, steps("ack", slow)) == (1, []), "it is done, whoever did it"
        assert (await delivery.settle(CHANNEL, steps("nack", slow))).late == [named]


async def test_an_extended_record_stays_out(tmp_path: Path) -> None:
    """The time counts from the extension; without one the record comes again."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        both = await given(delivery, timeout_ms=3_000)  # by one entry: no second sync takes of its time
        first = Named(0, 0, 1, both.runs[0].delivery)
        assert await delivery.settle(CHANNEL, [Step("extend", first, timeout_ms=60_000)]) == (1, [])

        assert offsets(await given(delivery)) == [1]
        assert await delivery.settle(CHANNEL, [Step("ack", first)]) == (1, [])


@pytest.mark.parametrize("verb", ["ack", "extend"])
async def test_a_leader_remembers_no_deadline_of_what_is_over(tmp_path: Path, verb: Verb) -> None:
    """Else it would keep one of each delivery, and of each extension, for up to twelve hours."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"shorter", b"longer")
        shorter = await given(delivery, 1, timeout_ms=60_000)
        longer = await given(delivery, 1, timeout_ms=60_000)
        await delivery.settle(CHANNEL, steps("extend", shorter, timeout_ms=HOURS_MS))
        await delivery.settle(CHANNEL, steps("extend", longer, timeout_ms=HOURS_MS))
        jobs = longer
        for _ in range(3 * MIN_OUTDATED):
            if verb == "ack":
                await append(partition, b"a")
                jobs = await given(delivery, 1, timeout_ms=HOURS_MS)
            assert await delivery.settle(CHANNEL, steps(verb, jobs, timeout_ms=HOURS_MS)) == (1, [])
        queue = delivery._lines.by_id[CHANNEL].queue
        assert len(queue._deadlines) <= 2 * len(queue.channel.out) + MIN_OUTDATED

        await delivery.settle(CHANNEL, steps("extend", shorter, timeout_ms=SHORT_MS))
        assert offsets(await given(delivery)) == offsets(shorter)
        await nothing(delivery, 1.0)
        assert await delivery.settle(CHANNEL, steps("ack", longer)) == (1, [])


async def test_what_ends_while_the_leader_is_confirmed_is_not_extended(tmp_path: Path) -> None:
    """Its consumer is not to believe that it has more time."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        jobs = await given(delivery)
        first = Named(0, 0, 1, jobs.runs[0].delivery)

        extended, acknowledged = await asyncio.gather(
            delivery.settle(CHANNEL, steps("extend", jobs)), delivery.settle(CHANNEL, [Step("ack", first)])
        )

        assert ((1, [first]), (1, [])) == (extended, acknowledged)


async def test_what_is_out_survives_a_restart_with_its_whole_time(tmp_path: Path) -> None:
    """The next leader has it out, and takes its acknowledgement; it gives it to no other meanwhile."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b", b"c")
        jobs = await given(delivery, 2)
        await delivery.settle(
            CHANNEL,
            steps("nack", jobs, delay_ms=3_600_000)[:0]
            + [Step("nack", Named(0, 1, 2, jobs.runs[0].delivery), delay_ms=3_600_000)],
        )

    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        assert values(await given(delivery)) == [b"c"]
        channel = partition.state.channels.by_id[CHANNEL]
        assert (sorted(channel.out), sorted(channel.aside)) == ([0, 2], [1])
        named = Named(0, 0, 1, jobs.runs[0].delivery)
        assert await delivery.settle(CHANNEL, [Step("ack", named)]) == (1, [])
        delivery.stop()


async def test_a_change_of_settings_gives_no_more_time_to_what_is_out(tmp_path: Path) -> None:
    """A consumer that is gone would keep its jobs as long as something is changed again and again."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a")
        await given(delivery, timeout_ms=SHORT_MS)
        stopped = asyncio.Event()

        async def change() -> None:
            version = 1
            while not stopped.is_set():
                version += 1
                await delivery.open(CHANNEL, "billing", version, QUICK)
                await asyncio.sleep(SHORT_MS / 5_000)

        changing = asyncio.create_task(change())
        again = await given(delivery, wait_s=5 * SHORT_MS / 1_000)
        stopped.set()
        await changing
        assert (offsets(again), attempts(again)) == ([0], [2])


async def test_more_time_that_was_given_is_kept_when_settings_change(tmp_path: Path) -> None:
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        jobs = await given(delivery, timeout_ms=SHORT_MS)
        longer = Step("extend", Named(0, 0, 1, jobs.runs[0].delivery), timeout_ms=HOURS_MS)
        assert await delivery.settle(CHANNEL, [longer]) == (1, [])
        await delivery.open(CHANNEL, "billing", 2, QUICK)

        assert offsets(await given(delivery)) == [1]
        await nothing(delivery)
