"""A channel of a lone partition whose open records are copied, and the retention that asks for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from laminar.batch import HEADER_SIZE
from laminar.node.channels.delivery import Delivery
from laminar.node.channels.open_records.carrier import Carrier
from laminar.node.partition.partition import Partition
from laminar.node.partition.retention import Retention, Rules
from laminar.wire.channels import ChannelSettings
from tests.node.alone import lone_partition
from tests.node.channels.delivering import append, given, offsets, steps
from tests.node.channels.test_retention import EVERYTHING, clock_of, start_after
from tests.node.partition.test_retention import HOUR_MS

CHANNEL = 7
ONCE = ChannelSettings(retry_ms=0, max_attempts=1)
MIB = 1 << 20
TWO_YEARS_MS = 730 * 24 * HOUR_MS


class Carried:
    """A partition with a channel, its retention, and what makes the copies."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.delivery = Delivery(partition)
        self.carrier = Carrier(partition)
        self.carries = True

    def retention(self, rules: Rules = EVERYTHING, **named: Any) -> Retention:
        return Retention(
            clock=clock_of(self.partition, later_ms=1_000 * HOUR_MS),
            rules_of=lambda topic: rules,
            space_is_low=lambda: False,
            hold_ms=HOUR_MS,
            carry=lambda partition, ends: self.carrier.carry(ends) if self.carries else None,
            **named,
        )

    async def trimmed(self) -> int:
        """Have retention do all that it can; return where the log begins then."""
        retention = self.retention()
        for _ in range(30):
            before = self.partition.log.start.index, self.carrier.copied
            await start_after(retention, self.partition)
            await self.carrier.finished()
            if before == (self.partition.log.start.index, self.carrier.copied):
                return self.partition.start_offset
        raise AssertionError(f"{self.carrier.copied} copies, and no end of them")

    async def fill(self, mebibytes: int) -> None:
        """Append records of 256 KiB, and have all of them done in the channel."""
        for _ in range(4 * mebibytes):
            await append(self.partition, b"x" * (MIB // 4))
        while await self.work():
            pass

    async def work(self, channel: int = CHANNEL) -> int:
        """Acknowledge what there is to be had; return how many records."""
        jobs = await self.delivery.receive(channel, wanted=100, wait_s=0)
        if jobs is None:
            return 0
        await self.delivery.settle(channel, steps("ack", jobs))
        return jobs.total

    async def failed(self, *values: bytes, **columns: Any) -> list[int]:
        """Append records that are dead, or wait, after their first attempt; return their offsets."""
        await append(self.partition, *values, **columns)
        jobs = await given(self.delivery, len(values))
        await self.delivery.settle(CHANNEL, steps("nack", jobs, delay_ms=TWO_YEARS_MS, reason="no luck"))
        return offsets(jobs)


@asynccontextmanager
async def carrying(folder: Path, settings: ChannelSettings = ONCE) -> AsyncIterator[Carried]:
    async with lone_partition(folder) as partition:
        held = Carried(partition)
        try:
            await held.delivery.open(CHANNEL, "billing", 1, settings)
            yield held
        finally:
            held.delivery.stop()
            held.carrier.stop()


def retained(partition: Partition) -> int:
    """The bytes of the segments that the log has."""
    return sum(segment.size for segment in partition.log.segments())


async def damage(partition: Partition, index: int) -> None:
    """Have an entry read from its file, where it is not what it was."""
    log, storage = partition.log, partition.context.driver._storage
    await storage.sync()
    await storage.checkpoint()
    storage._changes.written = storage._changes.recorded
    storage._changes.evict_written()
    with open(log.segment_of(index).file.path, "r+b") as file:  # noqa: ASYNC230  # a disk that errs
        file.seek(log.index_entry(index).position + HEADER_SIZE)
        file.write(b"\xff\xff\xff\xff")
