"""Copies of records that channels have open, so that these need not keep the log. The leader's part.

The start of the log does not pass a record that is out or aside. Retention asks for copies when such records
are all that keeps expired segments (`laminar.node.partition.retention`): then they are written again at the
log's end, in entries that are at once the copy and the change of the table. So a record that is dead, or
waits for two years, costs its bytes once in each retention period, and keeps nothing else on the disk.

A copy is made only if it frees at least twice what it takes, together with the copies of delayed records
that have to follow (`laminar.node.delay.carrier`). What records take is estimated by their segments, and then
measured before any is written. A record larger than a batch is not copied, nor is one that is damaged here:
it keeps the log as long as it is open.

Something else may keep the log's start where it is, as a transaction that is not decided. So until the log
begins where copies were to let it begin, none are made for a later place, if these are all that was needed
for it: those that were made might be copied again and again, and fill the disk.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Final, NamedTuple, TypeVar

from laminar.batch import BatchError, Codec, build
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange, StorageError
from laminar.node.channels.jobs import Source, Stretch
from laminar.node.partition.partition import Partition
from laminar.node.partition.retention import STEP_BYTES
from laminar.node.partition.state.channels import Copied, channel_entry, spaced

_log = logging.getLogger("laminar.channels")
_T = TypeVar("_T")

CARRIED_SINCE: Final = 5
"""The code version from which on all nodes know copies."""
COPY_BYTES: Final = 1 << 20
"""Most bytes of records in one entry, unless one record alone has more."""
COPY_RECORDS: Final = 10_000
"""Most records in one entry."""
AT_ONCE: Final = 100
"""How many records are read in one turn of the loop."""
NO_COPY: Final = 0
"""In place of a damaged entry: the record is larger than a batch, or its batch is not what it should be."""
RECORD_BYTES: Final = 32
"""About how many bytes a record takes beside its cells."""


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
    is_compressed: bool

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
            any(entry.codec for entry in batch.directory().values()),
        )

    @property
    def size_bytes(self) -> int:
        """About how many bytes it takes, not compressed."""
        headers = self.headers or {}
        return (
            RECORD_BYTES
            + len(self.value)
            + len(self.key or b"")
            + len(self.tag or "")
            + sum(len(name) + len(value) for name, value in headers.items())
        )


class _Way(NamedTuple):
    """The records at `offsets` are to be copied, so that the log may begin after entry `end`."""

    end: int
    offsets: list[int]


class Carrier:
    """The copies in one partition. One task makes them."""

    def __init__(self, partition: Partition) -> None:
        """Make the carrier of a partition; it is idle until it is asked."""
        self._partition = partition
        self._task: asyncio.Task[None] | None = None
        # How many bytes the open records take that were read, by offset, as they are stored.
        self._sizes: dict[int, int] = {}
        # Records that are not copied, by offset: the entry of each that is damaged here, or `NO_COPY`.
        self._stays: dict[int, int] = {}
        # The entry after which the log may begin by the copies that were made last.
        self._end = 0
        self.copied = 0

    def carry(self, ends: Sequence[int]) -> None:
        """Begin to copy what is open before the end of a segment, unless copies are being made.

        `ends` are the last indexes of the segments that only open records keep, ascending. It is done for as
        many of them as `STEP_BYTES` allow, and where it frees more than it takes.
        """
        if self._task is None and self._partition.leads and self._way(ends) is not None:
            self._task = asyncio.get_running_loop().create_task(self._run(ends))

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

    def _way(self, ends: Sequence[int]) -> _Way | None:
        """Return what is to be copied, by what is known of the records; None if nothing is."""
        log, table = self._partition.log, self._partition.state.channels
        originals = sorted(table.uncopied(log.start.offset))
        copies = sorted((copy.entry, offset, copy.size) for offset, copy in table.copies.items())
        delayed, delayed_bytes = self._partition.state.delayed.copy_bytes()
        self._forget(originals)
        segments = [(last, size) for last, _, size in log.sealed()]
        segment_bytes = [0, *accumulate(size for _, size in segments)]
        chosen: tuple[int, int, int] | None = None
        first, freed, takes = log.start.offset, 0, 0
        fresh = again = 0
        free_without = without_delayed = 0
        waits = False
        for end in ends:
            if waits:
                break
            if end <= log.start.index or log.term(end) is None:
                continue  # the log begins after it, or it is damaged here
            row = log.index_entry(end)
            if self._keeps(end, row.next_offset):
                break
            place = bisect_left(segments, (end + 1,))
            held = segment_bytes[place]
            if not place or segments[place - 1][0] != end:
                held += row.position + row.size  # it is a seal's, in the active segment
            of_record = (held - freed) // max(1, row.next_offset - first)
            fresh_end = bisect_left(originals, row.next_offset)
            again_end = bisect_left(copies, (end + 1,))
            takes += sum(self._sizes.get(offset, of_record) for offset in originals[fresh:fresh_end])
            takes += sum(size for _, _, size in copies[again:again_end])
            first, freed, fresh, again = row.next_offset, held, fresh_end, again_end
            of_delayed = delayed_bytes[bisect_left(delayed, end + 1)]
            if not of_delayed:
                without_delayed = held
            delayed_follow = 2 * of_delayed <= freed - without_delayed
            if not fresh and not again:
                free_without = held
                # If copies failed, more was opened, or the delayed records stay, then the log can't begin
                # there, and to wait for that would be for as long as these are open.
                waits = end == self._end and delayed_follow
                continue
            if chosen is not None and takes > STEP_BYTES:
                break
            # The delayed records are to follow, which are looked at without what is open.
            if 2 * takes <= freed - free_without and 2 * (takes + of_delayed) <= freed and delayed_follow:
                chosen = end, fresh, again
        if chosen is None:
            return None
        end, fresh, again = chosen
        return _Way(end, sorted({*originals[:fresh], *(offset for _, offset, _ in copies[:again])}))

    def _keeps(self, end: int, next_offset: int) -> bool:
        """Return whether a record before the end of entry `end` stays where it is."""
        copies = self._partition.state.channels.copies
        return any(
            copies[offset].entry <= end if offset in copies else offset < next_offset
            for offset in self._stays
        )

    def _forget(self, originals: Sequence[int]) -> None:
        """Forget the sizes of all other records, and what does not stay any more: it is repaired, or done."""
        held, table = set(originals), self._partition.state.channels
        quarantine = self._partition.log.quarantine
        self._sizes = {offset: size for offset, size in self._sizes.items() if offset in held}
        self._stays = {
            offset: entry
            for offset, entry in self._stays.items()
            if (offset in held or offset in table.copies)
            and (entry == NO_COPY or quarantine.at(entry) is not None)
        }

    # -- the task ----------------------------------------------------------------------------

    async def _run(self, ends: Sequence[int]) -> None:
        partition = self._partition
        try:
            partition.context.check_knows(CARRIED_SINCE, "copies of open records")
            measured: set[int] = set()
            while (way := self._way(ends)) is not None:
                copies = partition.state.channels.copies
                unknown = [each for each in way.offsets if each not in self._sizes and each not in copies]
                if not unknown:
                    self._end = way.end
                    await self._copy(way.offsets)
                    return
                # What is not known after it was read would be read again without end.
                if not measured.isdisjoint(unknown) or not await self._measure(unknown):
                    return
                measured.update(unknown)
        except (Problem, StorageError) as error:
            _log.info("%s: open records are not copied now: %s", partition.replica.name, error)
        except Exception as error:  # noqa: BLE001  # stops this partition's replica
            partition.stop(error)
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    async def _measure(self, offsets: Sequence[int]) -> bool:
        """Read records to learn their sizes, and which of them stay; return whether all could be learnt."""
        source = Source(self._partition)
        for number, offset in enumerate(offsets):
            if number % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            stretch = await self._read(source, offset)
            if stretch is not None:
                batch = stretch.batch
                try:
                    plain = sum(entry.plain_length for entry in batch.directory().values())
                    size = _Record.of(stretch).size_bytes
                except BatchError as error:
                    _log.warning("%s: an open record is not copied: %s", self._partition.replica.name, error)
                    self._stays[offset] = NO_COPY
                    continue
                self._sizes[offset] = min(size, size * len(batch.frame) // max(1, plain))
            elif offset not in self._stays and self._partition.state.channels.has_open(offset):
                return False
        return True

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
            self._stays[offset] = damage.first_index
            return None
        except Problem:
            return None  # it has ended
        if stretch is not None and stretch.batch.is_large:
            self._stays[offset] = NO_COPY
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
        codec=Codec.ZSTD if any(each.is_compressed for each in records) else Codec.NONE,
    )


def _cell(column: Sequence[_T] | None, row: int) -> _T | None:
    return None if column is None else column[row]
