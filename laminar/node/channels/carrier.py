"""Copies of records that channels have open, so that these need not keep the log. The leader's part.

The start of the log does not pass a record that is out or aside. Retention asks for copies when such records
are all that keeps expired segments (`laminar.node.partition.retention`): then they are written again at the
log's end, in entries that are at once the copy and the change of the table. So a record that is dead, or
waits for two years, costs its bytes once in each retention period, and keeps nothing else on the disk.

A copy is made only if it frees more than it takes. A record larger than a batch is not copied: it keeps the
log as long as it is open.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, TypeVar

from laminar.batch import build
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange, StorageError
from laminar.node.channels.jobs import Source, Stretch
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.channels import Copied, channel_entry, spaced

_log = logging.getLogger("laminar.channels")
_T = TypeVar("_T")

CARRIED_SINCE: Final = 5
"""The code version from which on all nodes know copies."""
COPY_BYTES: Final = 1 << 20
"""Most bytes of records in one entry, unless one record alone has more."""
COPY_RECORDS: Final = 10_000
"""Most records in one entry."""
STEP_BYTES: Final = 64 << 20
"""About how many bytes are copied before the log's start is moved: the disk may be full."""
AT_ONCE: Final = 100
"""How many records are read in one turn of the loop."""


class _Record(NamedTuple):
    """A record to be copied. It holds no batch in memory."""

    offset: int
    append_ms: int
    value: bytes
    key: bytes | None
    tag: str | None
    headers: Mapping[str, bytes] | None
    timestamp: int | None
    delivery_time: int | None
    trace_id: bytes | None

    @classmethod
    def of(cls, stretch: Stretch) -> _Record:
        """Return the first record of a stretch."""
        batch, row = stretch.batch, stretch.row
        return cls(
            stretch.first,
            stretch.time_ms,
            bytes(batch.value(row)),
            _cell(batch.keys, row),
            _cell(batch.tags, row),
            _cell(batch.headers, row),
            _cell(batch.given_timestamps, row),
            _cell(batch.delivery_times, row),
            _cell(batch.trace_ids, row),
        )

    @property
    def size_bytes(self) -> int:
        """About how many bytes it takes."""
        headers = self.headers or {}
        return (
            len(self.value)
            + len(self.key or b"")
            + len(self.tag or "")
            + sum(len(name) + len(value) for name, value in headers.items())
        )


class Carrier:
    """The copies in one partition. One task makes them."""

    def __init__(self, partition: Partition) -> None:
        """Make the carrier of a partition; it is idle until it is asked."""
        self._partition = partition
        self._task: asyncio.Task[None] | None = None
        # Records larger than a batch.
        self._large: set[int] = set()
        self.copied = 0

    def carry(self, ends: Sequence[int]) -> None:
        """Begin to copy what is open before the end of a segment, unless copies are being made.

        `ends` are the last indexes of the segments that only open records keep, ascending. It is done for as
        many of them as `STEP_BYTES` allow, and where it frees more than it takes.
        """
        if self._task is not None or not self._partition.leads:
            return
        wanted = self._wanted(ends)
        if wanted:
            self._task = asyncio.get_running_loop().create_task(self._run(wanted))

    async def finished(self) -> None:
        """Wait until no copies are being made."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def stop(self) -> None:
        """End the task: this replica leads no more, or the process ends."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    # -- what is copied ----------------------------------------------------------------------

    def _wanted(self, ends: Sequence[int]) -> list[int]:
        """Return the offsets of the records to be copied, ascending."""
        log, table = self._partition.log, self._partition.state.channels
        originals = sorted(table.uncopied(log.start.offset))
        self._large.intersection_update(originals)
        first_large = min(self._large, default=None)
        copies = sorted((copy.entry, offset, copy.size) for offset, copy in table.copies.items())
        copied_bytes = [0, *accumulate(size for _, _, size in copies)]
        segments = [(last, size) for last, _, size in log.sealed()]
        segment_bytes = [0, *accumulate(size for _, size in segments)]
        chosen = 0, 0
        for end in reversed(ends):
            if log.term(end) is None:
                continue  # it is damaged here
            next_offset = log.index_entry(end).next_offset
            if first_large is not None and first_large < next_offset:
                continue
            fresh = bisect_left(originals, next_offset)
            again = bisect_left(copies, (end + 1,))
            freed = segment_bytes[bisect_left(segments, (end + 1,))]
            records = max(1, next_offset - log.start.offset)
            takes = copied_bytes[again] + fresh * freed // records
            if (fresh or again) and 2 * takes <= freed:
                chosen = fresh, again
                if takes <= STEP_BYTES:
                    break
        fresh, again = chosen
        return sorted({*originals[:fresh], *(offset for _, offset, _ in copies[:again])})

    # -- the task ----------------------------------------------------------------------------

    async def _run(self, offsets: Sequence[int]) -> None:
        partition = self._partition
        try:
            partition.context.check_knows(CARRIED_SINCE, "copies of open records")
            await self._copy(offsets)
        except (Problem, StorageError) as error:
            _log.info("%s: open records are not copied now: %s", partition.replica.name, error)
        except Exception as error:  # noqa: BLE001  # stops this partition's replica
            partition.stop(error)
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _copy(self, offsets: Sequence[int]) -> None:
        """Copy these records; return when that is committed."""
        source = Source(self._partition)
        chosen: list[_Record] = []
        size = 0
        for number, offset in enumerate(offsets):
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            stretch = await self._read(source, offset)
            if stretch is None:
                continue
            record = _Record.of(stretch)
            if chosen and (size + record.size_bytes > COPY_BYTES or len(chosen) >= COPY_RECORDS):
                await self._append(chosen)
                chosen, size = [], 0
            chosen.append(record)
            size += record.size_bytes
        if chosen:
            await self._append(chosen)

    async def _read(self, source: Source, offset: int) -> Stretch | None:
        """Return a record; None if there is none to be copied."""
        if not self._partition.state.channels.has_open(offset):
            return None
        try:
            stretch = await source.read(offset, offset + 1)
        except DamagedRange as damage:
            # It is repaired from another replica, or is dead in the end.
            _log.info("%s: an open record is not copied now: %s", self._partition.replica.name, damage)
            return None
        except Problem:
            return None  # it has ended
        if stretch is not None and stretch.batch.is_large:
            self._large.add(offset)
            return None
        return stretch

    async def _append(self, chosen: Sequence[_Record]) -> None:
        frame = _joined(chosen)
        change = Copied(
            0,
            spaced(each.offset for each in chosen),
            [each.append_ms for each in chosen],
            len(frame) // len(chosen),
            bytes(frame),
        )
        # What ended since it was read has no copy: the table looks when it applies this. It frees room, so
        # it is made on a full disk, too. The originals are deleted after it, so it counts when it is synced.
        future = self._partition.appends.append_control(
            channel_entry([change], synced=True), even_if_full=True
        )
        self.copied += len(chosen)
        await future


def _joined(records: Sequence[_Record]) -> bytearray:
    """Return one unstamped batch of these records, in order."""
    return build(
        [each.value for each in records],
        keys=[each.key for each in records],
        timestamps=[each.timestamp for each in records],
        tags=[each.tag for each in records],
        headers=[each.headers for each in records],
        delivery_times=[each.delivery_time for each in records],
        trace_ids=[each.trace_id for each in records],
    )


def _cell(column: Sequence[_T] | None, row: int) -> _T | None:
    return None if column is None else column[row]
