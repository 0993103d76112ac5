"""Fetching of several partitions of a topic: one task for each partition, and one queue of batches.

The batches of one partition arrive in order; batches of different partitions are interleaved as their answers
arrive. Partitions may be added and dropped at any time: a dropped partition yields no further batch. This
module returns whole batches and moves no cursor: the caller decides when a batch that it took counts as read.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, Literal, TypeVar

from laminar.batch import Batch, BatchError, Header, Kind, build_control, split_headers
from laminar.client.consume.row_filter import RowFilter
from laminar.client.errors import Error, OffsetExpired, OutcomeUnknown, TimedOut, Unavailable
from laminar.client.net.session import Session, skipped_ranges
from laminar.client.records import ReadBatch
from laminar.http.protocol.answer import Answer

T = TypeVar("T")

OnExpired = Literal["error", "earliest"]
OnDamage = Literal["error", "skip"]

FETCH_BYTES = 1 << 20
READ_AHEAD_BYTES = 4 << 20
FOLLOW_WAIT_MS = 10_000
BEHIND_WAIT_MS = 100

_NO_RECORDS = Batch(build_control(Kind.NOOP))


def _decode(frame: memoryview, header: Header, *, whole: bool) -> Batch:
    """Return the batch of a frame whose `header` is verified; with `whole` all its columns are decoded.

    Raises:
        BatchError: the body, or with `whole` a column of it, cannot be read.
    """
    batch = Batch(frame, header=header)
    if whole:
        _ = batch.values, batch.keys, batch.tags, batch.headers, batch.timestamps
    return batch


class Fetchers(Generic[T]):
    """Fetching tasks of some partitions of a topic, and the batches that they have read ahead.

    With `follow` a fetch that misses its deadline is repeated; without it the error is raised. If no
    partition is being read, `take` returns None, but with `endless` it waits, because the caller may add a
    partition. `cursor` is a name for error messages only.

    `on_expired` applies if records were trimmed before they were read: ``"error"`` raises `OffsetExpired`,
    ``"earliest"`` continues at the earliest record that is left. `on_damage` applies if records are damaged
    on all replicas, or their producer wrote a batch that cannot be decoded: ``"error"`` fails the reading,
    ``"skip"`` continues after them. With ``"skip"`` every column of a batch is decoded before the batch is
    returned, so that an undecodable one is found here. `skipped(partition, first offset, offset after the
    last)` is called for each range that is left out.

    `keep` is a filter. Records that do not pass it are left out and count as read: the batches of a partition
    follow each other without gaps, from `start_offset` to `next_offset`, and a batch without records says
    that no record of its range passed. At most one such batch waits in the queue.

    `finished(partition, end)` is called when all of a partition is in the queue; `end` is the partition's
    final end if it takes no more records, else None. The callback may add other partitions. While
    `expecting()` returns true, `take` waits for such additions.
    """

    def __init__(
        self,
        session: Session,
        topic: str,
        *,
        decode: Callable[[bytes], T],
        follow: bool,
        endless: bool = False,
        cursor: str | None = None,
        on_expired: OnExpired = "error",
        on_damage: OnDamage = "error",
        keep: RowFilter | None = None,
        from_leader: bool = False,
        timeout_s: float | None = None,
        fetch_bytes: int = FETCH_BYTES,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        skipped: Callable[[int, int, int], None] = lambda partition, offset, earliest: None,
        finished: Callable[[int, int | None], None] = lambda partition, end: None,
        expecting: Callable[[], bool] = lambda: False,
    ) -> None:
        self._session = session
        self._topic = topic
        self._decode = decode
        self._follow = follow
        self._endless = endless
        self._cursor = cursor
        self._on_expired = on_expired
        self._skips = on_damage == "skip"
        self._keep = keep
        self._tag = None if keep is None else keep.tag
        self._narrowed = {"on_damage": "skip"} if self._skips else {}
        if self._tag is not None:
            self._narrowed["tag"] = self._tag
        self._from_leader = from_leader
        self._timeout_s = timeout_s
        self._fetch_bytes = fetch_bytes
        self._read_ahead_bytes = read_ahead_bytes
        self._skipped = skipped
        self._finished = finished
        self._expecting = expecting
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ready: deque[tuple[ReadBatch[T], int]] = deque()
        # By partition the batch that was put into the queue last, while it is there.
        self._newest: dict[int, ReadBatch[T]] = {}
        self._held_bytes: dict[int, int] = {}
        self._room: dict[int, asyncio.Event] = {}
        self._changed = asyncio.Event()
        self._failure: BaseException | None = None

    @property
    def ready(self) -> bool:
        """Whether `take` would return a batch at once."""
        return bool(self._ready)

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the reading; None while there is none."""
        return self._failure

    async def first_fetch(self, partition: int, start: int | str) -> tuple[int, int, Answer | None]:
        """Resolve `start`; return the offset to begin at, the end offset, and the answer of the first fetch.

        `start` is an offset, or ``"earliest"``, ``"latest"`` or a time in epoch milliseconds as text. One
        fetch at the leader resolves it, finds the end offset, and brings the first records: pass the answer
        to `add`. The answer is None where that fetch brought no records: the partition has no leader (then
        the replicas are asked for both offsets), or `start` is trimmed, damaged or beyond the end.
        """
        timeout_s = self._session.timeout_s if self._timeout_s is None else self._timeout_s
        deadline = self._session.loop.time() + timeout_s
        answer: Answer | None = None
        try:
            answer = await self._session.fetch(
                self._topic,
                partition,
                offset=start,
                max_bytes=self._fetch_bytes,
                from_leader=True,
                timeout_s=self._session.leader_patience_s(timeout_s),
                narrowed=self._narrowed,
            )
        except (TimedOut, Unavailable, OutcomeUnknown, OffsetExpired) as error:
            # Either the records at `start` are trimmed or damaged: the later fetches from `first` on handle
            # that. Or no leader was found: then no more time is spent on waiting for one, and the replicas
            # are asked at once, although they may know less.
            leaderless = isinstance(error, TimedOut) and error.fields.get("last_code") != "damaged"
            left_s = max(0.0, deadline - self._session.loop.time())
            patience_s = 0.0 if leaderless else self._session.leader_patience_s(left_s)
            first, end = await asyncio.gather(
                *(
                    self._offset_at(partition, at, patience_s=patience_s, timeout_s=left_s)
                    for at in (start, "latest")
                )
            )
        except Error as error:
            if error.code != "offset_beyond_end" or not isinstance(start, int):
                raise
            first, end = start, int(error.limit)
        else:
            first = start if isinstance(start, int) else int(answer.headers["laminar-offset"])
            end = int(answer.headers["laminar-end-offset"])
        return first, end, answer

    async def _offset_at(self, partition: int, at: int | str, *, patience_s: float, timeout_s: float) -> int:
        if isinstance(at, int):
            return at
        return await self._session.offset_at(
            self._topic, partition, at, patience_s=patience_s, timeout_s=timeout_s
        )

    def add(
        self, partition: int, start: int, end: int | None = None, *, answer: Answer | None = None
    ) -> None:
        """Start reading `partition` from offset `start` to before `end`; None as `end` means for ever.

        `answer` is the leader's answer that `first_fetch` returned, if any.
        """
        assert partition not in self._tasks, f"partition {partition} is being read"
        self._held_bytes[partition] = 0
        self._room[partition] = asyncio.Event()
        task = self._session.loop.create_task(self._fetch_all(partition, start, end, answer))
        self._tasks[partition] = task
        task.add_done_callback(lambda done: self._ended(partition, done))

    def drop(self, partition: int) -> None:
        """Stop reading `partition`, and discard its batches that were read ahead."""
        task = self._tasks.pop(partition, None)
        if task is not None:
            task.cancel()
        self._ready = deque(each for each in self._ready if each[0].partition != partition)
        self._newest.pop(partition, None)
        self._held_bytes.pop(partition, None)
        self._room.pop(partition, None)

    def fail(self, error: BaseException) -> None:
        """End the reading: `take` raises `error` once the batches that are ready are taken."""
        if self._failure is None:
            self._failure = error
        self._changed.set()

    def look_again(self) -> None:
        """Wake `take`, so that it checks again whether any partition is being read or expected."""
        self._changed.set()

    async def take(self) -> ReadBatch[T] | None:
        """Wait for the next batch and return it; None when no partition is being read (never if `endless`).

        Raises:
            Exception: the error that ended a fetching task, or that `fail` was given.
        """
        while not self._ready:
            if self._failure is not None:
                await self.close()
                raise self._failure
            if not self._tasks and not self._endless and not self._expecting():
                return None
            self._changed.clear()
            await self._changed.wait()
        batch, size_bytes = self._ready.popleft()
        partition = batch.partition
        if self._newest.get(partition) is batch:
            del self._newest[partition]
        self._held_bytes[partition] -= size_bytes
        if self._held_bytes[partition] < self._read_ahead_bytes:
            self._room[partition].set()
        return batch

    async def close(self) -> None:
        """Stop fetching. Idempotent."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, partition: int, task: asyncio.Task[None]) -> None:
        if self._tasks.get(partition) is task:
            del self._tasks[partition]
        if not task.cancelled() and (failure := task.exception()) is not None:
            self.fail(failure)
        self._changed.set()

    async def _fetch_all(self, partition: int, offset: int, end: int | None, first: Answer | None) -> None:
        """Fetch `partition` from `offset` to before `end` (None: for ever) into the queue.

        It pauses while the queue holds `read_ahead_bytes` of this partition. `first` is used in place of the
        first fetch.
        """
        room = self._room[partition]
        wait_ms = 0
        at_least = 0
        while end is None or offset < end:
            if self._held_bytes[partition] >= self._read_ahead_bytes:
                room.clear()
                await room.wait()
            try:
                answer, first = first, None
                if answer is None:
                    answer = await self._session.fetch(
                        self._topic,
                        partition,
                        offset=offset,
                        max_bytes=self._fetch_bytes,
                        wait_ms=wait_ms,
                        at_least=at_least,
                        from_leader=self._from_leader,
                        timeout_s=self._timeout_s,
                        narrowed=self._narrowed,
                    )
            except (TimedOut, Unavailable):
                if not self._follow or self._session.closed:
                    raise
                # Each fetch has a deadline; a reader that follows has none, so it fetches again.
                continue
            except OffsetExpired as error:
                earliest, reclaimed = await self._resume_after_expiry(partition, offset, error)
                if earliest > offset:
                    self._skipped(partition, offset, earliest)
                    offset = earliest
                if reclaimed:
                    self._finished(partition, earliest)
                    return
                continue
            before = offset
            offset = self._put_answer(partition, offset, end, answer)
            self._session.seen.advance(self._topic, partition, offset)
            if offset != before:
                self._changed.set()
            sealed = answer.headers.get("laminar-sealed")
            if sealed is not None and offset >= int(sealed):
                self._finished(partition, int(sealed))
                return
            if end is None:
                caught_up = offset >= int(answer.headers.get("laminar-end-offset", 0))
                wait_ms = FOLLOW_WAIT_MS if caught_up or offset == before else 0
            elif offset == before:
                # This replica lags: `end` is committed, and it does not know that yet. The next fetch asks
                # for a replica that has all before `end`.
                at_least, wait_ms = end, BEHIND_WAIT_MS
        self._finished(partition, None)

    def _put_answer(self, partition: int, offset: int, end: int | None, answer: Answer) -> int:
        """Put the batches of the answer to a fetch at `offset` into the queue; return where to fetch next."""
        before = offset
        if self._skips:
            for first, past in skipped_ranges(answer):
                if past > offset:
                    self._leave_out(partition, offset, max(offset, first), past)
                    offset = past
        node = answer.headers.get("laminar-node", "")
        for frame, header in split_headers(answer.body):
            if not header.count or header.next_offset <= offset:
                continue
            if end is not None and header.base_offset >= end:
                break
            if header.base_offset > offset and self._tag is None:
                if offset > before:
                    break  # the next fetch asks for the records from `offset` on
                raise Error(
                    f"{self._topic}/{partition}: {node} answered {header.base_offset} for {offset}",
                    code="gap",
                    value=header.base_offset,
                )
            try:
                batch = ReadBatch(
                    _decode(frame, header, whole=self._skips),
                    topic=self._topic,
                    partition=partition,
                    start_offset=offset,
                    stop_offset=end if end is not None else (1 << 63),
                    node=node,
                    decode=self._decode,
                )
                if self._keep is not None:
                    batch = batch.only(self._keep.rows, start_offset=offset)
            except BatchError:
                if not self._skips:
                    raise
                self._leave_out(partition, offset, max(offset, header.base_offset), header.next_offset)
                offset = header.next_offset
                continue
            if self._keep is None or batch:
                self._put(batch, len(frame))
            else:
                self._pass(partition, offset, batch.next_offset)
            offset = batch.next_offset
        if self._tag is not None:
            # The node left out the batches without the tag, up to there.
            examined_to = int(answer.headers.get("laminar-next-offset", 0))
            examined_to = examined_to if end is None else min(examined_to, end)
            self._pass(partition, offset, examined_to)
            offset = max(offset, examined_to)
        return offset

    def _put(self, batch: ReadBatch[T], size_bytes: int) -> None:
        self._held_bytes[batch.partition] += size_bytes
        self._newest[batch.partition] = batch
        self._ready.append((batch, size_bytes))

    def _pass(self, partition: int, start: int, stop: int) -> None:
        """Queue an empty batch, or extend the last one: no record from `start` to before `stop` passed."""
        if stop <= start:
            return
        newest = self._newest.get(partition)
        if newest is not None and newest.next_offset == start:
            newest.next_offset = stop
            return
        nothing = ReadBatch(
            _NO_RECORDS,
            topic=self._topic,
            partition=partition,
            start_offset=0,
            stop_offset=0,
            node="",
            decode=self._decode,
        )
        nothing.start_offset, nothing.next_offset = start, stop
        self._put(nothing, 0)

    def _leave_out(self, partition: int, start: int, first: int, past: int) -> None:
        """Report that the records from `first` to before `past` cannot be read and are left out.

        With a filter, those from `start` to before `first` did not pass it.
        """
        if self._keep is None:
            first = start
        self._pass(partition, start, first)
        self._skipped(partition, first, past)

    async def _resume_after_expiry(
        self, partition: int, offset: int, error: OffsetExpired
    ) -> tuple[int, bool]:
        """Return the offset to continue from after a fetch at `offset` found the record trimmed.

        With `on_expired` "earliest", it is the earliest offset that is left. It is `offset` itself if the
        leader still has that record, because only the replica that answered has trimmed it. The second value
        is true if the partition is reclaimed (ended and deleted); then the first is its final end.

        Raises:
            OffsetExpired: the record is trimmed, and `on_expired` is "error".
        """
        reclaimed = False
        try:
            earliest = await self._session.offset_at(
                self._topic, partition, "earliest", timeout_s=self._timeout_s
            )
        except OffsetExpired as gone:
            earliest, reclaimed = int(gone.limit), True
        if earliest <= offset and reclaimed:
            return earliest, True
        if earliest <= offset:
            # The replica has trimmed the records on an older leader's word, which the new leader has not
            # learned yet. After a pause the fetch is repeated.
            await asyncio.sleep(BEHIND_WAIT_MS / 1000)
            return offset, False
        if self._on_expired == "earliest":
            return earliest, reclaimed
        who = "the reader" if self._cursor is None else f"cursor {self._cursor!r}"
        raise OffsetExpired(
            f"{who} of {self._topic}/{partition} is at {offset}, but the earliest record left is "
            f"{earliest}: {earliest - offset} were trimmed",
            code=error.code,
            status=error.status,
            field="cursor" if self._cursor is not None else "offset",
            value=offset if self._cursor is None else self._cursor,
            limit=earliest,
            hint="on_expired='earliest' continues there",
            fields={**error.fields, "partition": partition, "position": offset, "earliest": earliest},
        ) from error
