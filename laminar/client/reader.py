"""Reading a topic on an event loop: a fetcher per partition, reading ahead, joined by a queue.

Records of a partition come in order; partitions come as their answers do. A reader that does
not follow ends where the topic ended when it began. Positions are those of the records handed
out, so a commit covers exactly what the loop's body has seen.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from laminar.batch import Batch, split
from laminar.client.errors import ConfigError, Error, TimedOut, Unavailable
from laminar.client.records import ReadBatch, Record
from laminar.client.session import Session, topic_path

if TYPE_CHECKING:
    import pandas
    import polars
    import pyarrow

T = TypeVar("T")

Start = str | datetime.datetime | Mapping[int, int]

FETCH_BYTES = 1 << 20
READ_AHEAD_BYTES = 4 << 20
FOLLOW_WAIT_MS = 10_000
BEHIND_WAIT_MS = 100
_UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}


def start_parameter(start: str | datetime.datetime, *, now_ms: int) -> str:
    """What to ask the offsets resource for: earliest, latest or a time in epoch milliseconds.

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


class CursorState:
    """A named consumer's positions: what was committed last, to compare with at the next commit."""

    def __init__(self, session: Session, topic: str, name: str) -> None:
        from urllib.parse import quote

        self._session = session
        self._target = f"{topic_path(topic)}/cursors/{quote(name, safe='')}"
        self.name = name
        self.committed: dict[int, int] = {}

    async def load(self) -> dict[int, int]:
        """The committed positions by partition; {} for a new cursor."""
        answer = await self._session.call("GET", self._target, accept=(404,))
        found = {} if answer.status == 404 else answer.json()
        self.committed = {int(key): _position(value) for key, value in found.get("positions", {}).items()}
        return dict(self.committed)

    async def commit(self, positions: Mapping[int, int]) -> None:
        """Set `positions` if nobody else moved the cursor since; PreconditionFailed if so."""
        changed = {key: value for key, value in positions.items() if self.committed.get(key) != value}
        if not changed:
            return
        import msgspec

        # A partition that is not in `expected` is expected to have no position yet.
        body = {
            "positions": {str(key): value for key, value in changed.items()},
            "expected": {str(key): self.committed[key] for key in changed if key in self.committed},
        }
        try:
            await self._session.call(
                "PUT",
                self._target,
                body=msgspec.json.encode(body),
                headers={"Content-Type": "application/json"},
            )
        except Error as error:
            # A repeated PUT whose first answer was lost finds its own positions: that is a success.
            if error.status != 412:
                raise
            wanted = dict(self.committed) | changed
            if await self.load() != wanted:
                raise
        self.committed |= changed

    async def delete(self) -> None:
        await self._session.call("DELETE", self._target, accept=(404,))
        self.committed = {}


def _position(value: Any) -> int:
    # A server may describe a position (offset, lag) where a bare number would do.
    return int(value["position"] if isinstance(value, dict) else value)


class Reader(Generic[T]):
    """Records of a topic: ``async for record in reader``, or ``batches()``, or ``to_arrow()``.

    Also a context manager, whose clean end commits the cursor, if there is one.
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
        fetch_bytes: int = FETCH_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
    ) -> None:
        self._session = session
        self._topic = topic
        self._start = start
        self._follow = follow
        self._cursor = CursorState(session, topic, cursor) if cursor is not None else None
        self._wanted = None if partitions is None else sorted(set(partitions))
        self._from_leader = from_leader
        self._decode = decode
        self._timeout_s = timeout_s
        self._fetch_bytes = fetch_bytes
        self._read_ahead_bytes = read_ahead_bytes
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ready: deque[tuple[ReadBatch[T], int]] = deque()
        self._held_bytes: dict[int, int] = {}
        self._changed: asyncio.Event = asyncio.Event()
        self._room: dict[int, asyncio.Event] = {}
        self._failure: BaseException | None = None
        self._begun = False
        self._records: AsyncIterator[Record[T]] | None = None
        self.positions: dict[int, int] = {}
        self.ends: dict[int, int] = {}

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
            for record in batch.records():
                positions[partition] = record.offset + 1
                yield record

    async def batches(self) -> AsyncIterator[ReadBatch[T]]:
        """The records batch-wise, without an object per record."""
        async for batch in self._take_batches():
            self.positions[batch.partition] = batch.next_offset
            yield batch

    async def next_batch(self) -> ReadBatch[T] | None:
        """The next batch, None at the end. Its records count as handed out."""
        batch = await self._take()
        if batch is not None:
            self.positions[batch.partition] = batch.next_offset
        return batch

    async def take_ready(self) -> list[ReadBatch[T]]:
        """All batches that are here, at least one; [] at the end. They do not count as handed out."""
        first = await self._take()
        if first is None:
            return []
        taken = [first]
        while self._ready:
            batch = await self._take()
            assert batch is not None, "a batch that was ready is gone"
            taken.append(batch)
        return taken

    async def commit(self) -> None:
        """Commit the cursor at the records handed out so far."""
        if self._cursor is None:
            raise ConfigError("commit without a cursor", code="no_cursor", hint="read(cursor=NAME)")
        await self._cursor.commit(self.positions)

    async def commit_at(self, positions: Mapping[int, int]) -> None:
        """Commit the cursor at `positions`: by partition, the next offset wanted."""
        if self._cursor is None:
            raise ConfigError("commit without a cursor", code="no_cursor", hint="read(cursor=NAME)")
        await self._cursor.commit(positions)

    async def to_arrow(self) -> pyarrow.Table:
        """Everything to the end as one table: offset, timestamp, key, value, tag, partition."""
        from laminar.client.tables import arrow_table

        if self._follow:
            raise ConfigError("to_arrow of a reader that follows has no end", code="endless", field="follow")
        return arrow_table([batch async for batch in self.batches()])

    async def to_polars(self) -> polars.DataFrame:
        from laminar.client.tables import polars_frame

        return polars_frame(await self.to_arrow())

    async def to_pandas(self) -> pandas.DataFrame:
        from laminar.client.tables import pandas_frame

        return pandas_frame(await self.to_arrow())

    async def close(self) -> None:
        """Stop fetching. Idempotent."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- the queue -----------------------------------------------------------------------------

    async def _take_batches(self) -> AsyncIterator[ReadBatch[T]]:
        try:
            while (batch := await self._take()) is not None:
                yield batch
        finally:
            if not self._tasks or self._failure is not None:
                await self.close()

    async def _take(self) -> ReadBatch[T] | None:
        if not self._begun:
            await self._begin()
        while not self._ready:
            if self._failure is not None:
                await self.close()
                raise self._failure
            if not self._tasks:
                return None
            self._changed.clear()
            await self._changed.wait()
        batch, size_bytes = self._ready.popleft()
        partition = batch.partition
        self._held_bytes[partition] -= size_bytes
        if self._held_bytes[partition] < self._read_ahead_bytes:
            self._room[partition].set()
        return batch

    async def _begin(self) -> None:
        """Find where to start and where to end, then start a fetcher per partition."""
        if self._begun:
            return
        self._begun = True
        places = await self._session.topic_map(self._topic, timeout_s=self._timeout_s)
        partitions = list(range(len(places.places))) if self._wanted is None else self._wanted
        named = [*partitions, *self._start] if isinstance(self._start, Mapping) else partitions
        beyond = [each for each in named if not 0 <= each < len(places.places)]
        if beyond:
            raise ConfigError(
                f"{self._topic} has {len(places.places)} partitions, not {beyond[0]}",
                code="no_partition",
                field="partitions",
                value=beyond[0],
                limit=len(places.places) - 1,
            )
        starts = await self._starts(partitions)
        ends: list[int | None] = [None] * len(partitions)
        if not self._follow:
            ends = list(await asyncio.gather(*(self._offset_at(each, "latest") for each in partitions)))
        for partition, end in zip(partitions, ends, strict=True):
            start = starts[partition]
            self.positions[partition] = start
            if end is not None:
                self.ends[partition] = end
                if start >= end:
                    continue
            self._held_bytes[partition] = 0
            self._room[partition] = asyncio.Event()
            task = self._session.loop.create_task(self._fetch_all(partition, start, end))
            self._tasks[partition] = task
            task.add_done_callback(lambda done, partition=partition: self._ended(partition, done))  # type: ignore[misc]

    async def _starts(self, partitions: list[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        if self._cursor is not None:
            found = {key: value for key, value in (await self._cursor.load()).items() if key in partitions}
        if isinstance(self._start, Mapping):
            for partition, offset in self._start.items():
                found.setdefault(int(partition), int(offset))
            at = "earliest"
        else:
            at = start_parameter(self._start, now_ms=time.time_ns() // 1_000_000)
        missing = [each for each in partitions if each not in found]
        offsets = await asyncio.gather(*(self._offset_at(each, at) for each in missing))
        return found | dict(zip(missing, offsets, strict=True))

    async def _offset_at(self, partition: int, at: str) -> int:
        return await self._session.offset_at(self._topic, partition, at, timeout_s=self._timeout_s)

    def _ended(self, partition: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(partition) is task:
            del self._tasks[partition]
        if not task.cancelled() and task.exception() is not None and self._failure is None:
            self._failure = task.exception()
        self._changed.set()

    # -- fetching ------------------------------------------------------------------------------

    async def _fetch_all(self, partition: int, offset: int, end: int | None) -> None:
        """Fetch `partition` from `offset` to `end` (None: for ever), as far ahead as there is room."""
        room = self._room[partition]
        wait_ms = 0
        at_least = 0
        while end is None or offset < end:
            if self._held_bytes[partition] >= self._read_ahead_bytes:
                room.clear()
                await room.wait()
            try:
                answer = await self._session.fetch(
                    self._topic,
                    partition,
                    offset=offset,
                    max_bytes=self._fetch_bytes,
                    wait_ms=wait_ms,
                    at_least=at_least,
                    from_leader=self._from_leader,
                    timeout_s=self._timeout_s,
                )
            except (TimedOut, Unavailable):
                if not self._follow:
                    raise
                # Who follows has no deadline: the calls below it have, and each was used up.
                continue
            node = answer.headers.get("laminar-node", "")
            before = offset
            for frame in split(answer.body):
                batch = ReadBatch(
                    Batch(frame),
                    topic=self._topic,
                    partition=partition,
                    start_offset=offset,
                    stop_offset=end if end is not None else (1 << 63),
                    node=node,
                    decode=self._decode,
                )
                if not len(batch):
                    continue
                if batch.start_offset != offset:
                    raise Error(
                        f"{self._topic}/{partition}: {node} answered {batch.start_offset} for {offset}",
                        code="gap",
                        value=batch.start_offset,
                    )
                offset = batch.next_offset
                self._held_bytes[partition] += len(frame)
                self._ready.append((batch, len(frame)))
            self._session.seen.advance(self._topic, partition, offset)
            if offset != before:
                self._changed.set()
            if end is None:
                caught_up = offset >= int(answer.headers.get("laminar-end-offset", 0))
                wait_ms = FOLLOW_WAIT_MS if caught_up or offset == before else 0
            elif offset == before:
                # That replica has not yet heard what we know to be committed; another may have.
                at_least, wait_ms = end, BEHIND_WAIT_MS
