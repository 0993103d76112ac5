"""The start of the log waits for channels: for what is open without end, for what is unread a while."""

from __future__ import annotations

from pathlib import Path

import pytest

from laminar.http.api.problems import Problem
from laminar.node.channels.delivery import Delivery
from laminar.node.channels.requests import Step
from laminar.node.partition.partition import Partition
from laminar.node.partition.retention import Retention, Rules
from laminar.node.partition.state.kept_log import Keeper, KeptLog
from laminar.wire.channels import ChannelSettings, Named
from tests.node.alone import lone_partition
from tests.node.partition.test_retention import HOUR_MS, At, fill, keeper, settled_start

CHANNEL = 7
EVERYTHING = Rules(retention_bytes=0)


def clock_of(partition: Partition, *, later_ms: int = 0) -> At:
    clock = At()
    clock.wall = partition.log.last_append_time_ms + later_ms
    return clock


def kept_log(partition: Partition) -> KeptLog | None:
    """Which channels keep the log, as the leader says now."""
    return partition.context.kept_log


async def start_after(retention: Retention, partition: Partition) -> int:
    retention.check(partition)
    await settled_start(partition)
    return partition.start_offset


async def test_an_open_record_holds_the_start_whatever_its_age(tmp_path: Path) -> None:
    """Also while the disk is nearly full; when it is done, the start moves."""
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await delivery.open(CHANNEL, "billing", 1, ChannelSettings(hold_ms=0))
        await fill(partition, 12)
        jobs = await delivery.receive(CHANNEL, wanted=24, wait_s=5)
        assert jobs is not None and jobs.total == 24
        delivery_number = jobs.runs[0].delivery
        every = [Step("ack", Named(0, 0, 3, delivery_number)), Step("ack", Named(0, 4, 24, delivery_number))]
        assert (await delivery.settle(CHANNEL, every)).done == 23
        old = clock_of(partition, later_ms=1_000 * HOUR_MS)

        assert await start_after(keeper(old, EVERYTHING, low=True), partition) == 0
        await delivery.settle(CHANNEL, [Step("nack", Named(0, 3, 4, delivery_number), delay_ms=HOUR_MS)])
        assert await start_after(keeper(old, EVERYTHING), partition) == 0
        await delivery.seek(CHANNEL, 24, drop=True)
        assert await start_after(keeper(old, EVERYTHING), partition) > 3
        delivery.stop()


async def test_a_command_takes_what_is_before_the_new_start_from_the_table(tmp_path: Path) -> None:
    """A person has said so: it is counted, not given out again, and its consumer is late."""
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await delivery.open(CHANNEL, "billing", 1, ChannelSettings())
        await fill(partition, 12)
        jobs = await delivery.receive(CHANNEL, wanted=6, wait_s=5)
        assert jobs is not None and jobs.total == 6

        await partition.start_mover.propose(await partition.start_mover.index_before(10))

        channel = partition.state.channels.by_id[CHANNEL]
        assert partition.start_offset == 10
        assert (channel.open, channel.lost, channel.next) == (0, 10, 10)
        settled = await delivery.settle(CHANNEL, [Step("nack", Named(0, 0, 6, jobs.runs[0].delivery))])
        assert settled == (0, [Named(0, 0, 6, jobs.runs[0].delivery)])
        delivery.stop()


async def test_what_was_never_given_out_holds_the_start_for_a_time(tmp_path: Path) -> None:
    """For `hold_ms` beyond the rule; then it is lost to the channel, which counts it."""
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await delivery.open(CHANNEL, "billing", 1, ChannelSettings(hold_ms=HOUR_MS))
        await fill(partition, 12)
        rules = Rules(retention_ms=HOUR_MS)

        early = clock_of(partition, later_ms=3 * HOUR_MS // 2)
        assert await start_after(keeper(early, rules), partition) == 0
        late = clock_of(partition, later_ms=5 * HOUR_MS // 2)
        start = await start_after(keeper(late, rules), partition)

        assert start > 0
        channel = partition.state.channels.by_id[CHANNEL]
        assert (channel.next, channel.lost) == (start, start)
        jobs = await delivery.receive(CHANNEL, wanted=1, wait_s=5)
        assert jobs is not None and jobs.runs[0].first == start
        delivery.stop()


async def test_a_channel_that_ended_before_holds_nothing(tmp_path: Path) -> None:
    """With `until`, what comes after it is not awaited."""
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await delivery.open(CHANNEL, "replay", 1, ChannelSettings(until=1))
        await fill(partition, 12)
        old = clock_of(partition, later_ms=1_000 * HOUR_MS)

        assert partition.state.channels.by_id[CHANNEL].until == 0
        assert await start_after(keeper(old, EVERYTHING), partition) > 0
        delivery.stop()


async def test_it_is_noted_which_channel_keeps_the_log_and_with_what(tmp_path: Path) -> None:
    """While it is true: not of a channel that has moved on, or is deleted."""
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await delivery.open(CHANNEL, "billing", 1, ChannelSettings(max_attempts=1))
        await delivery.open(8, "replay", 1, ChannelSettings(until=1))
        await fill(partition, 12)
        keep = keeper(clock_of(partition, later_ms=HOUR_MS), EVERYTHING)
        assert kept_log(partition) is None, "nothing was looked for"

        keep.check(partition)
        kept = kept_log(partition)
        assert kept is not None and kept.keepers == (Keeper(CHANNEL, "billing", "unread", 0),)
        assert 0 < kept.bytes_of(CHANNEL) < partition.log.size_bytes and kept.bytes_of(8) == 0
        jobs = await delivery.receive(CHANNEL, wanted=24, wait_s=5)
        assert jobs is not None and kept_log(partition) is None, "all is given out"

        named = Named(0, 0, 1, jobs.runs[0].delivery)
        for what, step in (("out", None), ("dead", Step("nack", named))):
            if step is not None:
                assert (await delivery.settle(CHANNEL, [step])).done == 1
            keep.check(partition)
            keep.check(partition)
            kept = kept_log(partition)
            assert kept is not None and kept.keepers == ((CHANNEL, "billing", what, 0),)
        partition.appends.refusal = lambda: Problem("disk_full", "no room", outcome="not_applied")
        with pytest.raises(Problem) as refused:
            partition.appends.check_room()
        assert refused.value.detail == f"no room; {kept.size_bytes} bytes of t/0 are kept beyond its " + (
            "retention for channel 'billing', which has offset 0 as dead"
        )
        await delivery.drop_dead(CHANNEL, [0])
        assert kept_log(partition) is None
        await delivery.close(CHANNEL)
        delivery.stop()


async def test_what_is_open_is_blamed_only_when_it_was_not_copied_meanwhile(tmp_path: Path) -> None:
    """A person who deletes what the leader is about to copy would lose it for nothing."""
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await delivery.open(CHANNEL, "billing", 1, ChannelSettings())
        await fill(partition, 12)
        assert await delivery.receive(CHANNEL, wanted=24, wait_s=5) is not None
        keep = keeper(clock_of(partition, later_ms=HOUR_MS), EVERYTHING)

        keep.check(partition)
        assert kept_log(partition) is None
        keep.check(partition)
        assert kept_log(partition) is not None
        delivery.stop()
