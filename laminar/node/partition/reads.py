"""The read side of one replica: committed batches of its log, and readers that wait for the next ones.

This module decides what readers see and what is skipped (entries that hold no records); it knows no requests.
If an entry cannot be read, the entries before it are returned; a read that begins at it raises.
A commit wakes at most `WOKEN_AT_ONCE` waiting readers in one turn of the loop, first come, first served,
because each of them then reads and encodes the new records.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from typing import NamedTuple

from laminar.batch import (
    Buffer,
    Header,
    Kind,
    SplitFrame,
    as_due,
    as_large,
    as_published,
    header_of,
    kind_of,
    tag_bit,
    whole,
)
from laminar.batch.header import fields
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange, EntriesTrimmed
from laminar.node.partition.context import PartitionContext
from laminar.node.partition.problems import not_leader
from laminar.node.partition.state.staging_entries import publish_record

_OFFSETS = fields("base_offset", "count")

# A request for a tag examines at most this many index entries; the client's next one continues after them.
TAGGED_ROWS = 16_384
# A `channel` entry of this size holds copies of records, as a rule: there may be more of them.
COPIES_BYTES = 64 * 1024
# Readers that a commit wakes in one turn of the loop.
WOKEN_AT_ONCE = 64


class Bounds(NamedTuple):
    """The range that readers of one replica may see at one moment: its offsets, and the commit index."""

    start: int
    end: int
    committed_index: int


def expired(context: PartitionContext, offset: int) -> Problem:
    """Return the `offset_expired` problem (410) of a read at an offset before the start of the log."""
    return Problem(
        "offset_expired",
        f"the earliest offset is {context.start_offset}",
        field="offset",
        value=offset,
        limit=context.start_offset,
    )


async def frames(
    context: PartitionContext,
    offset: int,
    *,
    max_bytes: int,
    before: int | None = None,
    most_frames: int | None = None,
) -> list[Buffer]:
    """Return committed data batches, beginning with the one that contains `offset`.

    At least one batch is returned if there is one, more until they reach `max_bytes` or `most_frames`
    batches. Reading stops after the entry that contains offset `before`, for requests with a limit of
    records. With `most_frames` other tasks of the loop run after each that number of entries. Records
    published from stages are copied, because they get a new header; `split_frames` does not copy them.

    Raises:
        Problem: 410 `offset_expired`, also if the start moves past `offset` while its batch is read.
        DamagedRange: if the first batch is damaged.
    """
    found = await split_frames(context, offset, max_bytes=max_bytes, before=before, most_frames=most_frames)
    return list(map(whole, found))


async def split_frames(
    context: PartitionContext,
    offset: int,
    *,
    max_bytes: int,
    before: int | None = None,
    most_frames: int | None = None,
) -> list[Buffer | SplitFrame]:
    """Return the same batches as `frames`, without copies of records that were published from stages.

    Such a batch is returned as a `SplitFrame`: its new header and a view of the staged body.
    """
    if offset < context.log.start.offset:
        raise expired(context, offset)
    last = context.state.committed_index
    index = await context.log.find_offset(offset)
    # The entry found may be one without records, right before the one that holds the offset. Then the last
    # record read is that before the offset, which is enough.
    end = await context.log.find_offset(max(offset, before)) if before is not None else None
    if end is not None:
        last = min(last, end)
    found: list[Buffer | SplitFrame] = []
    size = 0
    staged = False
    most = sys.maxsize if most_frames is None else most_frames
    while index is not None and index <= last and (not found or (size < max_bytes and len(found) < most)):
        wanted = max(1, max_bytes - size)
        stop = last
        try:
            if most_frames is not None:
                await asyncio.sleep(0)
            if staged:
                # Gigabytes of staged entries may lie between two records: skip them by their index entries.
                index, after = await context.log.find_shown(index, last)
                if index > last:
                    break
                stop = after - 1
            stop = min(stop, index + most - len(found) - 1)
            read = await context.log.read_promptly(index, stop, max_bytes=wanted)
        except EntriesTrimmed:
            if found:
                break
            raise expired(context, offset) from None
        except DamagedRange:
            if found:
                break  # A read that begins at the damage raises.
            raise
        for frame in read:
            kind = kind_of(frame)
            if kind == Kind.PUBLISH:
                if found and (size >= max_bytes or len(found) >= most):
                    return found
                try:
                    published, whole = await _published(
                        context, frame, offset, max_bytes=max_bytes - size, most_frames=most - len(found)
                    )
                except DamagedRange:
                    if found:
                        return found
                    raise
                except EntriesTrimmed:
                    if found:
                        return found
                    raise expired(context, offset) from None
                found += published
                if not whole:
                    return found
                size += sum(map(len, published))
                continue
            if kind in (Kind.STAGED, Kind.DELAYED) or (kind == Kind.CHANNEL and len(frame) >= COPIES_BYTES):
                staged = True
                continue
            size += len(frame)
            if kind == Kind.DATA:
                found.append(frame)
        index += len(read)
    return found


async def tagged_frames(
    context: PartitionContext, offset: int, *, tag: str, max_bytes: int
) -> tuple[list[Buffer | SplitFrame], int]:
    """Return committed batches that may contain records with a tag, and the offset to continue at.

    Batches that surely lack the tag are not read. The offset is that after the last entry examined, which
    may be far after the last returned batch; with damage it may be before the end of the returned batches.

    Raises:
        Problem: 410 `offset_expired`, as `frames`.
        DamagedRange: if the first batch is damaged.
    """
    if offset < context.start_offset:
        raise expired(context, offset)
    bit = tag_bit(tag)
    index = await context.log.find_offset(offset)
    last = min(context.committed_index, (index or 0) + TAGGED_ROWS - 1)
    found: list[Buffer | SplitFrame] = []
    size = 0
    try:
        while index is not None and index <= last and (not found or size < max_bytes):
            first, after = await context.log.find_tagged(index, last, bit)
            index = first
            while index < after and (not found or size < max_bytes):
                try:
                    wanted = max(1, max_bytes - size)
                    read = await context.log.read_promptly(index, after - 1, max_bytes=wanted)
                except DamagedRange as damage:
                    if damage.next_offset > damage.first_offset:
                        raise
                    index = damage.last_index + 1  # The damaged entries contain no records.
                    continue
                for frame in read:
                    kind = kind_of(frame)
                    if kind == Kind.DATA:
                        found.append(frame)
                        size += len(frame)
                    elif kind == Kind.PUBLISH:
                        if found and size >= max_bytes:
                            return found, Header.unpack(header_of(found[-1])).next_offset
                        published, whole = await _published(
                            context, frame, offset, max_bytes=max_bytes - size
                        )
                        found += published
                        if not whole:
                            return found, Header.unpack(header_of(found[-1])).next_offset
                        size += sum(map(len, published))
                    index += 1
        if index is not None and index > context.log.first_index:
            offset = max(offset, (await context.log.find_index_entry(index - 1)).next_offset)
    except EntriesTrimmed:
        if not found:
            raise expired(context, offset) from None
    except DamagedRange:
        if not found:
            raise  # Otherwise the next read, which begins at the damage, raises.
    return found, offset


async def _published(
    context: PartitionContext,
    publish: Buffer,
    offset: int,
    *,
    max_bytes: int,
    most_frames: int = sys.maxsize,
) -> tuple[list[Buffer | SplitFrame], bool]:
    """Return the batches that a `publish` entry gives offsets, from `offset` on, and whether that is all.

    At least one batch is returned if there is one, more until they reach `most_frames` or `max_bytes`. A
    large record is returned as its stub; delayed records are one batch.

    Raises:
        EntriesTrimmed: if a staged entry was trimmed.
        DamagedRange: if the first batch is damaged; the error has its offsets.
    """
    header = Header.unpack(publish)
    log = context.log
    found: list[Buffer | SplitFrame] = []
    size = 0
    base_offset = header.base_offset
    record = publish_record(publish)
    if record.large is not None:
        return [as_large(record.large.stub, publish=header)], True
    if record.due is not None:
        return [as_due(record.due.frame, publish=header)], True
    for index, records in record.stages:
        if base_offset + records > offset:
            if found and (size >= max_bytes or len(found) >= most_frames):
                return found, False
            try:
                staged = await log.read_promptly(index, index, max_bytes=1)
            except DamagedRange as damage:
                if found:
                    return found, False
                raise DamagedRange(
                    first_index=damage.first_index,
                    last_index=damage.last_index,
                    first_offset=base_offset,
                    next_offset=base_offset + records,
                    file=damage.file,
                    position=damage.position,
                    term=damage.term,
                ) from None
            found.append(as_published(staged[0], publish=header, base_offset=base_offset))
            size += len(found[-1])
        base_offset += records
    return found, True


class ReadView:
    """The reads of one replica's committed records, their counters, and the readers that wait."""

    def __init__(self, context: PartitionContext) -> None:
        self.fetched_bytes = 0
        self.fetched_records = 0
        self.fetches = 0
        self._context = context
        self._loop = asyncio.get_running_loop()
        self.waiting: dict[asyncio.Future[None], None] = {}
        # Readers that a commit is waking, in the order in which they came.
        self._woken: deque[asyncio.Future[None]] = deque()
        self._draining = False

    def bounds(self) -> Bounds:
        """Return the offsets and the commit index that readers may see now."""
        log, index = self._context.log, self._context.state.committed_index
        return Bounds(log.start.offset, log.offset_after(index), index)

    async def confirmed_end(self) -> int:
        """Return the end offset, confirmed by a majority after this call (linearizable). Leader only.

        Raises:
            Problem: 503 `not_leader` if no majority confirms that this replica leads.
        """
        return (await self.confirmed_bounds()).end

    async def confirmed_bounds(self) -> Bounds:
        """Return the bounds, confirmed by a majority after this call (linearizable). Leader only.

        Raises:
            Problem: 503 `not_leader` if no majority confirms that this replica leads.
        """
        context = self._context
        try:
            index = await context.driver.confirm(context.replica)
        except ConnectionError as error:
            raise not_leader(context.name, outcome="not_applied") from error
        # The core knows the index; the state machine hears of it in the same turn.
        assert index <= context.committed_index, f"confirmed {index} but committed {context.committed_index}"
        return self.bounds()

    async def at_time(self, bounds: Bounds, time_ms: int) -> tuple[int, int | None]:
        """Return the offset and append time of the first committed batch appended at `time_ms` or later.

        Return the end offset and None if there is no such batch.
        """
        log = self._context.log
        index = await log.find_time(time_ms)
        while index <= bounds.committed_index:
            try:
                row = await log.find_index_entry(index)
                if row.kind in (Kind.DATA, Kind.PUBLISH) and row.count:
                    return row.base_offset, row.append_time_ms
                index += 1
                continue
            except EntriesTrimmed:
                pass
            # The entry found was trimmed meanwhile: search for the time again in what is left.
            bounds = self.bounds()
            index = await log.find_time(time_ms)
        return bounds.end, None

    async def frames(self, offset: int, *, max_bytes: int, before: int | None = None) -> list[Buffer]:
        """Return committed batches from the one with `offset` on (see the function `frames`).

        The read is added to this view's counters.
        """
        return list(map(whole, await self.split_frames(offset, max_bytes=max_bytes, before=before)))

    async def split_frames(
        self, offset: int, *, max_bytes: int, before: int | None = None
    ) -> list[Buffer | SplitFrame]:
        """Return the same batches as `frames`, without copies of records published from stages.

        The read is added to this view's counters.
        """
        found = await split_frames(self._context, offset, max_bytes=max_bytes, before=before)
        self._count(found)
        return found

    async def tagged_frames(
        self, offset: int, *, tag: str, max_bytes: int
    ) -> tuple[list[Buffer | SplitFrame], int]:
        """Return batches that may contain records with a tag, and the offset to continue at.

        The read is added to this view's counters. See the function `tagged_frames`.
        """
        found, searched = await tagged_frames(self._context, offset, tag=tag, max_bytes=max_bytes)
        self._count(found)
        return found, searched

    def _count(self, found: list[Buffer | SplitFrame]) -> None:
        """Add the batches that one fetch returned to the counters; they are in the order of offsets."""
        self.fetches += 1
        if found:
            self.fetched_bytes += sum(map(len, found))
            last_offset, last_count = _OFFSETS.unpack_from(header_of(found[-1]))
            first_offset = _OFFSETS.unpack_from(header_of(found[0]))[0]
            self.fetched_records += last_offset + last_count - first_offset

    async def wait_past(self, offset: int, wait_s: float) -> bool:
        """Wait until a record at `offset` is committed here, and return True; return False after `wait_s`.

        Return False at once if `stop_waiting` is called, or if the partition has a final seal and so will
        never have a record at `offset`.
        """
        deadline = self._loop.time() + wait_s
        while self._context.end_offset <= offset:
            remaining = deadline - self._loop.time()
            if remaining <= 0 or self._draining or self._context.final_seal is not None:
                return False
            future: asyncio.Future[None] = self._loop.create_future()
            self.waiting[future] = None
            handle = self._loop.call_later(remaining, _wake, future)
            try:
                await future
            finally:
                handle.cancel()
                self.waiting.pop(future, None)
        return True

    def committed(self) -> None:
        """Wake the waiting readers: an entry was committed, or the seal is final.

        Some of them are woken in later turns of the loop.
        """
        if self.waiting:
            idle = not self._woken
            self._woken.extend(self.waiting)
            self.waiting.clear()
            if idle:
                self._wake_some()

    def _wake_some(self) -> None:
        for _ in range(min(len(self._woken), WOKEN_AT_ONCE)):
            _wake(self._woken.popleft())
        if self._woken:
            self._loop.call_soon(self._wake_some)

    def stop_waiting(self) -> None:
        """Wake all waiting readers and end later waits at once: this replica gets no further records."""
        self._draining = True
        waiting, self.waiting = self.waiting, {}
        for reader in waiting:
            _wake(reader)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
