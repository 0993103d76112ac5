"""A channel of a lone partition, and what tests do with it: append, receive, settle, read what they got."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from laminar.batch import Batch, build
from laminar.batch.header import Header
from laminar.node.channels.delivery import Delivery
from laminar.node.channels.open_records.jobs import Jobs
from laminar.node.channels.requests import Step
from laminar.node.partition.partition import Partition
from laminar.wire.channels import ChannelSettings, Named
from tests.node.alone import lone_partition

CHANNEL = 7
QUICK = ChannelSettings(retry_ms=0)
SHORT_MS = 1_000
HOURS_MS = 12 * 3_600_000


@asynccontextmanager
async def delivering(
    folder: Path, settings: ChannelSettings = QUICK
) -> AsyncIterator[tuple[Partition, Delivery]]:
    async with lone_partition(folder) as partition:
        delivery = Delivery(partition)
        try:
            await delivery.open(CHANNEL, "billing", 1, settings)
            yield partition, delivery
        finally:
            delivery.stop()


async def append(partition: Partition, *values: bytes, **columns: Any) -> None:
    frame = build(values, **columns)
    await partition.appends.append_frame(frame, Header.unpack(frame))


async def given(delivery: Delivery, wanted: int = 10, wait_s: float = 60.0, **named: Any) -> Jobs:
    jobs = await delivery.receive(CHANNEL, wanted=wanted, wait_s=wait_s, **named)
    assert jobs is not None, "nothing was given out in time"
    return jobs


async def nothing(delivery: Delivery, wait_s: float = 0.0) -> None:
    jobs = await delivery.receive(CHANNEL, wanted=10, wait_s=wait_s)
    assert jobs is None, jobs


def offsets(jobs: Jobs) -> list[int]:
    return [offset for run in jobs.runs for offset in range(run.first, run.end)]


def attempts(jobs: Jobs) -> list[int]:
    return [run.attempt for run in jobs.runs for _ in range(run.length)]


def values(jobs: Jobs) -> list[bytes]:
    held = {
        batch.base_offset + at: value
        for batch in map(Batch, jobs.frames)
        for at, value in enumerate(batch.values)
    }
    return [held[offset] for offset in offsets(jobs)]


def steps(verb: Any, jobs: Jobs, **named: Any) -> list[Step]:
    return [Step(verb, Named(0, run.first, run.end, run.delivery), **named) for run in jobs.runs]
