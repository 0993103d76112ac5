"""Copy open records of channels to the log's end, so that old segments can be trimmed. The leader does this.

An *open* record is out or aside: given out, or waiting for another attempt, or dead. Retention never trims
the log beyond an open record. When open records are all that prevents the trimming of expired segments,
retention (`laminar.node.partition.retention`) asks for copies: the records are written again at the log's
end, in entries that are both the copy and the change of the channels' table. So a record that is dead, or
waits for two years, costs its bytes once in each retention period, and retains no other data on the disk.

Copies are written only if they free at least twice the space that they take, together with the copies of
delayed records that have to follow (`laminar.node.delay.carrier`). The sizes of records are first estimated
from their segments, and then measured before any copy is written. A record larger than a batch is not copied,
nor is one that is damaged here: it prevents trimming as long as it is open.

Something else may prevent trimming, too, for example a transaction that is not decided. So while the log is
not trimmed yet as far as the latest copies permit, no copies are made for later segments: else the same
records could be copied again and again, and fill the disk.
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
from laminar.node.channels.open_records.jobs import Source, Stretch
from laminar.node.partition.partition import Partition
from laminar.node.partition.retention import STEP_BYTES
from laminar.node.partition.state.channel_changes import Copied, channel_entry, spaced

_log = logging.getLogger("laminar.channels")
_T = TypeVar("_T")

CARRIED_SINCE: Final = 5
"""The code version from which on all nodes support copies of open records."""
COPY_BYTES: Final = 1 << 20
"""Most bytes of records in one entry, unless one record alone has more."""
COPY_RECORDS: Final = 10_000
"""Most records in one entry."""
AT_ONCE: Final = 100
"""How many records are read in one turn of the loop."""
NO_COPY: Final = 0
"""Instead of a damaged entry's index: the record is larger than a batch, or its batch is malformed."""
RECORD_BYTES: Final = 32
"""The approximate size of a record in addition to its fields."""


class _Record(NamedTuple):
    """A record to be copied. It has its own bytes, so that it does not retain its batch in memory."""

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
        """The approximate size of the record, not compressed."""
        headers = self.headers or {}
        return (
            RECORD_BYTES
            + len(self.value)
            + len(self.key or b"")
            + len(self.tag or "")
            + sum(len(name) + len(value) for name, value in headers.items())
        )


class _Way(NamedTuple):
    """A plan: copy the records at `offsets`, so that the log may be trimmed up to entry `end`."""

    end: int
    offsets: list[int]


class Carrier:
    """Copies open records in one partition, in one task."""

    def __init__(self, partition: Partition) -> None:
        """Create the carrier of a partition; it does nothing until `carry` is called."""
        self._partition = partition
        self._task: asyncio.Task[None] | None = None
        # The stored sizes of open records that were read, by offset.
        self._sizes: dict[int, int] = {}
        # Records that cannot be copied, by offset: the damaged entry of each, or `NO_COPY`.
        self._stays: dict[int, int] = {}
        # The entry up to which the latest copies permit trimming.
        self._end = 0
        self.copied = 0

    def carry(self, ends: Sequence[int]) -> None:
        """Begin to copy the open records in old segments, unless copies are being made.

        `ends` are the last indexes of the segments that only open records retain, in ascending order. As many
        segments are handled as `STEP_BYTES` permit, and only if that frees more space than the copies take.
        """
        if self._task is None and self._partition.leads and self._way(ends) is not None:
            self._task = asyncio.get_running_loop().create_task(self._run(ends))

    async def finished(self) -> None:
        """Wait until no copies are being made."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def stop(self) -> None:
        """Stop copying. Call it when this replica no longer leads or the process ends."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    # -- what is copied ----------------------------------------------------------------------

    def _way(self, ends: Sequence[int]) -> _Way | None:
        """Return the plan of what to copy, by the known sizes of the records; None if it does not pay."""
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
                held += row.position + row.size  # the entry is a seal, in the active segment
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
                # Wait only if nothing else prevents trimming there: after failed copies, with newly opened
                # records, or with delayed records that are not copied, the wait could be
                # endless.
                waits = end == self._end and delayed_follow
                continue
            if chosen is not None and takes > STEP_BYTES:
                break
            # The delayed records must be copied after these; their carrier does not consider open records.
            if 2 * takes <= freed - free_without and 2 * (takes + of_delayed) <= freed and delayed_follow:
                chosen = end, fresh, again
        if chosen is None:
            return None
        end, fresh, again = chosen
        return _Way(end, sorted({*originals[:fresh], *(offset for _, offset, _ in copies[:again])}))

    def _keeps(self, end: int, next_offset: int) -> bool:
        """Return whether a record that cannot be copied lies in the entries up to `end`."""
        copies = self._partition.state.channels.copies
        return any(
            copies[offset].entry <= end if offset in copies else offset < next_offset
            for offset in self._stays
        )

    def _forget(self, originals: Sequence[int]) -> None:
        """Drop sizes of records other than `originals`, and outdated marks in `_stays`."""
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
                # A record whose size is unknown after it was read would be read again for ever.
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
        """Read records to learn their sizes, or that they cannot be copied; return whether that succeeded."""
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
        """Copy these records; return when the copies are committed."""
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
        """Read an open record; return None if it is not open any more, or cannot be copied."""
        if not self._partition.state.channels.has_open(offset):
            return None
        try:
            stretch = await source.read(offset, offset + 1)
        except DamagedRange as damage:
            # It will be repaired from another replica, or fail as a dead record.
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
        # The table ignores copies of records that ended since they were read. The entry frees space, so it
        # is allowed on a full disk. The originals are deleted after it, so it counts only when synced.
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
