"""The records that are given out to one request: their offsets, and the batches that contain them.

An open record (out or aside) that was trimmed is read from its copy (`carrier`), and is delivered with its
own offset, time, key and headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from laminar.batch import Batch, Buffer, Header, Kind, build, kind_of, stamp
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange, EntriesTrimmed
from laminar.node.partition.partition import Partition
from laminar.node.partition.reads import expired
from laminar.node.partition.state.channel_changes import Copied, channel_changes, copied_offsets

MAX_BYTES: Final = 16 * 1024 * 1024
"""The approximate limit of bytes of batches for one request; it gets at least one batch."""
_READ_BYTES: Final = 1024 * 1024


class Run(NamedTuple):
    """Consecutive records of one delivery, with the number of their attempt (from 1)."""

    first: int
    length: int
    delivery: int
    attempt: int

    @property
    def end(self) -> int:
        """The offset after the last record."""
        return self.first + self.length


def split(runs: Sequence[Run], offset: int) -> tuple[list[Run], list[Run]]:
    """Split ascending runs at an offset: return the part before it, and the rest."""
    before = [run._replace(length=min(run.length, offset - run.first)) for run in runs if run.first < offset]
    rest = [
        run._replace(first=max(run.first, offset), length=run.end - max(run.first, offset))
        for run in runs
        if run.end > offset
    ]
    return before, rest


class Jobs(NamedTuple):
    """The records of one partition that are given out to a consumer.

    `frames` are batches that contain all records of `runs`, each at its offset, and maybe others. `floor` is
    the lowest offset that the channel is not done with. `late` are the offsets of records whose previous
    delivery expired.
    """

    partition: int
    floor: int
    runs: list[Run]
    frames: list[Buffer]
    late: Sequence[int] = ()

    @property
    def total(self) -> int:
        """The number of records that were given out, over all runs."""
        return sum(run.length for run in self.runs)


async def frames_of(
    partition: Partition, runs: Sequence[Run], *, max_bytes: int = MAX_BYTES
) -> tuple[list[Buffer], int]:
    """Return batches with the records of ascending runs, and the number of runs that are complete in them.

    That may be fewer than all, if `max_bytes` is reached or a later record cannot be read.

    Raises:
        Problem: 410 `offset_expired` if the first record is no longer in the log.
        DamagedRange: the first record is damaged; the error names offsets of records.
    """
    source = Source(partition)
    found: list[Buffer] = []
    size = 0
    last_whole = -1
    for done, run in enumerate(runs):
        if done and size >= max_bytes:
            return found, done
        at = run.first
        while at < run.end:
            try:
                stretch = await source.read(at, run.end)
            except (DamagedRange, Problem):
                if done:
                    return found, done  # the request that begins there finds the same
                raise
            if stretch is None:
                return found, done
            batch = stretch.batch
            if not stretch.is_copy and (batch.is_large or 2 * stretch.length >= len(batch)):
                if last_whole != batch.base_offset:
                    found.append(batch.frame)
                    size += len(batch.frame)
                    last_whole = batch.base_offset
            else:
                found.append(stretch.frame())
                size += len(found[-1])
            at += stretch.length
    return found, len(runs)


class Stretch(NamedTuple):
    """Consecutive records with the same append time: `length` rows of a batch.

    `first` is the offset of the first record, `row` its row. `is_copy` says that the batch is one of copies.
    """

    first: int
    batch: Batch
    row: int
    length: int
    time_ms: int
    place: Header
    is_copy: bool

    def frame(self) -> bytearray:
        """Return a batch of these records alone, stamped with index, term and time of their entry."""
        batch, a, b = self.batch, self.row, self.row + self.length
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
        place = self.place
        stamp(
            frame,
            index=place.index,
            term=place.term,
            prev_term=place.prev_term,
            base_offset=self.first,
            append_time_ms=self.time_ms,
            committed_index=place.committed_index,
        )
        return frame


class _Copies(NamedTuple):
    """An entry with copies of records: its header, the original offsets of the records, and their batch."""

    header: Header
    offsets: list[int]
    batch: Batch


class Source:
    """Reads records of one partition by ascending offsets."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        # Batches that were read from the log and are not used yet, and the last entry of copies.
        self._batches: list[Batch] = []
        self._copies: _Copies | None = None

    async def read(self, at: int, end: int) -> Stretch | None:
        """Return the records from `at` on, before `end`, of one batch; None if `at` is not in the log yet.

        Raises:
            Problem: 410 `offset_expired` if the record is trimmed, and has no copy.
            DamagedRange: the record is damaged; the error names offsets of records.
        """
        if at < self._partition.start_offset:
            return await self._copied(at, end)
        batches = self._batches
        while batches and batches[0].next_offset <= at:
            del batches[0]
        if not batches or batches[0].base_offset > at:
            try:
                read = await self._partition.reader.frames(at, max_bytes=_READ_BYTES, before=end)
            except Problem:
                if at >= self._partition.start_offset:
                    raise
                return await self._copied(at, end)  # the log's start has just passed it
            batches[:] = [Batch(frame, verified=True) for frame in read]
            if not batches or not batches[0].base_offset <= at < batches[0].next_offset:
                return None
        batch = batches[0]
        header = batch.header
        length = min(end, batch.next_offset) - at
        return Stretch(at, batch, at - batch.base_offset, length, header.append_time_ms, header, False)

    async def _copied(self, at: int, end: int) -> Stretch:
        partition = self._partition
        copies = partition.state.channels.copies
        first = copies.get(at)
        while first is not None:
            length = 1
            while at + length < end and copies.get(at + length) == first._replace(row=first.row + length):
                length += 1
            try:
                held = await self._entry(first.entry)
            except DamagedRange as damage:
                raise DamagedRange(
                    first_index=damage.first_index,
                    last_index=damage.last_index,
                    first_offset=at,
                    next_offset=at + length,
                    file=damage.file,
                    position=damage.position,
                    term=damage.term,
                ) from None
            except EntriesTrimmed:
                held = None
            # The entry may be another one than the table named before it was read.
            offsets = [] if held is None else held.offsets[first.row : first.row + length]
            same = next((row for row, each in enumerate(offsets) if each != at + row), len(offsets))
            if held is not None and same:
                return Stretch(at, held.batch, first.row, same, first.time_ms, held.header, True)
            # The record has ended meanwhile, or was copied again; or an election has undone the entry.
            copies = partition.state.channels.copies
            before, first = first, copies.get(at)
            if first == before:
                break
        raise expired(partition.context, at)

    async def _entry(self, index: int) -> _Copies | None:
        """Return an entry with copies; None if the index has another entry now."""
        log, known = self._partition.log, self._copies
        if known is not None and (known.header.index, known.header.term) == (index, log.term(index)):
            return known
        frames = await log.read_promptly(index, index, max_bytes=1)
        if not frames or kind_of(frames[0]) != Kind.CHANNEL:
            return None
        change = channel_changes(frames[0])[0]
        if not isinstance(change, Copied):
            return None
        # The checksum of the entry is that of the batch in it, too.
        self._copies = _Copies(
            Header.unpack(frames[0]), copied_offsets(change), Batch(change.frame, verified=True)
        )
        return self._copies
