"""The reader of a topic on an event loop: from a given start or a cursor, to the end or for ever.

The records of one partition arrive in order; partitions are interleaved as their answers arrive
(`laminar.client.consume.fetchers`). A reader that does not follow ends where the topic ended when the reader
began. A position is the offset after the last record that was handed out, so a commit covers exactly the
records that the loop's body has seen. Records that a filter leaves out count with the record before them.

A change of the topic's route (a split, merge or move) ends partitions, and new ones replace them. A reader of
the whole topic goes on with the new ones: if the topic's order is strict, only after all records of those
that they replaced, so that the records of a key come in order. A reader of partitions that were given by
number reads only these, and ends with them.
"""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from laminar.client.consume.cursors import CursorState
from laminar.client.consume.fetchers import FETCH_BYTES, READ_AHEAD_BYTES, Fetchers, OnDamage, OnExpired
from laminar.client.consume.row_filter import RowFilter
from laminar.client.errors import ConfigError, Error, OffsetExpired, TimedOut, Unavailable
from laminar.client.net.session import Session
from laminar.client.policy.lineage import Lineage
from laminar.client.policy.retry import Backoff
from laminar.client.produce.named_producer import lineage_of
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
    if isinstance(start, str):
        number = start[1:].rstrip("msdhw")
        unit = start[1 + len(number) :]
        if start.startswith("-") and number.isdecimal() and unit in _UNITS_MS:
            return str(now_ms - int(number) * _UNITS_MS[unit])
        with suppress(ValueError):
            return str(int(datetime.datetime.fromisoformat(start).timestamp() * 1000))
    raise ConfigError(
        f"start={start!r} is neither a place nor a time",
        code="bad_start",
        field="start",
        value=start,
        hint="use earliest, latest, -10m, an RFC 3339 time, a datetime or {partition: offset}",
    )


class Reader(Generic[T]):
    """Records of a topic: ``async for record in reader``, or ``batches()``, or ``to_arrow()``.

    After a ``break``, the next loop continues with the next record. As a context manager, a reader with a
    cursor commits it when the block ends without an exception. `positions` has by partition the offset after
    the last record handed out; `skipped` lists the ranges that were left out, because they were trimmed or
    unreadable: (partition, first offset, offset after the last).
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
        keep: RowFilter | None = None,
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
        self._on_expired = on_expired
        self._fetchers: Fetchers[T] = Fetchers(
            session,
            topic,
            decode=decode,
            follow=follow,
            cursor=cursor,
            on_expired=on_expired,
            on_damage=on_damage,
            keep=keep,
            from_leader=from_leader,
            timeout_s=timeout_s,
            fetch_bytes=fetch_bytes,
            read_ahead_bytes=read_ahead_bytes,
            skipped=self._skipped,
            finished=self._finished,
            expecting=self._expecting,
        )
        self._begun = False
        self._paused = False
        self._unfinished: ReadBatch[T] | None = None
        self._lineage: Lineage | None = None  # None: partitions by number are read
        # Partitions that wait for those before them, with first offset and end (None: for ever).
        self._gated: dict[int, tuple[int, int | None]] = {}
        self._read: set[int] = set()  # partitions of which all is in the queue
        self._final: dict[int, int] = {}  # ends behind which no record will ever be
        self._learning: asyncio.Task[None] | None = None
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
        while (batch := await self._take()) is not None:
            partition = batch.partition
            # If the loop breaks off in this batch, `_take` returns the rest of it next.
            self._unfinished = batch
            next_offset, last = batch.next_offset, batch.last_offset
            if not batch:
                positions[partition] = next_offset
            for record in batch.records():
                offset = record.offset
                positions[partition] = next_offset if offset == last else offset + 1
                yield record
                if self._unfinished is not batch:
                    break  # another loop continued with it
            else:
                self._unfinished = None

    async def batches(self) -> AsyncIterator[ReadBatch[T]]:
        """Yield whole batches, without making an object for each record.

        With a filter a batch may be empty: it only says that no record before its `next_offset` passed.
        """
        while (batch := await self.next_batch()) is not None:
            yield batch

    async def next_batch(self) -> ReadBatch[T] | None:
        """Return the next batch, None at the end. Its records count as handed out: `commit` includes them.

        With a filter a batch may be empty, as in `batches`.
        """
        batch = await self._take()
        if batch is not None:
            self.positions[batch.partition] = batch.next_offset
        return batch

    async def take_ready(self) -> list[ReadBatch[T]]:
        """Wait for a batch; return it and all others that were read ahead, [] at the end.

        The caller must advance `positions` for the records that it hands out; this call does not.
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
        """Move the cursor after the records handed out so far."""
        if self._cursor is None:
            raise ConfigError("commit without a cursor", code="no_cursor", hint="read(cursor=NAME)")
        await self._commit(self._cursor, self.positions)

    async def commit_at(self, positions: Mapping[int, int]) -> None:
        """Move the cursor to `positions`: for each partition, the next offset to read."""
        if self._cursor is None:
            raise ConfigError("commit without a cursor", code="no_cursor", hint="read(cursor=NAME)")
        await self._commit(self._cursor, positions)

    async def _commit(self, cursor: CursorState, positions: Mapping[int, int]) -> None:
        """Commit `positions`, those of replaced partitions before those of the partitions that replaced them.

        The cluster accepts a position in a partition only once the cursor is at the ends of the partitions
        that it replaced; until then the position is left out.
        """
        left = dict(positions)
        drained: set[int] = set()
        while left:
            due = {
                partition: position
                for partition, position in left.items()
                if all(each in drained or each not in positions for each in self._inputs_of(partition))
            }
            if not due:
                return
            await cursor.commit(due)
            for partition, position in due.items():
                del left[partition]
                if position >= self._end_of(partition, position + 1):
                    drained.add(partition)

    def _end_of(self, partition: int, otherwise: int) -> int:
        """Return the final end offset of a partition that has ended; `otherwise` if no end is known."""
        ended = None if self._lineage is None else self._lineage.end_of(partition)
        return self._final.get(partition, otherwise) if ended is None else ended.end

    def _inputs_of(self, partition: int) -> list[int]:
        """Return the partitions that this one replaced and that are read before it; [] with weak order."""
        origin = None if self._lineage is None else self._lineage.origin(partition)
        if origin is None or not origin.strict:
            return []
        return [each.partition for each in origin.inputs]

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
        """Stop fetching and discard the batches that were read ahead.

        The next call that reads starts fetching again, after the records handed out.
        """
        for partition in self.positions:
            self._fetchers.drop(partition)
        await self._stop_learning()
        self._unfinished = None
        self._paused = self._begun

    async def close(self) -> None:
        """Stop fetching. Idempotent."""
        self._unfinished = None
        self._paused = False
        await self._stop_learning()
        await self._fetchers.close()

    # -- the queue -----------------------------------------------------------------------------

    async def _take(self) -> ReadBatch[T] | None:
        """Return the rest of the batch in which a loop broke off, else the next one; None at the end."""
        if not self._begun:
            await self._begin()
        if self._paused:
            self._paused = False
            self._resume()
        batch, self._unfinished = self._unfinished, None
        if batch is not None and self.positions[batch.partition] < batch.next_offset:
            return batch.rest(self.positions[batch.partition])
        return await self._fetchers.take()

    async def _begin(self) -> None:
        """Find the first and the end offset of each partition, and start fetching. Once only."""
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
        named = [*(self._wanted or ()), *(self._start if isinstance(self._start, Mapping) else ())]
        lineage = Lineage(places.route)
        unknown = {*named} - places.places.keys()
        if places.route.version or unknown:
            lineage = await lineage_of(self._session, self._topic, timeout_s=self._timeout_s)
        # Those that are reclaimed are known, too: a program may come with an old position.
        beyond = [each for each in named if each in unknown and not lineage.knows(each)]
        if beyond:
            raise ConfigError(
                f"topic {self._topic} has no partition {beyond[0]}: it has {len(places.places)}, the last is "
                f"{places.numbers[-1]}",
                code="no_partition",
                field="partitions",
                value=beyond[0],
                limit=places.numbers[-1],
            )
        known, at = await self._starts()
        if self._wanted is not None:
            await self._start_at({each: known.get(each, at) for each in self._wanted})
            return
        begun: dict[int, int] = {}
        while True:
            self._lineage = lineage
            self._expired(lineage, known)
            starts = lineage.first_places(known | begun, at)
            ended = await self._start_at({each: starts[each] for each in starts if each not in begun})
            begun |= dict.fromkeys(starts, 0)
            if self._follow:
                return
            behind = next((number for number in ended if lineage.change_after(number) is None), None)
            newest = self._session.routes.get(self._topic, 0)
            if behind is None and newest <= lineage.route.version:
                return
            # The map was older than a change: what follows is read as well.
            lineage = await self._newer_lineage(behind, newest)

    def _expired(self, lineage: Lineage, known: Mapping[int, int]) -> None:
        """Note as skipped the records after positions in reclaimed (ended and deleted) partitions.

        Raises:
            OffsetExpired: there are such records, and `on_expired` is "error".
        """
        for partition, position in known.items():
            ended = lineage.end_of(partition)
            if ended is None or not ended.reclaimed or position >= ended.end:
                continue
            self._final[partition] = ended.end
            if self._on_expired == "error":
                raise OffsetExpired(
                    f"{self._topic}/{partition} is reclaimed: {ended.end - position} records from {position} "
                    "on were not read",
                    code="offset_expired",
                    field="offset" if self._cursor is None else "cursor",
                    value=position,
                    limit=ended.end,
                    hint="on_expired='earliest' continues with what follows",
                )
            self.skipped.append((partition, position, ended.end))

    async def _start_at(self, starts: Mapping[int, int | str]) -> list[int]:
        """Begin to read partitions, after those that they replaced; return which of them have ended."""
        found = await asyncio.gather(*(self._first_fetch(each, starts[each]) for each in starts))
        ended: list[int] = []
        answers: dict[int, Answer | None] = {}
        for partition, (start, end, answer) in zip(starts, found, strict=True):
            self._gated[partition] = start, end
            answers[partition] = answer
            if answer is not None and "laminar-sealed" in answer.headers:
                ended.append(partition)
        self._open(answers)
        return ended

    def _open(self, answers: Mapping[int, Answer | None] | None = None) -> None:
        """Begin to read the waiting partitions whose predecessors are read by now."""
        opened = True
        while opened:
            opened = False
            for partition, (start, end) in list(self._gated.items()):
                if not self._may_begin(partition):
                    continue
                opened = True
                del self._gated[partition]
                self.positions[partition] = start
                if end is not None:
                    self.ends[partition] = end
                if end is None or start < end:
                    self._fetchers.add(partition, start, end, answer=(answers or {}).get(partition))
                else:
                    self._read.add(partition)

    def _may_begin(self, partition: int) -> bool:
        # One that is not read at all is reclaimed.
        return all(each in self._read or not self._reads(each) for each in self._inputs_of(partition))

    def _reads(self, partition: int) -> bool:
        return partition in self.positions or partition in self._gated

    def _resume(self) -> None:
        """Fetch again from `positions` on; partitions whose predecessors are not handed out wait."""
        self._read = {
            partition
            for partition, position in self.positions.items()
            if position >= self.ends.get(partition, self._end_of(partition, position + 1))
        }
        for partition, position in self.positions.items():
            if partition not in self._read:
                self._gated[partition] = position, self.ends.get(partition)
        self._open()
        if self._follow:
            self._follow_up()

    # -- partitions that end ---------------------------------------------------------------------

    def _finished(self, partition: int, end: int | None) -> None:
        """Note that all of a partition is in the queue; `end` is its final end if it has ended, else None."""
        self._read.add(partition)
        if end is not None:
            self._final[partition] = end
        self._open()
        if self._follow:
            self._follow_up()

    def _follow_up(self) -> None:
        """Begin to read the partitions that replaced ended ones; ask the cluster for them if unknown."""
        if self._lineage is None:
            return
        for partition in self._final:
            change = self._lineage.change_after(partition)
            if change is None:
                if self._learning is None:
                    self._learning = self._session.loop.create_task(self._learn(partition))
                continue
            for output in change.outputs:
                if not self._reads(output):
                    self._gated[output] = 0, None
        self._open()

    async def _learn(self, partition: int) -> None:
        try:
            self._lineage = await self._newer_lineage(partition)
        except Error as error:
            self._fetchers.fail(error)
            return
        finally:
            self._learning = None
        self._follow_up()
        self._fetchers.look_again()

    async def _newer_lineage(self, ended: int | None, version: int = 0) -> Lineage:
        """Return a lineage with the successors of the partition `ended`, and a route of `version` or later.

        Ask until a node knows it: a node may lag behind the change.
        """
        backoff = Backoff(rng=self._session.rng, first_ms=20, ceiling_ms=1_000)
        timeout_s = self._session.timeout_s if self._timeout_s is None else self._timeout_s
        deadline = self._session.loop.time() + timeout_s
        while True:
            try:
                lineage = await lineage_of(self._session, self._topic, timeout_s=self._timeout_s)
                follows = ended is None or lineage.change_after(ended) is not None
                if follows and lineage.route.version >= version:
                    return lineage
                failure = None
            except Unavailable as error:
                if self._session.closed:
                    raise
                failure = error
            if not self._follow and self._session.loop.time() > deadline:
                what = f"{self._topic}/{ended} has ended, and no node knows what follows"
                raise failure or TimedOut(what, code="timed_out", retriable=True)
            await asyncio.sleep(backoff.next_ms() / 1000)

    async def _stop_learning(self) -> None:
        if self._learning is not None:
            task, self._learning = self._learning, None
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _expecting(self) -> bool:
        return self._learning is not None or bool(self._gated)

    # -- where to start --------------------------------------------------------------------------

    async def _first_fetch(self, partition: int, start: int | str) -> tuple[int, int | None, Answer | None]:
        """Return where to begin and to end (None: never), and the answer of the first fetch, if any."""
        if isinstance(start, int) and start == self._end_of(partition, -1):
            return start, start, None
        if not self._follow:
            return await self._fetchers.first_fetch(partition, start)
        if isinstance(start, int):
            return start, None, None
        offset, _, answer = await self._fetchers.first_fetch(partition, start)
        return offset, None, answer

    async def _starts(self) -> tuple[dict[int, int], str]:
        """Return by partition the offset at which to begin, and the start of all others, as text.

        If a partition has both a position of the cursor and an offset in `start`, the cursor's is used.
        """
        found: dict[int, int] = {}
        if self._cursor is not None:
            found |= await self._cursor.load()
        if isinstance(self._start, Mapping):
            for partition, offset in self._start.items():
                found.setdefault(int(partition), int(offset))
            at = "earliest"
        else:
            at = start_parameter(self._start, now_ms=time.time_ns() // 1_000_000)
        return found, at

    def _skipped(self, partition: int, offset: int, earliest: int) -> None:
        """Note that the records from `offset` to before `earliest` are left out.

        If all records before `offset` were handed out, the position moves to `earliest`.
        """
        self.skipped.append((partition, offset, earliest))
        if self.positions[partition] == offset:
            self.positions[partition] = earliest
