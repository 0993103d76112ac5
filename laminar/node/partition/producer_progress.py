"""The progress of a producer in one partition, for a producer that resumes.

`fence` begins an epoch: once its entry is committed, what the older epochs wrote is in the log before it or
nowhere, and they write no more. So its answer stays true, which that of `read` does not: a request of a
process that was killed may still wait in a socket. `read` returns what is durable, as a majority confirms it.
Both are for leaders.
"""

from __future__ import annotations

import asyncio

from laminar.batch import HEADER_SIZE, Header, Kind
from laminar.batch.header import seal
from laminar.http.api.problems import Problem
from laminar.node.partition.deduplication import check_room
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.producers import Progress, Refused

# How long a request waits for a replica that lags slightly.
COPIES_WAIT_S = 1.0


async def fence(partition: Partition, producer_id: bytes, epoch: int) -> Progress | None:
    """Fence older epochs and return how far they got, or None if that has been forgotten since.

    Raises:
        Problem: 409 `fenced` if a newer epoch has begun.
    """
    partition.check_leads()
    known = partition.producers.fenced_at(producer_id, epoch)
    if isinstance(known, Refused):
        raise _fenced(epoch, known.expected)
    if known is None:
        frame = bytearray(HEADER_SIZE)
        seal(frame, Kind.FENCE, producer_id=producer_id, producer_epoch=epoch)
        check_room(partition.context, Header.unpack(frame))
        await partition.appends.append_control(frame)
    else:
        await partition.appends.when_committed(known, Receipt(partition.number, 0, 0))
    progress = partition.producers.committed_progress(producer_id)
    if progress is not None and progress.epoch > epoch:
        raise _fenced(epoch, progress.epoch)
    return progress


def _fenced(epoch: int, newer: int) -> Problem:
    return Problem(
        "fenced",
        "a newer epoch of this producer has begun",
        field="epoch",
        value=epoch,
        limit=newer,
        outcome="not_applied",
    )


async def _copied(partition: Partition, *, wait_s: float) -> None:
    """Wait until all that is committed has its copies. Raises 503 `too_few_replicas`."""
    index = partition.committed_index
    if partition.copies.are_there(index):
        return
    try:
        async with asyncio.timeout(wait_s):
            await partition.appends.when_committed(index, Receipt(partition.number, 0, 0))
    except TimeoutError:
        partition.copies.check()
        raise Problem("outcome_unknown", "committed by a majority, and min_replicas is not reached") from None


async def read(
    partition: Partition, producer_id: bytes, *, epoch: int, sequence: int | None, wait_s: float
) -> Progress | None:
    """Return what is durable of a producer, or None if nothing is.

    With `sequence`, a batch of `epoch`: wait until that batch is durable or `wait_s` is over.

    Raises:
        Problem: when that batch is truncated, or this replica cannot confirm anything.
    """
    await partition.reader.confirmed_end()
    if sequence is not None and wait_s > 0:
        place = partition.producers.check(producer_id, epoch, sequence)
        if place is not None and not isinstance(place, Refused):
            receipt = Receipt(partition.number, place.offset, place.count)
            try:
                async with asyncio.timeout(wait_s):
                    await partition.appends.when_committed(place.index, receipt)
            except TimeoutError:
                pass
    await _copied(partition, wait_s=max(wait_s, COPIES_WAIT_S))
    return partition.producers.committed_progress(producer_id)
