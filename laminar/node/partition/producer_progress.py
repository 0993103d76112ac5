"""The progress of a producer in one partition, for a producer that resumes. Leader only.

`fence` begins a new epoch with a fence entry. Once the entry is committed, every batch of an older epoch is
before it in the log or is not in the log, and no more such batches are accepted. So the progress that `fence`
returns is final. `read` returns the durable progress, as a majority confirms it. It may change right after:
a request of a process that was killed may still wait in a socket.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from laminar.batch import HEADER_SIZE, Header, Kind
from laminar.batch.header import seal
from laminar.http.api.problems import Problem
from laminar.node.partition.deduplication import check_room
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.producers import Progress, Refused

# Seconds that a `read` waits at least for replicas that lag slightly, if `min_replicas` demands their copies.
COPIES_WAIT_S = 1.0


async def fence(partition: Partition, producer_id: bytes, epoch: int) -> Progress | None:
    """Begin `epoch`, fence the older ones, and return the producer's progress once that is committed.

    `sequence` of the returned progress is the last one of this epoch, -1 if the epoch has no batch yet;
    `checkpoint` and `floor` are those of all epochs. None is returned if the table does not know the producer
    (any more). Nothing is appended if this epoch has begun already, or if the partition is sealed: then no
    batch is accepted anyway, so the progress is final.

    Raises:
        Problem: 409 `fenced` if a newer epoch has begun; 429 `quota` if the producer is new and the table is
            full.
    """
    partition.check_leads()
    known = partition.producers.fenced_at(producer_id, epoch)
    if isinstance(known, Refused):
        raise await partition.appends.confirmed(_fenced(epoch, known.expected))
    if known is None and partition.state.succession.sealed is not None:
        await partition.appends.until_sealed()
        progress = partition.producers.committed_progress(producer_id)
        return None if progress is None else replace(progress, epoch=epoch, sequence=-1)
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
    """Wait until all committed entries are on as many voters as the topic's `min_replicas`.

    Raises:
        Problem: after `wait_s` 503 `too_few_replicas` if too few voters are in sync, else 504
            `outcome_unknown`.
    """
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
    """Return the durable progress of a producer, or None if the table does not know it.

    First a majority confirms that this replica leads. Then, with `sequence`, wait at most `wait_s` for the
    commit of that batch of `epoch`, if it is appended here. Then wait until all committed entries are on
    `min_replicas` replicas: for the rest of `wait_s`, but for `COPIES_WAIT_S` at least.

    Raises:
        Problem: if that batch is truncated, no majority confirms that this replica leads, or committed
            entries are on too few replicas.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + wait_s
    await partition.reader.confirmed_end()
    if sequence is not None and wait_s > 0:
        place = partition.producers.check(producer_id, epoch, sequence)
        if place is not None and not isinstance(place, Refused):
            receipt = Receipt(partition.number, place.offset, place.count)
            try:
                async with asyncio.timeout_at(deadline_s):
                    await partition.appends.when_committed(place.index, receipt)
            except TimeoutError:
                pass
    await _copied(partition, wait_s=max(deadline_s - loop.time(), COPIES_WAIT_S))
    return partition.producers.committed_progress(producer_id)
