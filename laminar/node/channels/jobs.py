"""The records that one request is given: which they are, and the batches that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from laminar.batch import Batch, Buffer, build, stamp
from laminar.node.partition.partition import Partition

MAX_BYTES: Final = 16 * 1024 * 1024
"""About how many bytes of batches one request is given; one batch at least."""
_READ_BYTES: Final = 1024 * 1024


class Run(NamedTuple):
    """Records that follow each other, of one delivery, with the number of their attempt (from 1)."""

    first: int
    length: int
    delivery: int
    attempt: int

    @property
    def end(self) -> int:
        """The offset after the last of them."""
        return self.first + self.length


class Jobs(NamedTuple):
    """What a consumer is given of one partition.

    `frames` are batches that hold all records of `runs`, each at its offset, and maybe others. `floor` is
    the lowest offset that the channel has not done. `late` are those of the records, by offset, whose last
    consumer was late.
    """

    partition: int
    floor: int
    runs: list[Run]
    frames: list[Buffer]
    late: Sequence[int] = ()

    @property
    def total(self) -> int:
        """How many records they are."""
        return sum(run.length for run in self.runs)


async def frames_of(
    partition: Partition, runs: Sequence[Run], *, max_bytes: int = MAX_BYTES
) -> tuple[list[Buffer], int]:
    """Return batches with the records of ascending runs, and how many of the runs they hold.

    These are fewer than all if `max_bytes` is reached before.

    Raises:
        Problem: 410 `offset_expired` when the first is no more in the log.
        DamagedRange: when the first is damaged.
    """
    found: list[Buffer] = []
    size = 0
    batches: list[Batch] = []
    last_whole = -1
    for done, run in enumerate(runs):
        if done and size >= max_bytes:
            return found, done
        at = run.first
        while at < run.end:
            while batches and batches[0].next_offset <= at:
                del batches[0]
            if not batches or batches[0].base_offset > at:
                read = await partition.reader.frames(at, max_bytes=_READ_BYTES, before=run.end)
                batches = [Batch(frame, verified=True) for frame in read]
                if not batches or not batches[0].base_offset <= at < batches[0].next_offset:
                    return found, done
            batch = batches[0]
            end = min(run.end, batch.next_offset)
            if batch.is_large or 2 * (end - at) >= len(batch):
                if last_whole != batch.base_offset:
                    found.append(batch.frame)
                    size += len(batch.frame)
                    last_whole = batch.base_offset
            else:
                found.append(part_of(batch, at, end))
                size += len(found[-1])
            at = end
    return found, len(runs)


def part_of(batch: Batch, first: int, end: int) -> bytearray:
    """Return a batch of the records from offset `first` up to `end` alone, with the place of the whole."""
    a, b = first - batch.base_offset, end - batch.base_offset
    keys, tags, headers = batch.keys, batch.tags, batch.headers
    given, delivery, traces = batch.given_timestamps, batch.delivery_times, batch.trace_ids
    frame = build(
        [batch.value(position) for position in range(a, b)],
        keys=keys and keys[a:b],
        timestamps=given and given[a:b],
        tags=tags and tags[a:b],
        headers=headers and headers[a:b],
        delivery_times=delivery and delivery[a:b],
        trace_ids=traces and traces[a:b],
    )
    header = batch.header
    stamp(
        frame,
        index=header.index,
        term=header.term,
        prev_term=header.prev_term,
        base_offset=first,
        append_time_ms=header.append_time_ms,
        committed_index=header.committed_index,
    )
    return frame
