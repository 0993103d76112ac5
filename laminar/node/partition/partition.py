"""One replica of a partition: what is appended, who waits for it, and what its readers may see.

`Partition` is the machine of a `Replica` (laminar.node.consensus.replica): what it knows follows from the log
(`laminar.node.partition.state.state`). On the leader it also takes appends: records without a mark by way of
the *door* (`laminar.node.partition.append_batcher`), batches with a producer's number or an idempotency key
as they are.

What an append's future says: a receipt means committed. `Problem` says refused or, with
outcome `unknown`, that nobody can tell. A future is never left hanging: a truncation fails
it, a commit resolves it, also when this replica has ceased to lead in between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from laminar.batch import NO_PRODUCER, Buffer, Header, Kind, build_control
from laminar.http.api.problems import Outcome, Problem
from laminar.http.api.records import Records
from laminar.log.format.index_entry import IndexEntry
from laminar.log.partition_log.log import Log
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.log_start import LogStartRecord
from laminar.node.consensus.replica import Replica
from laminar.node.partition import reads
from laminar.node.partition.append_batcher import Door
from laminar.node.partition.deduplication import first_try
from laminar.node.partition.min_replicas import Copies
from laminar.node.partition.problems import cut_off, lost_leadership
from laminar.node.partition.receipts import Askers, Receipt, Waiter, fail
from laminar.node.partition.state.cursors import MAX_CURSORS, Cursor, CursorChange, Cursors
from laminar.node.partition.state.derived_state import encode_state
from laminar.node.partition.state.group_members import Rosters
from laminar.node.partition.state.producers import Producers
from laminar.node.partition.state.state import Tables
from raft.values import EntryTooLarge, NotLeader, TooMuchUncommitted

UNCOMMITTED_BYTES = 64 * 1024 * 1024
# A start that gives up so much of the segment that is written to ends that segment.
WORTH_A_SEGMENT = 1024 * 1024
# Readers that a commit wakes in one turn of the loop.
WOKEN_AT_ONCE = 64


def _no_refusal() -> Problem | None:
    return None


def _no_minimum() -> int:
    return 1


class Partition:
    """A replica of partition `number` of `topic`; attach its `Replica` before use."""

    def __init__(
        self,
        *,
        topic: str,
        number: int,
        driver: Driver,
        log: Log,
        refusal: Callable[[], Problem | None] = _no_refusal,
        min_replicas: Callable[[], int] = _no_minimum,
    ) -> None:
        self.topic = topic
        self.number = number
        self.log = log
        self.replica: Replica
        self._driver = driver
        self._refusal = refusal
        self._loop = asyncio.get_running_loop()
        self.tables = Tables(log.start.index)
        self.rosters = Rosters()
        self.copies = Copies(self, wanted=min_replicas)
        self._waiters: dict[int, list[Waiter]] = {}
        self._uncommitted_bytes = 0
        self._sizes: dict[int, int] = {}
        self._door = Door(self._propose_from_door, closed=self._closed)
        self._fetchers: dict[asyncio.Future[None], None] = {}
        # Those of them that are woken by what was committed, first come, first.
        self._woken: deque[asyncio.Future[None]] = deque()
        self._draining = False
        # Term, committed index, and what answers say of them: the same for all that one commit settles.
        self.window: tuple[int, int, bytes] = (-1, -1, b"")
        self.appended_batches = 0
        self.fetched_bytes = 0

    # -- the machine: told by the driver -----------------------------------------------

    @property
    def producers(self) -> Producers:
        return self.tables.producers

    @property
    def cursors(self) -> Cursors:
        return self.tables.cursors

    @property
    def committed_index(self) -> int:
        """Entries up to here are committed, as far as this replica knows."""
        return self.tables.committed_index

    @property
    def is_whole(self) -> bool:
        """See Machine."""
        return not self.tables.left_out

    def appended(self, header: Header, frame: Buffer) -> None:
        """See Machine."""
        self.tables.appended(header, frame)

    def truncated(self, index: int) -> None:
        """See Machine."""
        self.tables.truncated(index)
        outcome = self._outcome_of_truncated
        for lost in [waiting for waiting in self._waiters if waiting >= index]:
            for waiter in self._waiters.pop(lost):
                fail(waiter.future, cut_off(self, outcome))
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
        self.tables.committed(index)
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
                        if waiter.copied and not self.copies.are_there(done):
                            self.copies.await_them(done, waiter)
                        else:
                            waiter.future.set_result(waiter.receipt)
                    else:
                        waiter.future.set_exception(cut_off(self, self._outcome_of_truncated))
                self._forget(done)
            self._door.committed()
        if self._fetchers:
            idle = not self._woken
            self._woken.extend(self._fetchers)
            self._fetchers.clear()
            if idle:
                self._wake_some()
        if self.tables.due_start is not None:
            self.carry_out_start()

    def _forget(self, index: int) -> None:
        self._door.done(index)
        self._uncommitted_bytes -= self._sizes.pop(index, 0)

    def led(self, leading: bool) -> None:
        """See Machine. What was not proposed yet is refused at once; the rest waits for its fate."""
        if leading:
            self.rosters.led(self._loop.time())
            return
        self.copies.lost_leadership()
        self._door.refuse(lost_leadership(self, outcome="not_applied"))

    def failed(self, error: Exception) -> None:
        """See Machine. What was proposed may be on other replicas: nobody can tell what becomes of it."""
        self.led(False)
        for waiters in self._waiters.values():
            for waiter in waiters:
                fail(waiter.future, Problem("outcome_unknown", f"this replica has stopped: {error}"))
        self._waiters.clear()
        self.stop_waiting()

    def stop(self, error: Exception) -> None:
        """A mistake was met in this partition's state: its replica takes part in nothing until a restart."""
        self._driver.stop_replica(self.replica, error)

    def _wake_some(self) -> None:
        """Wake readers, and the rest in later turns: each reads and encodes what is new."""
        for _ in range(min(len(self._woken), WOKEN_AT_ONCE)):
            _wake(self._woken.popleft())
        if self._woken:
            self._loop.call_soon(self._wake_some)

    def stop_waiting(self) -> None:
        """Let readers who wait for new records go: this replica will have none for them."""
        self._draining = True
        fetchers, self._fetchers = self._fetchers, {}
        for fetcher in fetchers:
            _wake(fetcher)

    @property
    def leads(self) -> bool:
        """Whether appends are taken here: not while their producers are known in part only."""
        return self.replica.core.is_leader and self.replica.failure is None and self.is_whole

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
        row = self.log.index_entry(self.committed_index)
        return row.base_offset + row.count

    def bounds(self) -> reads.Bounds:
        """Return both ends of what readers may see now."""
        return reads.Bounds(self.start_offset, self.end_offset)

    @property
    def replicas(self) -> int:
        """Voters of the group: what an append is replicated over. A majority of them, and at least the
        topic's `min_replicas`, have it when it is acknowledged.
        """
        return len(self.replica.configuration.voters)

    @property
    def acknowledged_end(self) -> int:
        """The offset after all that is committed and has its copies (`min_replicas`). Leader only."""
        index = self.copies.acknowledged_index
        if index == self.committed_index:
            return self.end_offset
        return self.log.index_entry(index).next_offset if index > self.log.start.index else self.start_offset

    def hears(self, member: int) -> bool:
        """As the leader: whether this member's replica was heard lately; itself always."""
        return self._driver.hears(self.replica, member)

    async def wait_past(self, offset: int, wait_s: float) -> bool:
        """Wait until a record at `offset` is committed here; False when the time is over."""
        deadline = self._loop.time() + wait_s
        while self.end_offset <= offset:
            remaining = deadline - self._loop.time()
            if remaining <= 0 or self._draining:
                return False
            future: asyncio.Future[None] = self._loop.create_future()
            self._fetchers[future] = None
            handle = self._loop.call_later(remaining, _wake, future)
            try:
                await future
            finally:
                handle.cancel()
                self._fetchers.pop(future, None)
        return True

    async def confirmed_end(self) -> int:
        """The end as a majority confirmed it after this call (linearizable). Leader only."""
        try:
            index = await self._driver.confirm(self.replica)
        except ConnectionError as error:
            raise lost_leadership(self, outcome="not_applied") from error
        if index > self.committed_index:
            # The core knows the index; the machine is told in the same turn.
            raise AssertionError(f"confirmed {index} but committed {self.committed_index}")
        return self.end_offset

    async def frames(self, offset: int, *, max_bytes: int, before: int | None = None) -> list[Buffer]:
        """See `reads.frames`."""
        found = await reads.frames(self, offset, max_bytes=max_bytes, before=before)
        self.fetched_bytes += sum(map(len, found))
        return found

    async def tagged_frames(self, offset: int, *, tag: str, max_bytes: int) -> tuple[list[Buffer], int]:
        """See `reads.tagged_frames`."""
        found, behind = await reads.tagged_frames(self, offset, tag=tag, max_bytes=max_bytes)
        self.fetched_bytes += sum(map(len, found))
        return found, behind

    # -- appends -----------------------------------------------------------------------

    def append_records(self, records: Records) -> asyncio.Future[Receipt]:
        """Records without a producer id: joined at the door with what else arrives this turn."""
        self.check_leads()
        self._check_room()
        self.copies.check()
        return self._door.knock(records)

    def stands_at(self, offset: int) -> bool:
        """Whether the next record appended now would get this offset."""
        return not self._door and self.log.next_offset == offset

    def append_frame(
        self, frame: bytearray | memoryview, header: Header, *, key_made_ms: int | None = None
    ) -> asyncio.Future[Receipt]:
        """A verified, unstamped columnar batch; recognised when it was appended before.

        `key_made_ms`: when its idempotency key was made, as its client says.
        """
        self.check_leads()
        # A retry first: it takes no room, and to refuse it as "not applied" would be a lie.
        known = first_try(self, header, key_made_ms=key_made_ms)
        if known is not None:
            return self.when_committed(*known)
        return self._append(frame, header.count)

    def accept_frame(self, frame: bytearray | memoryview, header: Header) -> Receipt:
        """As `append_frame` of a producer's batch, without waiting for the commit.

        The batch is in this leader's log, and may be lost with it: the receipt is no promise.
        """
        assert header.producer_id != NO_PRODUCER, "who accepts must recognise what comes again"
        self.check_leads()
        known = first_try(self, header)
        if known is not None:
            return known[1]
        self._make_way()
        receipt = Receipt(self.number, self.log.next_offset, header.count)
        self._propose(frame, [], copied=True)
        return receipt

    def append_control(
        self, frame: bytearray | memoryview, *, count: int = 0, even_if_full: bool = False
    ) -> asyncio.Future[Receipt]:
        """An unstamped entry of another kind; `count`: the offsets that it takes.

        `even_if_full`: it ends what was begun, or gives something up, and so must go on a full disk, too.
        """
        self.check_leads()
        return self._append(frame, count, even_if_full=even_if_full)

    def _make_way(self, *, even_if_full: bool = False) -> None:
        """Before a batch that does not come by way of the door."""
        if not even_if_full:
            self._check_room()
            self.copies.check()
        if self._door:
            # They came first: no batch overtakes them or moves the end that one of them was checked against.
            self._door.empty()
            self.check_leads()

    def _append(
        self, frame: bytearray | memoryview, count: int, *, even_if_full: bool = False
    ) -> asyncio.Future[Receipt]:
        self._make_way(even_if_full=even_if_full)
        future: asyncio.Future[Receipt] = self._loop.create_future()
        self._propose(frame, [(future, count)], copied=True)
        return future

    def when_committed(self, index: int, receipt: Receipt) -> asyncio.Future[Receipt]:
        """Answers `receipt` once the entry now at `index` is committed and has its copies, or as an append
        that failed.
        """
        future: asyncio.Future[Receipt] = self._loop.create_future()
        now_s = self._loop.time()
        if index <= self.committed_index:
            if self.copies.are_there(index):
                future.set_result(receipt)
            else:
                self.copies.await_them(index, Waiter(future, receipt, 0, now_s))
            return future
        term = self.log.term(index)
        assert term is not None, f"{self.topic}/{self.number}: entry {index} has no term"
        self._waiters.setdefault(index, []).append(Waiter(future, receipt, term, now_s, copied=True))
        return future

    def check_leads(self) -> None:
        """Raises `Problem` where only the leader can answer."""
        if not self.leads:
            self._driver.wanted(self.replica)
            raise lost_leadership(self, outcome="not_applied")

    def _check_room(self) -> None:
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        used = self._uncommitted_bytes + self._door.size_bytes
        if used > UNCOMMITTED_BYTES:
            raise self._too_much(used, UNCOMMITTED_BYTES)

    def _too_much(self, used: int, limit: int) -> Problem:
        return Problem(
            "overloaded",
            f"partition {self.topic}/{self.number} has {used} bytes waiting to be committed",
            field="uncommitted_bytes",
            value=used,
            limit=limit,
            retry_after_ms=100,
            outcome="not_applied",
        )

    def _propose(
        self,
        frame: bytearray | memoryview,
        askers: Askers,
        *,
        copied: bool = False,
        opens_segment: bool = False,
    ) -> int:
        """`copied`: who asked is answered only when it has the copies that the topic asks for."""
        offset = self.log.next_offset
        # The waiters are there before the proposal: with one voter the commit may follow within it.
        index, term = self.log.last_index + 1, self.replica.core.term
        waiters = []
        now_s = self._loop.time()
        for future, count in askers:
            waiters.append(Waiter(future, Receipt(self.number, offset, count), term, now_s, copied=copied))
            offset += count
        self._waiters[index] = waiters
        self._sizes[index] = len(frame)
        self._uncommitted_bytes += len(frame)
        try:
            placed = self._driver.propose(self.replica, frame, opens_segment=opens_segment)
        except (NotLeader, TooMuchUncommitted, EntryTooLarge) as error:
            # It hands over, or too much waits, also of leaders before. Nothing of this may stay behind.
            self._waiters.pop(index, None)
            self._forget(index)
            if isinstance(error, TooMuchUncommitted):
                raise self._too_much(error.uncommitted_bytes, error.limit_bytes) from None
            if isinstance(error, EntryTooLarge):
                raise Problem(
                    "too_large",
                    f"a batch for {self.topic}/{self.number} is larger than what replicas can be sent",
                    field="batch_bytes",
                    value=error.entry_bytes,
                    limit=error.limit_bytes,
                    outcome="not_applied",
                ) from None
            raise lost_leadership(self, outcome="not_applied") from None
        except Exception:
            # It was not proposed: the next batch has this place, and its own waiters.
            self._waiters.pop(index, None)
            self._forget(index)
            raise
        assert placed == (index, term), f"proposed at {placed}, expected {(index, term)}"
        self.appended_batches += 1
        return index

    def _propose_from_door(self, frame: bytearray, askers: Askers) -> int | None:
        index = self._propose(frame, askers, copied=True)
        return index if index > self.committed_index else None

    def _closed(self) -> Problem | None:
        return None if self.leads else lost_leadership(self, outcome="not_applied")

    def give_up(self, *, older_than_s: float) -> None:
        """Answer those who have waited too long for a commit: nobody can tell yet what becomes of it."""
        latest = self._loop.time() - older_than_s
        self.copies.give_up(latest_s=latest)
        if not self._waiters:
            return
        for waiters in list(self._waiters.values()):
            for waiter in waiters:
                if waiter.since_s <= latest:
                    detail = f"not committed within {older_than_s:g} s: a majority does not answer"
                    fail(waiter.future, Problem("outcome_unknown", detail))

    # -- the log's start ---------------------------------------------------------------

    def carry_out_start(self) -> None:
        """Let the log begin where the last committed entry says, if this replica may by now.

        Not in a log that failed: the entry is read again when the log is opened again. The entry, which
        carries the derived state, is durable before the start is: the journal's order sees to that.
        """
        log = self.log
        due = self.tables.due_start
        if due is None or log.failure is not None:
            return
        _, record = due
        self.tables.due_start = None
        # One that was carried out before a restart is no news.
        if record.index > log.start.index:
            log.set_start(index=record.index, term=record.term, offset=record.offset, time_ms=record.time_ms)

    async def index_before(self, offset: int) -> int:
        """The last committed entry whose records all lie before `offset`."""
        index = await self.log.find_offset(offset)
        if index is None:
            return self.log.start.index if offset <= self.start_offset else self.committed_index
        return min(index - 1, self.committed_index)

    def start_limit(self, index: int) -> int:
        """The highest entry up to `index` behind which the log may begin, for all that this replica knows.

        What is damaged can't say where it ends, and what is staged or published stays whole.
        """
        lowest = self.log.start.index
        while index > lowest:
            whole = self.tables.stages.start_limit(index)
            if whole == index and self.log.term(index) is not None:
                return index
            index = min(whole, index - 1)
        return lowest

    def move_start(self, index: int) -> asyncio.Future[Receipt]:
        """Propose that all replicas give up entry `index` and all before it. Leader only, committed entries
        only. Done when it is committed, and carried out here; `Receipt.offset` says nothing.
        """
        self.check_leads()
        log = self.log
        assert log.start.index < index <= self.committed_index and self.start_limit(index) == index, (
            f"a start behind {index} of {log!r}, committed {self.committed_index}"
        )
        row = log.index_entry(index)
        record = LogStartRecord(
            index=index,
            term=row.term,
            offset=row.next_offset,
            time_ms=row.append_time_ms,
            configuration=self.replica.configuration_record,
            state=encode_state(self.tables.state()),
        )
        future: asyncio.Future[Receipt] = self._loop.create_future()
        self._propose(record.frame(), [(future, 0)], opens_segment=self._is_worth_a_segment(row))
        return future

    def _is_worth_a_segment(self, row: IndexEntry) -> bool:
        """Whether the segment that is written to should end, as much of it is given up: all up to this entry.

        If nothing in it lies after that, its files go at once, else with the next start.
        """
        return row.index >= self.log.segment_first_indexes[-1] and row.position + row.size >= WORTH_A_SEGMENT

    # -- cursors -----------------------------------------------------------------------

    def set_cursor(
        self,
        name: str,
        position: int | None,
        *,
        expected: int | None,
        check: bool,
        owner: str,
        now_ms: int,
        expected_owner: str | None = None,
    ) -> asyncio.Future[Receipt]:
        """Commit a cursor's position (None deletes). With `check` only if it stands at `expected`.

        What has an owner is changed by its owner alone: `expected_owner` is who must own it now ("": nobody);
        without it `owner` himself must, or nobody. 409 `fenced` names who does. Deleting asks for no owner.

        Compared with the log's end, not with what is committed: of two that race, the second
        sees the first.
        """
        self.check_leads()
        self._check_room()
        current = self.cursors.get(name)
        standing = current.position if current is not None else None
        if position is not None:
            self._check_owner(name, current.owner if current is not None else "", owner, expected_owner)
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
        if current is None and position is not None and len(self.cursors) >= MAX_CURSORS:
            raise Problem(
                "quota",
                f"{self.topic}/{self.number} has so many cursors already",
                field="cursor",
                value=len(self.cursors),
                limit=MAX_CURSORS,
                hint="DELETE cursors that nobody uses.",
                outcome="not_applied",
            )
        change = CursorChange(name=name, position=position, changed_ms=now_ms, owner=owner)
        future: asyncio.Future[Receipt] = self._loop.create_future()
        frame = build_control(Kind.CURSOR, msgspec.msgpack.encode(change))
        self._propose(frame, [(future, 0)])
        return future

    def _check_owner(self, name: str, present: str, owner: str, expected_owner: str | None) -> None:
        """Raises 409 `fenced` for a change of what `present` owns by another."""
        if present in (("", owner) if expected_owner is None else (expected_owner,)):
            return
        # Owning it already is a retry of what went through: no two owners have one name.
        if owner and present == owner:
            return
        raise Problem(
            "fenced",
            f"cursor {name!r} of {self.topic}/{self.number} is owned by "
            + (repr(present) if present else "nobody"),
            field="owner" if expected_owner is None else "expected_owner",
            value=owner if expected_owner is None else expected_owner,
            limit=present,
            outcome="not_applied",
        )

    def cursor(self, name: str) -> Cursor | None:
        """A cursor as it is committed here: a later change may still be lost."""
        return self.cursors.committed_at(name)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
