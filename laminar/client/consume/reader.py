"""The reader of a topic on an event loop: from a given start or a cursor, to the end or for ever.

The records of one partition arrive in order; partitions are interleaved as their answers arrive
(`laminar.client.consume.fetchers`). A reader that does not follow ends where the topic ended when the reader
began. A position is the offset after the last record that was handed out, so a commit covers exactly the
records that the loop's body has seen.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from laminar.client.consume.cursors import CursorState
from laminar.client.consume.fetchers import FETCH_BYTES, READ_AHEAD_BYTES, Fetchers, OnDamage, OnExpired
from laminar.client.errors import ConfigError
from laminar.client.net.session import Session
from laminar.client.records import ReadBatch, Record
from laminar.http.protocol.answer import Answer

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

T = TypeVar("T")

Start = str | datetime.datetime | Mapping[int, int]

_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def start_parameter(start: str | datetime.datetime, *, now_ms: int) -> str:
    """Return the server's parameter for `start`: earliest, latest or a time in epoch milliseconds.

    ``"-90s"``, ``"-10m"``, ``"-1h"``, ``"-2d"`` count back from `now_ms`; a naive datetime is local time.
    """
    if isinstance(start, datetime.datetime):
        return str(int(start.timestamp() * 1000))
    if start in ("earliest", "latest"):
        return start
    number = start[1:].rstrip("msdhw")
    unit = start[1 + len(number) :]
    if start.startswith("-") and number.isdecimal() and unit in _UNITS_MS:
        return str(now_ms - int(number) * _UNITS_MS[unit])
    try:
        return str(int(datetime.datetime.fromisoformat(start).timestamp() * 1000))
    except ValueError:
        raise ConfigError(
            f"start={start!r} is no place to start",
            code="bad_start",
            field="start",
            value=start,
            hint="earliest, latest, -10m, an RFC 3339 time, a datetime or {partition: offset}",
        ) from None


class Reader(Generic[T]):
    """Records of a topic: ``async for record in reader``, or ``batches()``, or ``to_arrow()``.

    After a ``break``, the next loop continues with the next record. As a context manager, it commits the
    cursor, if there is one, when its block ends without an exception.
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        *,
        start: Start,
        follow: bool,
        cursor: str | None,
        partitions: Iterable[int] | None,
        from_leader: bool,
        decode: Callable[[bytes], T],
        timeout_s: float | None,
        on_expired: OnExpired = "error",
        on_damage: OnDamage = "error",
        fetch_bytes: int = FETCH_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        self._session = session
        self._topic = topic
        self._start = start
        self._follow = follow
        self._cursor = CursorState(session, topic, cursor) if cursor is not None else None
        self._wanted = None if partitions is None else sorted(set(partitions))
        self._timeout_s = timeout_s
        self._fetchers: Fetchers[T] = Fetchers(
            session,
            topic,
            decode=decode,
            follow=follow,
            cursor=cursor,
            on_expired=on_expired,
            on_damage=on_damage,
            from_leader=from_leader,
            timeout_s=timeout_s,
            fetch_bytes=fetch_bytes,
            read_ahead_bytes=read_ahead_bytes,
            skipped=self._skipped,
        )
        self._begun = False
        self._paused = False
        self._unfinished: ReadBatch[T] | None = None
        self.positions: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        # (partition, first offset, offset after the last) of each range left out: trimmed, or unreadable.
        self.skipped: list[tuple[int, int, int]] = []

    async def __aenter__(self) -> Reader[T]:
        await self._begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and self._cursor is not None:
                await self.commit()
        finally:
            await self.close()

    def __aiter__(self) -> AsyncIterator[Record[T]]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[Record[T]]:
        positions = self.positions
        async for batch in self._take_batches():
            partition = batch.partition
            # If the loop breaks off in this batch, `_take` returns the rest of it next.
            self._unfinished = batch
            for record in batch.records():
                positions[partition] = record.offset + 1
                yield record
                if self._unfinished is not batch:
                    break  # another loop continued with it
            else:
                self._unfinished = None

    async def batches(self) -> AsyncIterator[ReadBatch[T]]:
        """Yield whole batches, without making an object for each record."""
        async for batch in self._take_batches():
            self.positions[batch.partition] = batch.next_offset
            yield batch

    async def next_batch(self) -> ReadBatch[T] | None:
        """Return the next batch, None at the end. Positions advance: its records count as handed out."""
        batch = await self._take()
        if batch is not None:
            self.positions[batch.partition] = batch.next_offset
        return batch

    async def take_ready(self) -> list[ReadBatch[T]]:
        """Wait for a batch; return it and all others that were read ahead, [] at the end.

        Positions do not advance: the caller advances them for the records that it hands out.
        """
        first = await self._take()
        if first is None:
            return []
        taken = [first]
        while self._fetchers.ready:
            batch = await self._take()
            assert batch is not None, "a batch that was ready is gone"
            taken.append(batch)
        return taken

    async def commit(self) -> None:
        """Commit the cursor at the present positions: after the records handed out so far."""
        if self._cursor is None:
            raise ConfigError("commit without a cursor", code="no_cursor", hint="read(cursor=NAME)")
        await self._cursor.commit(self.positions)

    async def commit_at(self, positions: Mapping[int, int]) -> None:
        """Commit the cursor at `positions`: for each partition, the next offset to read."""
        if self._cursor is None:
            raise ConfigError("commit without a cursor", code="no_cursor", hint="read(cursor=NAME)")
        await self._cursor.commit(positions)

    async def to_arrow(self) -> pyarrow.Table:
        """Read to the end; return one table with offset, timestamp, key, value, tag and partition."""
        from laminar.client.consume.dataframes import arrow_table

        if self._follow:
            raise ConfigError("to_arrow of a reader that follows has no end", code="endless", field="follow")
        return arrow_table([batch async for batch in self.batches()])

    async def to_polars(self) -> polars.DataFrame:
        """Read to the end; return a polars frame with the columns of `to_arrow`."""
        from laminar.client.consume.dataframes import polars_frame

        return polars_frame(await self.to_arrow())

    async def to_pandas(self) -> pandas.DataFrame:
        """Read to the end; return a pandas frame with the columns of `to_arrow`."""
        from laminar.client.consume.dataframes import pandas_frame

        return pandas_frame(await self.to_arrow())

    async def pause(self) -> None:
        """Stop fetching and discard what was read ahead.

        The next request for a batch starts fetching again, after the records handed out.
        """
        for partition in self.positions:
            self._fetchers.drop(partition)
        self._unfinished = None
        self._paused = self._begun

    async def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._unfinished = None
        self._paused = False
        await self._fetchers.close()

    # -- the queue -----------------------------------------------------------------------------

    async def _take_batches(self) -> AsyncIterator[ReadBatch[T]]:
        try:
            while (batch := await self._take()) is not None:
                yield batch
        finally:
            # Fetching that still goes on is left alone. Python may close this generator long after its loop
            # broke off, when the next loop is reading already.
            if self._fetchers.over:
                await self._fetchers.close()

    async def _take(self) -> ReadBatch[T] | None:
        if not self._begun:
            await self._begin()
        if self._paused:
            self._paused = False
            for partition, position in self.positions.items():
                end = self.ends.get(partition)
                if end is None or position < end:
                    self._fetchers.add(partition, position, end)
        batch, self._unfinished = self._unfinished, None
        if batch is not None and self.positions[batch.partition] < batch.next_offset:
            return batch.rest(self.positions[batch.partition])
        return await self._fetchers.take()

    async def _begin(self) -> None:
        """Find where each partition starts and ends, and start fetching them; do nothing if that was done."""
        if self._begun:
            return
        self._begun = True
        try:
            await self._start_fetchers()
        except BaseException:
            self._begun = False  # else the next read would end at once, as if there were no records
            raise

    async def _start_fetchers(self) -> None:
        places = await self._session.topic_map(self._topic, timeout_s=self._timeout_s)
        partitions = list(places.numbers) if self._wanted is None else self._wanted
        named = [*partitions, *self._start] if isinstance(self._start, Mapping) else partitions
        beyond = [each for each in named if each not in places.places]
        if beyond:
            raise ConfigError(
                f"{self._topic} has {len(places.places)} partitions, not {beyond[0]}",
                code="no_partition",
                field="partitions",
                value=beyond[0],
                limit=places.numbers[-1],
            )
        starts = await self._starts(partitions)
        found = await asyncio.gather(*(self._first_fetch(each, starts[each]) for each in partitions))
        for partition, (start, end, answer) in zip(partitions, found, strict=True):
            self.positions[partition] = start
            if end is not None:
                self.ends[partition] = end
            if end is None or start < end:
                self._fetchers.add(partition, start, end, answer=answer)

    async def _first_fetch(self, partition: int, start: int | str) -> tuple[int, int | None, Answer | None]:
        """Return first offset, end offset (None: for ever) and, if a fetch brought records, its answer."""
        if not self._follow:
            return await self._fetchers.first_fetch(partition, start)
        if isinstance(start, int):
            return start, None, None
        offset, _, answer = await self._fetchers.first_fetch(partition, start)
        return offset, None, answer

    async def _starts(self, partitions: list[int]) -> dict[int, int | str]:
        """Return where each partition begins: an offset, or the text that `start_parameter` returns.

        A position of the cursor comes before an offset in `start`.
        """
        found: dict[int, int | str] = {}
        if self._cursor is not None:
            found |= {key: value for key, value in (await self._cursor.load()).items() if key in partitions}
        if isinstance(self._start, Mapping):
            for partition, offset in self._start.items():
                found.setdefault(int(partition), int(offset))
            at = "earliest"
        else:
            at = start_parameter(self._start, now_ms=time.time_ns() // 1_000_000)
        return dict.fromkeys(partitions, at) | found

    def _skipped(self, partition: int, offset: int, earliest: int) -> None:
        """Note that the records from `offset` to before `earliest` are left out.

        If all records before `offset` were handed out, the position moves to `earliest`.
        """
        self.skipped.append((partition, offset, earliest))
        if self.positions[partition] == offset:
            self.positions[partition] = earliest
