"""The producer's half of the promise "in order and not doubled", as a pure object.

Records go into the open batch of their partition's `Lane`; `take` hands out batches to send,
several in flight per lane; `acknowledged` and `failed` say how each went. The clock, the
connections and the building of frames belong to `sender.py`.

1. Batches of a lane get consecutive sequences from 0, in the order their records were put,
   when they are first taken.
2. After a failure nothing of the lane is sent until every request under way was answered or
   lost; then all that has no receipt is sent again, in order, with the same sequences. So
   whatever the server did with each, the log holds them once and in order.
3. A batch that failed for good leaves a hole in the sequences. What follows it either fails
   too (`stop_on_failure`: a producer, which promises the order of the whole stream), or goes
   on under the next epoch, which the server takes as a new numbering from 0 and which fences
   every straggler of the old one. A batch whose outcome is unknown is never renumbered: that
   could double it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

from laminar.client.errors import Error, OutcomeUnknown, Undelivered
from laminar.client.records import Receipt

# What a record costs in a frame beyond its bytes: offsets of value and key, validity.
RECORD_OVERHEAD_BYTES = 10
# What a server takes unless it is told otherwise; refused here, a record costs nobody anything.
MAX_RECORD_BYTES = 8 << 20
# The server remembers this many batches of a producer; a window beyond it could not be resent.
MAX_WINDOW = 64


T = TypeVar("T")


def _extended(column: list[T | None] | None, before: int, cell: T) -> list[T | None]:
    """`column` with `cell` behind `before` cells, of which the missing ones are None."""
    if column is None:
        column = []
    column.extend([None] * (before - len(column)))
    column.append(cell)
    return column


def padded(column: list[T | None] | None, count: int) -> list[T | None] | None:
    """`column` with None for the records at its end that have no such cell."""
    if column is not None:
        column.extend([None] * (count - len(column)))
    return column


class Pending:
    """A batch on its way: its records, then its receipt or error.

    ``values`` and ``keys`` are parallel; the other columns are None until a record has one.
    `settled` turns true once, before the callbacks run.
    """

    __slots__ = (
        "attempts",
        "base_offset",
        "callbacks",
        "deadline_ms",
        "epoch",
        "error",
        "headers",
        "keyed",
        "keys",
        "maybe_applied",
        "partition",
        "replicas",
        "sequence",
        "settled",
        "size_bytes",
        "synced",
        "tags",
        "timestamps",
        "under_way",
        "values",
    )

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.values: list[bytes] = []
        self.keys: list[bytes | None] = []
        self.keyed = False
        self.tags: list[str | None] | None = None
        self.headers: list[Mapping[str, bytes] | None] | None = None
        self.timestamps: list[int | None] | None = None
        self.size_bytes = 0
        self.deadline_ms = -1
        self.sequence = -1
        self.epoch = 0
        self.attempts = 0
        self.under_way = False
        self.maybe_applied = False
        self.settled = False
        self.error: Error | None = None
        self.base_offset = -1
        self.replicas = 0
        self.synced = False
        self.callbacks: list[Callable[[], None]] = []

    def receipt(self, position: int) -> Receipt:
        """The receipt of the record at `position`, or its error raised; only once settled."""
        if self.error is not None:
            raise self.error
        assert self.settled, "asked for a receipt before the batch was settled"
        return Receipt(self.partition, self.base_offset + position, self.replicas, self.synced)

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` once settled; it may be called twice, and from either thread.

        The list is looked at again after the append, so no lock is needed between the thread
        that asks and the one that settles.
        """
        self.callbacks.append(callback)
        if self.settled:
            callback()

    def settle(self, error: Error | None = None) -> None:
        assert not self.settled, f"batch {self.sequence} of partition {self.partition} settled twice"
        self.error = error
        self.settled = True
        for callback in self.callbacks:
            callback()

    def undelivered(self) -> list[Undelivered]:
        assert self.error is not None
        outcome = "unknown" if self.maybe_applied else "not_applied"
        return [
            Undelivered(value, key, self.partition, outcome, self.error)
            for value, key in zip(self.values, self.keys, strict=True)
        ]


class Lane:
    """One partition's batches, from the open one to those in flight."""

    __slots__ = (
        "closed",
        "doubtful",
        "epoch",
        "error",
        "flying",
        "next_sequence",
        "open",
        "partition",
        "recovering",
        "renumber",
        "resume_ms",
        "under_way",
    )

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.open: Pending | None = None
        self.closed: deque[Pending] = deque()
        self.flying: deque[Pending] = deque()
        self.doubtful: list[Pending] = []  # given up by `_renumber`, for the outbox to settle
        self.under_way = 0
        self.next_sequence = 0
        self.epoch = 0
        self.recovering = False
        self.renumber = False
        self.resume_ms = 0
        self.error: Error | None = None

    def idle(self) -> bool:
        return self.open is None and not self.closed and not self.flying

    def close_open(self) -> None:
        """The open batch takes no more records."""
        if self.open is not None:
            self.closed.append(self.open)
            self.open = None

    def take(self, *, now_ms: int, window: int, partial_window: int) -> Pending | None:
        """The next batch to send, or None: nothing there, no slot free, or a pause.

        A batch that is not full goes out only while fewer than `partial_window` are in flight:
        what waits meanwhile is joined, and the server does one append for many records.
        """
        if self.recovering and not self._recovered(now_ms=now_ms):
            return None
        if len(self.flying) >= window:
            return None
        if self.closed:
            pending = self.closed.popleft()
        elif self.open is not None and len(self.flying) < partial_window:
            pending = self.open
            self.open = None
        else:
            return None
        if pending.sequence < 0:
            pending.sequence = self.next_sequence
            pending.epoch = self.epoch
            self.next_sequence += 1
        pending.attempts += 1
        pending.under_way = True
        self.flying.append(pending)
        self.under_way += 1
        return pending

    def _recovered(self, *, now_ms: int) -> bool:
        """Whether sending may go on; if so, all without a receipt is in `closed` again."""
        if self.under_way or now_ms < self.resume_ms:
            return False
        if self.renumber:
            self._renumber()
        self.closed.extendleft(reversed(self.flying))
        self.flying.clear()
        self.recovering = False
        return True

    def _renumber(self) -> None:
        """Go on under the next epoch, without those whose outcome is unknown."""
        self.renumber = False
        self.epoch += 1
        self.next_sequence = 0
        for queue in (self.flying, self.closed):
            for pending in list(queue):
                if pending.maybe_applied:
                    queue.remove(pending)
                    self.doubtful.append(pending)
                else:
                    pending.sequence = -1

    def answered(self, pending: Pending) -> bool:
        """A request of `pending` ended; False if the batch had been given up meanwhile."""
        assert pending.under_way, f"batch {pending.sequence} was not under way"
        pending.under_way = False
        self.under_way -= 1
        return not pending.settled

    def hold(self, *, until_ms: int) -> None:
        """Stop sending; resend once everything under way has ended and `until_ms` is past."""
        self.recovering = True
        self.resume_ms = max(self.resume_ms, until_ms)

    def is_first(self, pending: Pending) -> bool:
        """Whether nothing sent before `pending` still lacks a receipt."""
        return bool(self.flying) and self.flying[0] is pending

    def drop(self, pending: Pending) -> None:
        """Forget a batch that is settled or about to be."""
        for queue in (self.flying, self.closed):
            if pending in queue:
                queue.remove(pending)
                return
        if self.open is pending:
            self.open = None

    def waiting(self) -> list[Pending]:
        """Everything without a receipt, in order."""
        return [*self.flying, *self.closed, *([self.open] if self.open is not None else [])]


class Outbox:
    """All lanes of a producer. Not thread-safe: a caller with threads holds its own lock.

    `put` is called per record and does as little as it can. `dirty` is true when there may be
    something to take since it was last cleared.
    """

    __slots__ = (
        "_batch_bytes",
        "_lane_of_key",
        "_max_record_bytes",
        "_max_records",
        "_partial_window",
        "_partition_of_key",
        "_stop_on_failure",
        "_window",
        "active",
        "buffered_bytes",
        "failures",
        "lanes",
        "resent",
        "sticky",
        "taken",
    )

    def __init__(
        self,
        *,
        partitions: int,
        partition_of_key: Callable[[bytes], int],
        batch_bytes: int,
        max_records: int = 65_536,
        max_record_bytes: int = MAX_RECORD_BYTES,
        window: int = 4,
        partial_window: int = 1,
        stop_on_failure: bool = True,
        first_partition: int = 0,
    ) -> None:
        assert 1 <= partial_window <= window <= MAX_WINDOW, (partial_window, window)
        self.lanes = [Lane(partition) for partition in range(partitions)]
        self.sticky = self.lanes[first_partition % partitions]
        self.active: dict[int, Lane] = {}  # lanes that are not idle, by partition
        self.buffered_bytes = 0
        self.failures: list[Pending] = []
        self.taken = 0
        self.resent = 0
        self._partition_of_key = partition_of_key
        self._lane_of_key: dict[bytes, Lane] = {}
        self._batch_bytes = batch_bytes
        self._max_records = max_records
        self._max_record_bytes = max_record_bytes
        self._window = window
        self._partial_window = partial_window
        self._stop_on_failure = stop_on_failure

    def lane_of(self, key: bytes) -> Lane:
        """The lane of a key, remembered: a topic has few keys or many, rarely all of them twice."""
        lane = self._lane_of_key.get(key)
        if lane is None:
            if len(self._lane_of_key) >= 65_536:
                self._lane_of_key.clear()
            lane = self._lane_of_key[key] = self.lanes[self._partition_of_key(key)]
        return lane

    def put(self, value: bytes, key: bytes | None, lane: Lane) -> Pending:
        """Add a record to `lane`; its position is the last of the returned batch's ``values``."""
        pending = lane.open
        if pending is None:
            if lane.error is not None:
                raise lane.error
            pending = lane.open = Pending(lane.partition)
            self.active[lane.partition] = lane
        size_bytes = len(value)
        if size_bytes > self._max_record_bytes:
            self._refuse(lane, pending, size_bytes)
        size_bytes += RECORD_OVERHEAD_BYTES
        if key is not None:
            pending.keyed = True
            size_bytes += len(key)
        if pending.size_bytes + size_bytes > self._batch_bytes and pending.values:
            lane.close_open()
            pending = lane.open = Pending(lane.partition)
            pending.keyed = key is not None
        pending.values.append(value)
        pending.keys.append(key)
        pending.size_bytes += size_bytes
        self.buffered_bytes += size_bytes
        if pending.size_bytes >= self._batch_bytes or len(pending.values) >= self._max_records:
            lane.close_open()
            if lane is self.sticky:
                self.sticky = self.lanes[(lane.partition + 1) % len(self.lanes)]
        return pending

    def put_with(
        self,
        value: bytes,
        key: bytes | None,
        lane: Lane,
        *,
        tag: str | None,
        headers: Mapping[str, bytes] | None,
        timestamp_ms: int | None,
    ) -> Pending:
        """`put` for a record with more columns."""
        pending = self.put(value, key, lane)
        before = len(pending.values) - 1
        if tag is not None:
            pending.tags = _extended(pending.tags, before, tag)
        if headers is not None:
            pending.headers = _extended(pending.headers, before, headers)
        if timestamp_ms is not None:
            pending.timestamps = _extended(pending.timestamps, before, timestamp_ms)
        return pending

    def _refuse(self, lane: Lane, pending: Pending, size_bytes: int) -> None:
        if not pending.values:
            lane.open = None
            if lane.idle():
                self.active.pop(lane.partition, None)
        raise Error(
            f"a value of {size_bytes} bytes is over the limit of {self._max_record_bytes}",
            code="too_large",
            field="value",
            value=size_bytes,
            limit=self._max_record_bytes,
            outcome="not_applied",
        )

    def take(self, lane: Lane, *, now_ms: int) -> Pending | None:
        """The next batch of `lane` to send now, or None."""
        pending = lane.take(now_ms=now_ms, window=self._window, partial_window=self._partial_window)
        doubtful, lane.doubtful = lane.doubtful, []
        for each in doubtful:
            message = f"partition {lane.partition}: the receipt was lost, and an earlier batch failed"
            self._settle(each, OutcomeUnknown(message, code="outcome_unknown", outcome="unknown"))
        if pending is None:
            if lane.idle():
                self.active.pop(lane.partition, None)
            return None
        if lane is self.sticky:
            # Spread by batch: what comes next without a key goes to the next partition.
            self.sticky = self.lanes[(lane.partition + 1) % len(self.lanes)]
        self.taken += 1
        self.resent += pending.attempts > 1
        return pending

    def acknowledged(
        self, lane: Lane, pending: Pending, *, base_offset: int, replicas: int, synced: bool
    ) -> None:
        """The receipt of `pending` came."""
        if not lane.answered(pending):
            return
        lane.drop(pending)
        pending.base_offset = base_offset
        pending.replicas = replicas
        pending.synced = synced
        self._settle(pending, None)
        if lane.idle():
            self.active.pop(lane.partition, None)

    def retry(self, lane: Lane, pending: Pending, *, until_ms: int, maybe_applied: bool) -> None:
        """The attempt failed, the batch did not: it is sent again from `until_ms` on."""
        if lane.answered(pending):
            pending.maybe_applied |= maybe_applied
            lane.hold(until_ms=until_ms)

    def renumber(self, lane: Lane, pending: Pending) -> bool:
        """The server lacks what comes before `pending`; True if that is mended by a new attempt.

        Behind a batch that is to be sent again, or that failed, it is only out of turn. As the first
        it means that the server forgot the producer (it idled for days): nothing of this batch was
        applied, everything before it has its receipt, so it may begin the next epoch.
        """
        out_of_turn = lane.renumber or not lane.is_first(pending)
        forgotten = pending.sequence > 0 and not pending.maybe_applied
        if pending.settled or not (out_of_turn or forgotten):
            return False
        lane.renumber |= not out_of_turn
        self.retry(lane, pending, until_ms=0, maybe_applied=False)
        return True

    def failed(self, lane: Lane, pending: Pending, error: Error, *, maybe_applied: bool) -> None:
        """`pending` is given up with `error`."""
        if not lane.answered(pending):
            return
        pending.maybe_applied |= maybe_applied
        self.give_up(lane, pending, error)

    def give_up(self, lane: Lane, pending: Pending, error: Error) -> None:
        """Fail a batch that is not under way, and what cannot follow it (rule 3)."""
        if not self._stop_on_failure:
            lane.drop(pending)
            self._settle(pending, error)
            if pending.sequence >= 0:
                lane.renumber = True
                lane.hold(until_ms=0)
            return
        lane.error = error
        failed = lane.waiting()  # `pending` among them, in order of sending
        lane.closed.clear()
        lane.flying.clear()
        lane.open = None
        for each in failed:
            # One under way may yet be applied.
            each.maybe_applied |= each.under_way
            self._settle(each, error)
        self.active.pop(lane.partition, None)

    def _settle(self, pending: Pending, error: Error | None) -> None:
        self.buffered_bytes -= pending.size_bytes
        if error is not None:
            self.failures.append(pending)
        pending.settle(error)

    def next_resume_ms(self) -> int | None:
        """The earliest instant at which a held lane may go on, None if none is held by time."""
        held = [lane.resume_ms for lane in self.active.values() if lane.recovering and not lane.under_way]
        return min(held, default=None)
