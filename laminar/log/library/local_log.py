"""One log in a user's own program: records by offset, durable when an append returns.

What "durable" means is set by the log's flush policy: synced, or written. A `LocalLog` gives each append its
index, offset and time, as a partition's leader would, and shows readers only what is durable. It knows
nothing of folders (`folder`), nor of files (`log`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laminar.batch import Batch, BatchError, Codec, Record, build, stamp
from laminar.log.disk.disk import Buffer
from laminar.log.disk.errors import AppendRefused, OffsetOutOfRange, RecordsLost, StorageClosed, StorageError
from laminar.log.format.flush_policy import FlushPolicy
from laminar.log.format.settings import MIB
from laminar.log.library.disk_space import FreeSpace
from laminar.log.partition_log.log import Log
from laminar.log.storage import Storage

if TYPE_CHECKING:
    import pyarrow

# There are no elections without replicas, so all entries are of the first term.
_TERM = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendReceipt:
    """The offsets of an append's records: from `offset` up to, not including, `next_offset`.

    `count` is their number, `append_time_ms` the time of the append in ms since the epoch.
    """

    offset: int
    count: int
    append_time_ms: int

    @property
    def next_offset(self) -> int:
        """Offset after the last record."""
        return self.offset + self.count


class LocalLog:
    """One log of a folder. Made by `LogFolder.log`; the loop's thread only, any task."""

    def __init__(self, log: Log, storage: Storage, room: FreeSpace, *, max_batch_bytes: int) -> None:
        self._log = log
        self._storage = storage
        self._room = room
        self._max_batch_bytes = max_batch_bytes
        self._ended: str | None = None
        self._followers: list[asyncio.Future[None]] = []

    def __repr__(self) -> str:
        return f"<LocalLog {self.name} offsets {self.start_offset}..{self.end_offset}>"

    @property
    def name(self) -> str:
        """The log's name."""
        return self._log.name

    @property
    def start_offset(self) -> int:
        """Offset of the first record that is kept."""
        return self._log.start.offset

    @property
    def end_offset(self) -> int:
        """Offset after the last durable record: that of the next record, if no append is in progress."""
        log = self._log
        if log.durable_index <= log.start.index:
            return log.start.offset
        return log.index_entry(log.durable_index).next_offset

    @property
    def flush(self) -> FlushPolicy:
        """The flush policy, which says when an append is acknowledged; `LogFolder.log` sets it."""
        return self._log.policy

    @property
    def unsynced_records(self) -> int:
        """Number of records that a power loss may take: none under `COMMIT`."""
        return self._log.unsynced_records if self._log.policy.is_interval else 0

    @property
    def size_bytes(self) -> int:
        """Size of the log's segments in bytes."""
        return self._log.size_bytes

    @property
    def records_lost(self) -> bool:
        """Whether acknowledged records may be missing because of damage, found when the folder was opened.

        If so, reads work, and appends raise `RecordsLost` until `accept_loss` is called.
        """
        return self._log.recovering

    async def accept_loss(self) -> None:
        """Allow appends again although records were lost; durable on return.

        Appends continue after the last record that is left, so the offsets of lost records at the end are
        used again for new records. Nothing happens if no records were lost.
        """
        self._check_open()
        if self._log.recovering:
            self._log.set_recovering(recovering=False, incarnation=self._log.incarnation + 1)
            await self._storage.sync_log(self._log)

    # Appending

    async def append(
        self,
        values: Sequence[Buffer],
        *,
        keys: Sequence[Buffer | None] | None = None,
        tags: Sequence[str | None] | None = None,
        timestamps: Sequence[int | None] | None = None,
        headers: Sequence[Mapping[str, bytes] | None] | None = None,
        codec: Codec = Codec.NONE,
    ) -> AppendReceipt:
        """Append records as one batch, all or nothing; on return they are as durable as `flush` says.

        The other sequences must be as long as `values`, with None for a record that has no key, tag, time or
        headers; times are in ms since the epoch. `codec` compresses the columns for which that saves bytes.
        Calls that wait at the same time share a sync, and get their offsets in the order in which they were
        made. If the call is cancelled, the records may be appended or not.

        Raises:
            TypeError: `values`, `keys` or `tags` is one byte string or text, not a sequence of them.
            BatchError: There are no records, or a cell or a size is not allowed.
            AppendRefused: There is no room.
            RecordsLost: The log lost records, and the loss is not accepted.
            StorageClosed: The folder is closed or the log deleted; or the journal failed: then it is
                unknown whether the records are appended, until the folder is opened again.
            StorageError: The log has failed, and takes no appends until the folder is opened again.
        """
        for name, cells in (("values", values), ("keys", keys), ("tags", tags)):
            if isinstance(cells, bytes | bytearray | memoryview | str):
                raise TypeError(f"{name}: a sequence with one for each record, not {type(cells).__name__}")
        if not values:
            raise BatchError("malformed", "append: no records", field="values", value=0, limit="at least 1")
        # Checked before anything is built or changed: a refused append changes nothing.
        size = sum(map(len, values)) + sum(len(key) for key in keys or () if key is not None)
        self._check_size(size)
        await self._wait_for_room(size)
        frame = build(values, keys=keys, tags=tags, timestamps=timestamps, headers=headers, codec=codec)
        self._check_size(len(frame))
        log = self._log
        receipt = AppendReceipt(
            offset=log.next_offset,
            count=len(values),
            append_time_ms=max(time.time_ns() // 1_000_000, log.last_append_time_ms),
        )
        stamp(
            frame,
            index=log.last_index + 1,
            term=_TERM,
            prev_term=log.last_term,
            base_offset=receipt.offset,
            append_time_ms=receipt.append_time_ms,
            committed_index=log.durable_index,
            # The first entry after a trim of all entries opens a segment: else recovery could not tell where
            # it begins in the file.
            opens_segment=log.segment_full or log.last_index == log.start.index,
        )
        log.append([frame])
        durable = self._storage.sync_log(log)
        durable.add_done_callback(self._wake)
        # Shielded: the cancellation of an append must not cancel `durable`, which also wakes followers.
        await asyncio.shield(durable)
        return receipt

    def _check_size(self, size: int) -> None:
        if size > self._max_batch_bytes:
            raise BatchError(
                "too_large",
                f"append: {size} bytes, at most {self._max_batch_bytes} in one batch",
                field="values",
                value=size,
                limit=self._max_batch_bytes,
            )

    async def _wait_for_room(self, size_bytes: int) -> None:
        """Check that there is room for an append of `size_bytes`; if not, raise as `append` does.

        The caller must begin the append without awaiting in between. If the journal is too long, a checkpoint
        is awaited first.
        """
        self._check_open()
        if self._storage.refusal == "journal":
            # A checkpoint releases journal files: waiting for one slows appends down to what the disk can do.
            try:
                await self._storage.checkpoint()
            except StorageError:
                pass  # `refusal` says why
            self._check_open()
        resource = self._storage.refusal
        if resource is not None:
            raise AppendRefused(resource)
        if not self._room.reserve(size_bytes):
            raise AppendRefused("disk")
        if self._log.failure is not None:
            raise self._log.failure
        if self._log.recovering:
            raise RecordsLost(
                f"log {self.name!r} lost acknowledged records: it ends at offset {self.end_offset}; "
                "`accept_loss` lets appends continue from there"
            )

    # Reading

    async def batches(
        self, start: int | None = None, stop: int | None = None, *, follow: bool = False, max_bytes: int = MIB
    ) -> AsyncIterator[Batch]:
        """Yield whole, verified batches with the records from offset `start` up to, not including, `stop`.

        Without `start` they begin at the first offset. The first batch may begin before `start`, and the last
        may reach beyond `stop`: `Batch.records(start, stop)` returns only the records between. Without
        `follow` the batches end at the present `end_offset`; with it, they end at `stop`, or never. About
        `max_bytes` are read at a time.

        Raises:
            OffsetOutOfRange: There is no such offset, or the next one was trimmed meanwhile.
            DamagedRange: A batch is damaged; reading may continue at the error's `next_offset`.
            StorageClosed: The folder was closed, or the log deleted.
        """
        self._check_open()
        offset = self.start_offset if start is None else start
        if not self.start_offset <= offset <= self.end_offset:
            raise self._out_of_range(offset)
        last = self.end_offset if not follow else None
        if stop is not None:
            last = stop if last is None else min(stop, last)
        while last is None or offset < last:
            if offset >= self.end_offset:
                if not follow:
                    return
                await self._more()
                continue
            if offset < self.start_offset:
                raise self._out_of_range(offset)
            index = await self._log.find_offset(offset)
            if index is None:
                continue  # trimmed meanwhile
            for frame in await self._log.read(index, self._log.durable_index, max_bytes=max_bytes):
                batch = Batch(frame, verified=True)
                if last is not None and batch.base_offset >= last:
                    return
                offset = batch.next_offset
                yield batch
                self._check_open()

    async def read(
        self, start: int | None = None, stop: int | None = None, *, follow: bool = False
    ) -> AsyncIterator[Record]:
        """Yield records from offset `start` (default: first) up to, not including, `stop`.

        Raises as `batches` does.
        """
        async for batch in self.batches(start, stop, follow=follow):
            for record in batch.records(start, stop):
                yield record

    async def record(self, offset: int) -> Record:
        """Return the record at `offset`. Raises as `batches` does."""
        self._check_open()
        if not self.start_offset <= offset < self.end_offset:
            raise self._out_of_range(offset)
        index = await self._log.find_offset(offset)
        if index is None:
            raise self._out_of_range(offset)
        (frame, *_) = await self._log.read(index, index, max_bytes=1)
        return next(Batch(frame, verified=True).records(offset, offset + 1))

    async def value(self, offset: int) -> Buffer:
        """Return the value of the record at `offset`: cheaper than `record` if it is in memory.

        Raises as `batches` does.
        """
        self._check_open()
        if self.start_offset <= offset < self.end_offset:
            found = self._log.value_nowait(offset)
            if found is not None:
                return found
        return (await self.record(offset)).value

    async def to_arrow(self, start: int | None = None, stop: int | None = None) -> pyarrow.Table:
        """Return the records from `start` up to, not including, `stop` as an Arrow table.

        By default all of them. Needs the extra `arrow`. Raises as `batches` does.
        """
        from laminar.batch.arrow.pyarrow_out import table  # pyarrow is an extra

        first = self.start_offset if start is None else start
        batches = [batch async for batch in self.batches(start, stop)]
        if not batches:
            return table([])
        skipped = max(0, first - batches[0].base_offset)
        cut = 0 if stop is None else max(0, batches[-1].next_offset - stop)
        whole = table(batches)
        return whole.slice(skipped, whole.num_rows - skipped - cut)

    def offset_at(self, time_ms: int) -> int:
        """Return the first offset of the first batch appended at `time_ms` or later.

        That is `end_offset` if there is none. The time is in ms since the epoch. May wait for the disk, for
        a few small reads.
        """
        self._check_open()
        index = self._log.index_of_time(time_ms)
        if index > self._log.durable_index:
            return self.end_offset
        return self._log.index_entry(index).base_offset

    # Trimming

    async def trim_before(self, offset: int) -> int:
        """Trim the records before `offset`, in whole batches; return the new `start_offset`.

        That is `offset`, or the start of the batch that holds it; nothing changes if `offset` is not above
        the present start. Durable on return. Disk space is released in whole segments. Offsets are never
        reused, even if all records are trimmed.

        Raises:
            OffsetOutOfRange: The offset is beyond the end.
        """
        self._check_open()
        if offset > self.end_offset:
            raise self._out_of_range(offset)
        log = self._log
        if offset > log.start.offset:
            index = log.durable_index if offset == self.end_offset else self._entry_before(offset)
            if index > log.start.index:
                row = log.index_entry(index)
                log.set_start(index=index, term=row.term, offset=row.next_offset)
                await self._storage.sync_log(log)
        return log.start.offset

    def _entry_before(self, offset: int) -> int:
        index = self._log.index_of_offset(offset)
        assert index is not None, f"no entry with offset {offset} in {self._log!r}"
        return index - 1

    # The end

    def _out_of_range(self, offset: int) -> OffsetOutOfRange:
        return OffsetOutOfRange(self.name, offset, start_offset=self.start_offset, end_offset=self.end_offset)

    def _check_open(self) -> None:
        if self._ended is not None:
            raise StorageClosed(self._ended)

    async def _more(self) -> None:
        """Wait until there are more durable records; raise `StorageClosed` if the log is closed."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._followers.append(future)
        await future
        self._check_open()

    def _wake(self, durable: asyncio.Future[None]) -> None:
        durable.exception()  # read, as the append that would raise it may have been cancelled
        followers, self._followers = self._followers, []
        for future in followers:
            if not future.done():
                future.set_result(None)

    def end(self, why: str) -> None:
        """End the use of this log: further calls, and readers that wait, raise `StorageClosed` with `why`."""
        self._ended = why
        followers, self._followers = self._followers, []
        for future in followers:
            if not future.done():
                future.set_result(None)
