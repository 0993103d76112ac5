"""Seals, and what is asked of a partition that has one."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from laminar.batch import Header, build
from laminar.batch.header import set_producer
from laminar.http.api.problems import Problem
from laminar.log.format.flush_policy import FlushPolicy
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.succession import Input, OpenRecord, Output, SealRecord
from laminar.node.transactions.participant import Batch as StagedBatch
from laminar.node.transactions.participant import Participant
from tests.node.alone import VOTER
from tests.node.partition.test_retention import HOUR_MS

SEAL = SealRecord(7, 3, [Output(1, 0, 30_000, b"1" * 16), Output(2, 30_000, 35_536, b"2" * 16)], "strict")
OPEN = OpenRecord(7, 3, 0, 30_000, [Input(0, b"0" * 16, 812, 1)])
OUTPUT = msgspec.structs.replace(VOTER, successor_of=7)
SINK = StagedBatch(sink=b"s" * 16, number=1, epoch=1)
HOURS = FlushPolicy(interval_ms=HOUR_MS, interval_records=0)


def asked(partition: Partition, frame: bytearray, **named: Any) -> asyncio.Future[Receipt]:
    return partition.appends.append_frame(frame, Header.unpack(frame), **named)


def staged(partition: Partition, batch: StagedBatch = SINK, stage: int = 0) -> asyncio.Future[Receipt]:
    frame = build([b"staged"])
    return Participant(partition).stage(batch, stage, frame, Header.unpack(frame))


def keyed(key: bytes, content: int) -> bytearray:
    frame = build([b"keyed"])
    set_producer(frame, producer_id=key * 16, epoch=0, sequence=content, keyed=True)
    return frame


async def problem_of(made: Any) -> Problem:
    """The refusal of what is called, or of the future that it returns."""
    with pytest.raises(Problem) as problem:
        await asyncio.wait_for(made(), 60)
    return problem.value


def kinds(partition: Partition) -> list[int]:
    log = partition.log
    return [log.index_entry(index).kind for index in range(log.first_index, log.last_index + 1)]


def with_header(frame: bytearray) -> tuple[bytearray, Header]:
    return frame, Header.unpack(frame)
