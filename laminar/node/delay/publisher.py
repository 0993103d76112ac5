"""Publish the delayed records of one partition when they are due, and change their times.

The leader does this.

A task runs while this replica leads and records are pending. It knows the records that are due within
`NEAR_MS`, reads those whose time has come, and appends them as one batch in a `PUBLISH` entry, in the order
of their times: never before their time by this leader's clock, and as soon after it as a commit takes. While
there is no leader, records are late.

A record is published once: the entry names its place, and is proposed in the same turn of the loop in which
the table *at the log's end* was read. The same applies to a change of its time: of a change and a
publication, the first in the log counts. A change is answered when it is committed.

The memory of the task lasts for one term, and is only a cache: everything is in the log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from enum import Enum
from heapq import heappop, heappush
from typing import Final

import msgspec

from laminar.batch import HEADER_SIZE, Kind
from laminar.batch.header import seal
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import EntriesTrimmed, StorageError
from laminar.node.delay.contents import EARLIEST_MS, Contents, Due, joined, next_ms, tag_mask, written_ms
from laminar.node.partition.partition import Partition
from laminar.node.partition.problems import too_much_delayed
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.delayed_records import (
    CANCELLED,
    MAX_CHANGED,
    Changed,
    DelayedRecords,
    delayed_entry,
)
from laminar.node.partition.state.staging_entries import DueRecords, PublishRecord
from laminar.node.trace.partition_trace import asked_by
from laminar.node.trace.ring import Who
from laminar.wire.delayed import NUMBERS

_log = logging.getLogger("laminar.delay")

NEAR_MS: Final = 60_000
"""Records that are due within this time are known one by one."""
MAX_NEAR: Final = 250_000
"""The most records that are known one by one; if there are more, only those that are due first are known."""
PUBLISH_RECORDS: Final = 10_000
"""The most records in one `PUBLISH` entry."""
UNDER_WAY: Final = 2
"""The most entries of one partition that wait for their commit."""
WAIT_S: Final = 1.0
"""The longest sleep of the task, because the wall clock may be set forward."""
PAUSE_S: Final = 0.5
"""The pause after a refusal, and before an unreadable entry is read again."""


class State(Enum):
    """The state of a delayed record, looked up by its number."""

    PENDING = "pending"
    PUBLISHED = "published"
    CANCELLED = "cancelled"
    ABSENT = "absent"
    """The number is from another partition, and the record is not pending here."""
    ELSEWHERE = "elsewhere"
    """The partition is sealed: the partitions that follow it have the record, or know its state."""
    UNKNOWN = "unknown"
    """This partition has never given this number to a record."""


class Publisher:
    """Publishes the delayed records of one partition, in a task that `wake` begins and `stop` ends."""

    def __init__(self, partition: Partition) -> None:
        """Create the publisher of a partition; it is idle until `wake` is called."""
        self.contents = Contents(partition)
        self.published = 0
        self.late_s = 0.0
        """The lateness of the last published record, in seconds after its time."""
        self._partition = partition
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._term = -1
        self._table: DelayedRecords | None = None
        # A heap of the records due before `_known_to_ms`, of entries up to `_known_entry`. Records that are
        # no
        # longer pending, or have another time, are dropped when they come up.
        self._near: list[Due] = []
        self._known_to_ms = 0
        self._known_entry = 0
        # By entry a time: all of its records that are due before are known, have ended, or got other times.
        self._next_ms: dict[int, int] = {}
        # By unreadable entry: the loop's time at which it is read again.
        self._unreadable: dict[int, float] = {}
        self._under_way: set[asyncio.Future[Receipt]] = set()

    @property
    def delayed(self) -> DelayedRecords:
        """The partition's table, as of the log's end."""
        return self._partition.state.delayed

    @property
    def publishes(self) -> bool:
        """Whether this replica leads a partition that takes records."""
        return self._partition.leads and self._partition.state.succession.takes_records

    def wake(self) -> None:
        """Read the table again, because records were added or this replica has become the leader."""
        self._woken.set()
        if self._task is None and self.publishes and len(self.delayed):
            self._task = self._loop.create_task(self._run())

    def stop(self) -> None:
        """End the task: this replica leads no more, or the process ends."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self.forget()  # also the records that it was about to publish

    # -- the record of a number ------------------------------------------------------------

    async def state(self, number: int) -> State:
        """Return the committed state of a delayed record by its number. Leader only.

        A record whose cancellation is forgotten counts as published: see `DelayedRecords.forgotten_ms`.

        Raises:
            Problem: 503 `not_leader`.
        """
        self._partition.check_leads()
        found = self._state(number)
        await self._seen()
        return found

    async def written_ms(self, number: int) -> int | None:
        """Return the original due time (ms) of a pending record; None if it is not pending.

        Raises:
            StorageError: its entry cannot be read here.
        """
        place = self.delayed.find(number)
        while place is not None:
            batch = None
            try:
                batch = await self.contents.batch(place.entry)
            except EntriesTrimmed:
                if self.delayed.is_pending(place):
                    raise
            # While it was read the record may have been published, cancelled or copied.
            now = self.delayed.find(number)
            if now == place and batch is not None:
                return written_ms(batch, place.row)
            place = now
        return None

    def _state(self, number: int) -> State:
        table = self.delayed
        if table.find(number) is not None:
            return State.PENDING
        if number in table.cancelled:
            return State.CANCELLED
        own, count = divmod(number, NUMBERS)
        if own == self._partition.number and count >= table.next_count:
            return State.UNKNOWN
        if self._partition.state.succession.status == "sealed":
            return State.ELSEWHERE
        return State.PUBLISHED if own == self._partition.number else State.ABSENT

    async def change(self, number: int, due_ms: int, *, was_ms: int, who: Who | None = None) -> State:
        """Give a pending record another due time (ms), or cancel it (`CANCELLED`); return its state before.

        Leader only. If it returns `PENDING`, the change is made and committed; otherwise nothing is changed.
        `was_ms` is the time in the record's id. `who` is the requester, for the trace.

        Raises:
            Problem: 503 `not_leader` or `changing`; 429 `quota` if too many records have changed times.
            DamagedRange: its entry is damaged here.
        """
        partition = self._partition
        partition.check_leads()
        place = self.delayed.find(number)
        if place is not None and not partition.state.succession.takes_records:
            raise Problem(
                "changing",
                f"{partition.context.name} has ended: the partitions that follow get its delayed records",
                retry_after_ms=500,
                outcome="not_applied",
            )
        written = await self.written_ms(number)
        place = self.delayed.find(number)
        if place is None or written is None:
            return await self.state(number)
        moved = self.delayed.moved.get(number)
        if due_ms != CANCELLED and moved is None and len(self.delayed.moved) >= MAX_CHANGED:
            raise too_much_delayed(partition.context.name, "changed", len(self.delayed.moved), MAX_CHANGED)
        effective = moved.due_ms if moved is not None else written
        change = Changed([number, due_ms, max(effective, was_ms)])
        with asked_by(partition.context.trace, who):
            future = partition.appends.append_control(delayed_entry(change), even_if_full=True)
        if due_ms != CANCELLED:
            self._note(Due(due_ms, number, place))
            self.wake()
        await future
        return State.PENDING

    async def _seen(self) -> None:
        """Wait until all entries that are in the log now are committed: then the table as read is final."""
        partition = self._partition
        await partition.reader.confirmed_bounds()
        await partition.appends.when_committed(
            partition.log.last_index, Receipt(partition.number, 0, 0), copied=False
        )

    # -- the task --------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            while self.publishes and len(self.delayed):
                self._woken.clear()
                self._begin_term()
                if await self._look() and not await self._publish():
                    await self._wait()
        except Exception as error:  # noqa: BLE001  # stops this partition's replica
            self._partition.stop(error)
        finally:
            if self._task is asyncio.current_task():
                self._task = None

    def _begin_term(self) -> None:
        """Drop the memory of an earlier term, or of a replaced table."""
        term = self._partition.replica.core.term
        if term == self._term and self._table is self.delayed:
            return
        self._term, self._table = term, self.delayed
        self.forget()
        self.contents.forget()

    def forget(self) -> None:
        """Forget the records that are due soon, because they may be in other places now."""
        self._near.clear()
        self._known_to_ms = 0
        self._known_entry = 0
        self._next_ms.clear()
        self._unreadable.clear()

    def _now_ms(self) -> int:
        return self._partition.replica.wall_ms()

    async def _look(self) -> bool:
        """Read the entries with records that are due soon; return False if this replica must not publish."""
        table, now_ms = self.delayed, self._now_ms()
        # While many records are known, which are due before all others, the others are not needed.
        if self._known_to_ms < now_ms + NEAR_MS // 2 and len(self._near) < MAX_NEAR // 4:
            self._known_to_ms = now_ms + NEAR_MS
            self._known_entry = 0
            self._next_ms = {entry: at for entry, at in self._next_ms.items() if entry in table.batches}
            for number, moved in table.moved.items():
                self._note(Due(moved.due_ms, number, moved.place))
        fresh = []
        known, self._known_entry = self._known_entry, next(reversed(table.batches), self._known_entry)
        for entry in reversed(table.batches):  # those of this term are at the end
            if entry <= known:
                break
            batch = table.batches[entry]
            if self._next_ms.get(entry, batch.first_due_ms) < self._known_to_ms:
                fresh.append(batch)
        fresh += [table.batches[entry] for entry in self._readable_again() if entry in table.batches]
        for batch in sorted(fresh, key=lambda batch: batch.first_due_ms):
            if self._next_ms.get(batch.index, batch.first_due_ms) >= self._known_to_ms:
                continue  # `_known_to_ms` has become lower meanwhile
            try:
                found = await self.contents.due(
                    batch, from_ms=self._next_ms.get(batch.index), before_ms=self._known_to_ms
                )
                self._next_ms[batch.index] = next_ms(
                    await self.contents.batch(batch.index), self._known_to_ms
                )
            except StorageError as error:
                self._set_aside(batch.index, error)
                continue
            for each in found:
                self._note(each)
            if len(self._near) > MAX_NEAR:
                self._know_less()
            if not self.publishes or self._table is not self.delayed:
                return False
        return True

    def _know_less(self) -> None:
        """Forget the later half of the records that are due soon, and read them again sooner."""
        self._near.sort()
        dropped = self._near[MAX_NEAR // 2 :]
        del self._near[MAX_NEAR // 2 :]
        self._known_to_ms = dropped[0].due_ms
        for due in dropped:
            entry = due.place.entry
            self._next_ms[entry] = min(due.due_ms, self._next_ms.get(entry, due.due_ms))

    def _set_aside(self, entry: int, error: StorageError) -> None:
        """Postpone the records of an unreadable entry, so that others do not wait for them.

        As a rule the entry is repaired from another replica.
        """
        if entry in self.delayed.batches:
            _log.warning("%s: delayed records wait: %s", self._partition.replica.name, error)
            # All of the entry is read again: a record may now be due before its original time.
            self._next_ms[entry] = EARLIEST_MS
            self._unreadable[entry] = self._loop.time() + PAUSE_S

    def _readable_again(self) -> list[int]:
        """Return the unreadable entries that are due to be read again."""
        found = [entry for entry, at in self._unreadable.items() if at <= self._loop.time()]
        for entry in found:
            del self._unreadable[entry]
        return found

    def _note(self, due: Due) -> None:
        if due.due_ms < self._known_to_ms:
            heappush(self._near, due)

    def _is_due(self, due: Due) -> bool:
        """Return whether a record is still pending at its place, and due at its time."""
        if not self.delayed.is_pending(due.place):
            return False
        moved = self.delayed.moved.get(due.number)
        return moved is None or moved.due_ms == due.due_ms

    async def _publish(self) -> bool:
        """Publish the records that are due now; return False if there are none."""
        chosen = self._chosen(self._now_ms())
        if not chosen:
            return False
        while len(self._under_way) >= UNDER_WAY:
            await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        try:
            records = await self.contents.records(chosen, readable=True)
            # Records that were published, cancelled or changed meanwhile are left out; no await follows.
            rest = chosen[len(records) :]
            records = [each for each in records if self._is_due(each[0])]
            if records and self.publishes and self._term == self._partition.replica.core.term:
                self._propose([due for due, _ in records], joined(records))
                records = []
            chosen = [due for due, _ in records] + rest
        except StorageError as error:
            unreadable = chosen[0].place.entry
            self._set_aside(unreadable, error)
            chosen = [due for due in chosen if due.place.entry != unreadable]
        except Problem as problem:
            _log.debug("%s: delayed records wait: %s", self._partition.replica.name, problem)
            await asyncio.sleep(PAUSE_S)
        for due in chosen:
            heappush(self._near, due)
        return True

    def _chosen(self, now_ms: int) -> list[Due]:
        chosen: list[Due] = []
        near = self._near
        while near and near[0].due_ms <= now_ms and len(chosen) < PUBLISH_RECORDS:
            due = heappop(near)
            moved = self.delayed.moved.get(due.number)
            if moved is not None and moved.due_ms == due.due_ms:
                due = due._replace(place=moved.place)  # it may have been copied since
            if self._is_due(due) and (not chosen or chosen[-1] != due):
                chosen.append(due)
        return chosen

    def _propose(self, chosen: Sequence[Due], frame: bytearray) -> None:
        rows = [value for due in chosen for value in due.place]
        record = PublishRecord(b"", 0, 0, [], None, DueRecords(rows, bytes(frame)))
        entry = bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record)
        seal(entry, Kind.PUBLISH, count=len(chosen), tag_mask=tag_mask(frame))
        future = self._partition.appends.append_control(entry, count=len(chosen))
        self.published += len(chosen)
        self.late_s = max(0, self._now_ms() - chosen[0].due_ms) / 1000
        self._under_way.add(future)
        future.add_done_callback(self._done)

    def _done(self, future: asyncio.Future[Receipt]) -> None:
        self._under_way.discard(future)
        if not future.cancelled():
            # the outcome is ignored: if the entry is lost, the next leader publishes its records
            future.exception()

    async def _wait(self) -> None:
        """Wait until the next record is due, or records are added."""
        now_ms = self._now_ms()
        wait_s = WAIT_S if not self._near else min(WAIT_S, max(0.001, (self._near[0].due_ms - now_ms) / 1000))
        handle = self._loop.call_later(wait_s, self._woken.set)
        try:
            await self._woken.wait()
        finally:
            handle.cancel()
