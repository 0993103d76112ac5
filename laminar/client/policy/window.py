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
   could double it. Nor is any of a named producer, whose epoch says who has its name.
4. A batch that was accepted keeps its records here until it is known to be durable: by an answer
   of the leader that accepted it, in the same term, whose committed end lies behind it. When
   another term or the loss of the leader comes first, rule 2 holds for it as for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from laminar.client.errors import Error, OutcomeUnknown
from laminar.client.policy.lane import MOST_FLYING, Lane, Pending, extended
from laminar.client.policy.resume_numbers import Numbers

# What a record costs in a frame beyond its bytes: offsets of value and key, validity.
RECORD_OVERHEAD_BYTES = 10
# What a server takes unless it is told otherwise; refused here, a record costs nobody anything.
MAX_RECORD_BYTES = 8 << 20
MAX_WINDOW = MOST_FLYING


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
        "numbers",
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
        numbers: Numbers | None = None,
    ) -> None:
        assert 1 <= partial_window <= window <= MAX_WINDOW, (partial_window, window)
        self.lanes = [Lane(partition) for partition in range(partitions)]
        self.sticky = self.lanes[first_partition % partitions]
        self.active: dict[int, Lane] = {}  # lanes that are not idle, by partition
        self.buffered_bytes = 0
        self.failures: list[Pending] = []
        self.taken = 0
        self.resent = 0
        self.numbers = numbers  # of a producer with a name
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
        # Full when another like this one would not fit: so a batch is closed by its own last record, and what
        # comes next without a key begins in the next partition, even if nothing could be sent in between.
        if pending.size_bytes + size_bytes > self._batch_bytes or len(pending.values) >= self._max_records:
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
            pending.tags = extended(pending.tags, before, tag)
        if headers is not None:
            pending.headers = extended(pending.headers, before, headers)
        if timestamp_ms is not None:
            pending.timestamps = extended(pending.timestamps, before, timestamp_ms)
        return pending

    def checkpoint(self) -> int:
        """The highest of the user's numbers that everything up to it is durable; 0 without numbers."""
        return self.numbers.checkpoint(self.active.values()) if self.numbers is not None else 0

    def all_accepted(self) -> bool:
        """Whether everything that was put is durable, or in the log of some leader."""
        return all(lane.all_accepted() for lane in self.active.values())

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

    def accepted(
        self, lane: Lane, pending: Pending, *, base_offset: int, term: int, replicas: int, synced: bool
    ) -> None:
        """A leader took `pending` and promised nothing; `replicas` and `synced` hold once it is durable."""
        if lane.answered(pending):
            pending.base_offset = base_offset
            pending.replicas = replicas
            pending.synced = synced
            lane.accepted(pending, term=term)

    def learned(self, lane: Lane, *, term: int, committed: int) -> None:
        """In `term`, everything before offset `committed` is durable."""
        lane.heard(term)
        for pending in lane.durable(term, committed):
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
        forgotten = pending.sequence > 0 and not pending.maybe_applied and self.numbers is None
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
            if self.numbers is not None:
                self.numbers.failed(pending.first_number)
        pending.settle(error)

    def silent(self, *, now_ms: int, patience_ms: int) -> tuple[list[Lane], int | None]:
        """The lanes whose oldest request is without an answer for `patience_ms`; and when the next will be.

        None for that: nothing else is under way.
        """
        found: list[Lane] = []
        next_ms: int | None = None
        for lane in self.active.values():
            since_ms = lane.waits_since_ms()
            if since_ms is None:
                continue
            due_ms = since_ms + patience_ms
            if now_ms >= due_ms:
                found.append(lane)
            elif next_ms is None or due_ms < next_ms:
                next_ms = due_ms
        return found, next_ms

    def next_resume_ms(self) -> int | None:
        """The earliest instant at which a held lane may go on, None if none is held by time."""
        held = [lane.resume_ms for lane in self.active.values() if lane.recovering and not lane.under_way]
        return min(held, default=None)
