"""One replica of a partition: appends, the door, fetches, producers and cursors.

`Partition` is the machine of a `Replica` (laminar.node.replica): its state follows the log.
On the leader it also takes appends. Records without a producer id that arrive in one turn of
the loop are joined into one batch at *the door* (NSQ-03), each request with its own offsets;
batches of an idempotent producer are taken as they are.

What an append's future says: a receipt means committed. `Problem` says refused or, with
outcome `unknown`, that nobody can tell. A future is never left hanging: a truncation fails
it, a commit resolves it, also when this replica has ceased to lead in between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from laminar.batch import Header, Kind, build, build_control
from laminar.http.errors import Outcome, Problem
from laminar.http.records import Records
from laminar.log.log import Log
from laminar.node.cursors import Cursor, CursorChange, Cursors
from laminar.node.driver import Driver
from laminar.node.producers import NOBODY, Place, Producers, Refused
from laminar.node.replica import Replica
from laminar.node.wire import Buffer

DOOR_BYTES = 1024 * 1024
DOOR_BATCHES_IN_FLIGHT = 2
UNCOMMITTED_BYTES = 64 * 1024 * 1024
_HEADER = 128


def _no_refusal() -> str | None:
    return None


@dataclass(slots=True)
class Receipt:
    """Where records of one request lie: first offset and number."""

    partition: int
    offset: int
    count: int
    duplicate: bool = False


@dataclass(slots=True)
class _Waiter:
    """Somebody who waits for an entry to be committed."""

    future: asyncio.Future[Receipt]
    receipt: Receipt
    term: int
    since_s: float


@dataclass(slots=True)
class _Knock:
    """A request at the door."""

    records: Records
    future: asyncio.Future[Receipt]


class Partition:
    """A replica of partition `number` of `topic`; attach its `Replica` before use."""

    def __init__(
        self,
        *,
        topic: str,
        number: int,
        driver: Driver,
        log: Log,
        refusal: Callable[[], str | None] = _no_refusal,
    ) -> None:
        self.topic = topic
        self.number = number
        self.log = log
        self.replica: Replica
        self._driver = driver
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self.producers = Producers()
        self.cursors = Cursors()
        self.committed_index = log.start.index
        self._waiters: dict[int, list[_Waiter]] = {}
        self._uncommitted_bytes = 0
        self._sizes: dict[int, int] = {}
        self._door: list[_Knock] = []
        self._door_bytes = 0
        self._door_scheduled = False
        self._door_in_flight: set[int] = set()
        self._fetchers: set[asyncio.Future[None]] = set()
        self._draining = False
        self.appended_records = 0
        self.appended_batches = 0
        self.fetched_bytes = 0

    # -- the machine: told by the driver -----------------------------------------------

    def appended(self, header: Header, frame: Buffer) -> None:
        """See Machine."""
        if header.kind == Kind.DATA:
            self.producers.appended(header)
            # What the header says is committed needs no way back: so a replayed log piles up no history.
            self.producers.committed(header.committed_index)
        elif header.kind == Kind.CURSOR:
            self.cursors.appended(header, memoryview(frame)[_HEADER:])
            self.cursors.committed(header.committed_index)

    def truncated(self, index: int) -> None:
        """See Machine."""
        self.producers.truncated(index)
        self.cursors.truncated(index)
        outcome = self._outcome_of_truncated
        for lost in [waiting for waiting in self._waiters if waiting >= index]:
            for waiter in self._waiters.pop(lost):
                _fail(waiter.future, _truncated(self, outcome))
            self._forget(lost)

    @property
    def _outcome_of_truncated(self) -> Outcome:
        """What becomes of an entry that a deposed leader proposed and then cut.

        Of three voters two elected a leader without it, and whoever elects without it never takes it over:
        so it was on the third alone, and is gone. Of five, a follower may still hold it and lead one day.
        """
        return "not_applied" if self.replicas <= 3 else "unknown"

    def committed(self, index: int) -> None:
        """See Machine."""
        before = self.committed_index
        self.committed_index = index
        self.producers.committed(index)
        self.cursors.committed(index)
        if self._waiters:
            log = self.log
            for done in range(before + 1, index + 1):
                waiters = self._waiters.pop(done, None)
                if waiters is None:
                    continue
                term = log.term(done)
                for waiter in waiters:
                    if waiter.future.done():
                        continue
                    if waiter.term == term:
                        waiter.future.set_result(waiter.receipt)
                    else:
                        waiter.future.set_exception(_truncated(self, self._outcome_of_truncated))
                self._forget(done)
            if self._door and not self._door_scheduled:
                self._door_scheduled = True
                self._loop.call_soon(self._open_door)
        if self._fetchers:
            fetchers, self._fetchers = self._fetchers, set()
            for fetcher in fetchers:
                if not fetcher.done():
                    fetcher.set_result(None)

    def _forget(self, index: int) -> None:
        self._door_in_flight.discard(index)
        self._uncommitted_bytes -= self._sizes.pop(index, 0)

    def led(self, leading: bool) -> None:
        """See Machine. What was not proposed yet is refused at once; the rest waits for its fate."""
        if leading:
            return
        door, self._door, self._door_bytes = self._door, [], 0
        for knock in door:
            _fail(knock.future, _lost_leadership(self, outcome="not_applied"))

    def failed(self, error: Exception) -> None:
        """See Machine. What was proposed may be on other replicas: nobody can tell what becomes of it."""
        self.led(False)
        for waiters in self._waiters.values():
            for waiter in waiters:
                _fail(waiter.future, Problem("outcome_unknown", f"this replica has stopped: {error}"))
        self._waiters.clear()
        self.stop_waiting()

    def stop_waiting(self) -> None:
        """Let readers who wait for new records go: this replica will have none for them."""
        self._draining = True
        fetchers, self._fetchers = self._fetchers, set()
        for fetcher in fetchers:
            _wake(fetcher)

    @property
    def leads(self) -> bool:
        """Whether appends are taken here."""
        return self.replica.core.is_leader and self.replica.failure is None

    # -- what a reader may see ----------------------------------------------------------

    @property
    def start_offset(self) -> int:
        """The earliest offset that is still there."""
        return self.log.start.offset

    @property
    def end_offset(self) -> int:
        """One past the last committed record that this replica knows of."""
        if self.committed_index == self.log.start.index:
            return self.log.start.offset
        row = self.log.row(self.committed_index)
        return row.base_offset + row.count

    @property
    def replicas(self) -> int:
        """Voters of the group: what an acknowledged append is replicated over."""
        return len(self.replica.configuration.voters)

    async def wait_past(self, offset: int, wait_s: float) -> bool:
        """Wait until a record at `offset` is committed here; False when the time is over."""
        deadline = self._loop.time() + wait_s
        while self.end_offset <= offset:
            remaining = deadline - self._loop.time()
            if remaining <= 0 or self._draining:
                return False
            future: asyncio.Future[None] = self._loop.create_future()
            self._fetchers.add(future)
            handle = self._loop.call_later(remaining, _wake, future)
            try:
                await future
            finally:
                handle.cancel()
                self._fetchers.discard(future)
        return True

    async def confirmed_end(self) -> int:
        """The end as a majority confirmed it after this call (linearizable). Leader only."""
        try:
            index = await self._driver.confirm(self.replica)
        except ConnectionError as error:
            raise _lost_leadership(self, outcome="not_applied") from error
        if index > self.committed_index:
            # The core knows the index; the machine is told in the same turn.
            raise AssertionError(f"confirmed {index} but committed {self.committed_index}")
        return self.end_offset

    async def frames(self, offset: int, *, max_bytes: int) -> list[Buffer]:
        """Committed data batches from the one that holds `offset` on, at least one if there is one."""
        last = self.committed_index
        index = self.log.index_of_offset(offset)
        found: list[Buffer] = []
        size = 0
        while index is not None and index <= last and (not found or size < max_bytes):
            wanted = max(1, max_bytes - size)
            frames = self.log.read_nowait(index, last, max_bytes=wanted)
            if frames is None:
                frames = await self.log.read(index, last, max_bytes=wanted)
            for frame in frames:
                if frame[5] == Kind.DATA:
                    found.append(frame)
                    size += len(frame)
            index += len(frames)
        self.fetched_bytes += size
        return found

    # -- appends -----------------------------------------------------------------------

    def append_records(self, records: Records) -> asyncio.Future[Receipt]:
        """Records without a producer id: joined at the door with what else arrives this turn."""
        self._check_can_append()
        future: asyncio.Future[Receipt] = self._loop.create_future()
        self._door.append(_Knock(records, future))
        self._door_bytes += records.size_bytes
        if not self._door_scheduled:
            self._door_scheduled = True
            self._loop.call_soon(self._open_door)
        return future

    def stands_at(self, offset: int) -> bool:
        """Whether the next record appended now would get this offset."""
        return not self._door and self.log.next_offset == offset

    def append_frame(self, frame: bytearray | memoryview, header: Header) -> asyncio.Future[Receipt]:
        """A verified, unstamped columnar batch; recognised when its producer sent it before."""
        self._check_leads()
        future: asyncio.Future[Receipt] = self._loop.create_future()
        # A retry first: it takes no room, and to refuse it as "not applied" would be a lie.
        if header.producer_id != NOBODY:
            known = self.producers.check(header.producer_id, header.producer_epoch, header.sequence)
            if isinstance(known, Refused):
                raise _refused(known, header)
            if known is not None:
                self._await_place(future, known)
                return future
        self._check_room()
        if self._door:
            # They came first: no batch overtakes them or moves the end that one of them was checked against.
            self._empty_door(in_flight=None)
            self._check_leads()
        self._propose(frame, [(future, header.count)])
        return future

    def _await_place(self, future: asyncio.Future[Receipt], place: Place) -> None:
        receipt = Receipt(self.number, place.offset, place.count, duplicate=True)
        if place.index <= self.committed_index:
            future.set_result(receipt)
            return
        term = self.log.term(place.index)
        assert term is not None, f"{self.topic}/{self.number}: a producer's entry {place.index} has no term"
        self._waiters.setdefault(place.index, []).append(_Waiter(future, receipt, term, self._loop.time()))

    def _check_can_append(self) -> None:
        self._check_leads()
        self._check_room()

    def _check_leads(self) -> None:
        if not self.leads:
            raise _lost_leadership(self, outcome="not_applied")

    def _check_room(self) -> None:
        refusal = self._refusal()
        if refusal == "disk":
            raise Problem("disk_full", "the disk of this node is full", field="disk", outcome="not_applied")
        if refusal is not None:
            raise Problem(
                "overloaded",
                f"the {refusal} of this shard is longer than its checkpoints can follow",
                field=refusal,
                retry_after_ms=100,
                outcome="not_applied",
            )
        used = self._uncommitted_bytes + self._door_bytes
        if used > UNCOMMITTED_BYTES:
            raise Problem(
                "overloaded",
                f"partition {self.topic}/{self.number} has {used} bytes waiting to be committed",
                field="uncommitted_bytes",
                value=used,
                limit=UNCOMMITTED_BYTES,
                retry_after_ms=100,
                outcome="not_applied",
            )

    def _propose(
        self, frame: bytearray | memoryview, askers: Sequence[tuple[asyncio.Future[Receipt], int]]
    ) -> int:
        offset = self.log.next_offset
        # The waiters are there before the proposal: with one voter the commit may follow within it.
        index, term = self.log.last_index + 1, self.replica.core.term
        waiters = []
        now_s = self._loop.time()
        for future, count in askers:
            waiters.append(_Waiter(future, Receipt(self.number, offset, count), term, now_s))
            offset += count
        self._waiters[index] = waiters
        self._sizes[index] = len(frame)
        self._uncommitted_bytes += len(frame)
        placed = self._driver.propose(self.replica, frame)
        assert placed == (index, term), f"proposed at {placed}, expected {(index, term)}"
        self.appended_batches += 1
        return index

    def _open_door(self) -> None:
        """Propose what waits at the door, unless the last batches from there are still under way.

        So a door batch holds what piled up during the last commit: no timer, and the busier
        the partition, the larger the batches.
        """
        self._door_scheduled = False
        self._empty_door(in_flight=DOOR_BATCHES_IN_FLIGHT)

    def _empty_door(self, *, in_flight: int | None) -> None:
        while self._door and (in_flight is None or len(self._door_in_flight) < in_flight):
            if not self.leads:
                self.led(False)
                return
            knocks: list[_Knock] = []
            size = 0
            for knock in self._door:
                if knocks and size + knock.records.size_bytes > DOOR_BYTES:
                    break
                knocks.append(knock)
                size += knock.records.size_bytes
            del self._door[: len(knocks)]
            self._door_bytes -= size
            try:
                frame = _join([knock.records for knock in knocks])
            except ValueError:
                self._one_by_one(knocks)
                continue
            except Exception as error:
                for knock in knocks:
                    _fail(knock.future, Problem("bug", f"{error!r}", outcome="not_applied"))
                raise
            index = self._propose(frame, [(knock.future, len(knock.records.values)) for knock in knocks])
            if index > self.committed_index:
                self._door_in_flight.add(index)

    def _one_by_one(self, knocks: Sequence[_Knock]) -> None:
        """One member makes no batch: it alone fails."""
        for knock in knocks:
            try:
                frame = _join([knock.records])
            except ValueError as error:
                _fail(knock.future, Problem("invalid", str(error), outcome="not_applied"))
                continue
            self._propose(frame, [(knock.future, len(knock.records.values))])

    def give_up(self, *, older_than_s: float) -> None:
        """Answer those who have waited too long for a commit: nobody can tell yet what becomes of it."""
        latest = self._loop.time() - older_than_s
        for waiters in list(self._waiters.values()):
            for waiter in waiters:
                if waiter.since_s <= latest:
                    detail = f"not committed within {older_than_s:g} s: a majority does not answer"
                    _fail(waiter.future, Problem("outcome_unknown", detail))

    # -- cursors -----------------------------------------------------------------------

    def set_cursor(
        self, name: str, position: int | None, *, expected: int | None, check: bool, owner: str, now_ms: int
    ) -> asyncio.Future[Receipt]:
        """Commit a cursor's position (None deletes). With `check` only if it stands at `expected`.

        Compared with the log's end, not with what is committed: of two that race, the second
        sees the first.
        """
        self._check_can_append()
        current = self.cursors.get(name)
        standing = current.position if current is not None else None
        # Standing where it is wanted is a retry of what went through, not a race lost.
        if check and standing not in (expected, position):
            raise Problem(
                "precondition_failed",
                f"cursor {name!r} of {self.topic}/{self.number} is not where it was expected",
                field=f"expected.{self.number}",
                value=expected,
                limit=standing,
                outcome="not_applied",
            )
        if position is not None and not 0 <= position <= self.log.next_offset:
            raise Problem(
                "offset_beyond_end",
                f"cursor {name!r} of {self.topic}/{self.number} cannot stand behind the end",
                field=f"positions.{self.number}",
                value=position,
                limit=self.log.next_offset,
                outcome="not_applied",
            )
        change = CursorChange(name=name, position=position, changed_ms=now_ms, owner=owner)
        future: asyncio.Future[Receipt] = self._loop.create_future()
        frame = build_control(Kind.CURSOR, msgspec.msgpack.encode(change))
        self._propose(frame, [(future, 0)])
        return future

    def cursor(self, name: str) -> Cursor | None:
        """A cursor as it is committed here: a later change may still be lost."""
        return self.cursors.committed_at(name)


def _join(many: Sequence[Records]) -> bytearray:
    """One batch of several requests' records, in order."""
    records = Records.concat(many)
    return build(
        records.values,
        keys=records.keys,
        timestamps=records.timestamps,
        tags=records.tags,
        headers=records.headers,
    )


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _fail(future: asyncio.Future[Receipt], problem: Problem) -> None:
    if not future.done():
        future.set_exception(problem)


def _lost_leadership(partition: Partition, *, outcome: Outcome) -> Problem:
    return Problem(
        "not_leader",
        f"this replica of {partition.topic}/{partition.number} is not the leader",
        retry_after_ms=50,
        outcome=outcome,
    )


def _truncated(partition: Partition, outcome: Outcome) -> Problem:
    if outcome == "not_applied":
        return _lost_leadership(partition, outcome=outcome)
    return Problem("outcome_unknown", f"another replica of {partition.topic}/{partition.number} leads now")


def _refused(refused: Refused, header: Header) -> Problem:
    if refused.code == "fenced":
        return Problem(
            "fenced",
            "a newer epoch of this producer has written here",
            field="producer_epoch",
            value=header.producer_epoch,
            limit=refused.expected,
            outcome="not_applied",
        )
    return Problem(
        refused.code,
        "batches of a producer are numbered 0, 1, 2, … in each partition and taken in order",
        field="sequence",
        value=header.sequence,
        limit=refused.expected,
        # A number taken long ago, whose place is forgotten: it was applied then.
        outcome="unknown" if header.sequence < refused.expected else "not_applied",
    )
