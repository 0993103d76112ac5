"""The records that one request is given: which they are, and the batches that hold them.

A record that left the log while it was open is read from its copy (`laminar.node.channels.carrier`), and is
given with its own offset, time, key and headers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from laminar.batch import Batch, Buffer, Header, Kind, build, kind_of, stamp
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange, EntriesTrimmed
from laminar.node.partition.partition import Partition
from laminar.node.partition.reads import expired
from laminar.node.partition.state.channels import Copied, channel_changes, copied_offsets

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


def split(runs: Sequence[Run], offset: int) -> tuple[list[Run], list[Run]]:
    """Return what of ascending runs is before an offset, and the rest."""
    before = [run._replace(length=min(run.length, offset - run.first)) for run in runs if run.first < offset]
    rest = [
        run._replace(first=max(run.first, offset), length=run.end - max(run.first, offset))
        for run in runs
        if run.end > offset
    ]
    return before, rest


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
        DamagedRange: when the first is damaged; it names offsets of records.
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
    """Records that follow each other, and have the same append time: `length` rows of a batch.

    `first` is the offset of the first of them, `row` its row. `is_copy`: the batch is one of copies.
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
    """An entry of copies: its header, the offsets of its records, and their batch."""

    header: Header
    offsets: list[int]
    batch: Batch


class Source:
    """Reads records of one partition by their offsets, each one higher than the one before."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        # What was read of the log from one offset on and not used yet, and the last entry of copies.
        self._batches: list[Batch] = []
        self._copies: _Copies | None = None

    async def read(self, at: int, end: int) -> Stretch | None:
        """Return the records from offset `at` on that one batch holds, before `end`; None: it is not there.

        Raises:
            Problem: 410 `offset_expired` when it is no more in the log, and has no copy.
            DamagedRange: when it is damaged; it names offsets of records.
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
            # It has ended meanwhile, or was copied again: or an election has taken the entry back.
            copies = partition.state.channels.copies
            before, first = first, copies.get(at)
            if first == before:
                break
        raise expired(partition.context, at)

    async def _entry(self, index: int) -> _Copies | None:
        """Return an entry of copies; None if another one has taken its place."""
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
