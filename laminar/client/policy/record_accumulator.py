"""The producer's half of the promise "in order and not doubled", as a pure object.

Records go into the open batch of their partition's `PartitionQueue`; `take` returns batches to send, several
in flight per queue; `acknowledged` and `failed` say how each went. The clock, the connections and the
building of frames belong to `sender.py`.

1. Batches of a queue get consecutive sequence numbers from 0, in the order their records were put,
   when they are first taken.
2. After a failure nothing of the queue is sent until every request under way was answered or
   lost; then all that has no receipt is sent again, in order, with the same sequence numbers. So
   whatever the server did with each, the log holds them once and in order.
3. A batch that failed for good leaves a hole in the sequence. What follows it either fails
   too (`stop_on_failure`: a producer, which promises the order of the whole stream), or continues
   under the next epoch, which the server takes as a new numbering from 0 and which fences
   every late copy of the old one. A batch whose outcome is unknown is never renumbered: that
   could double it. Nor is any of a named producer, whose epoch says which run has its name.
4. A batch that was accepted keeps its records here until it is known to be durable: by an answer
   of the leader that accepted it, in the same term, whose committed end is after it. When
   another term or the loss of the leader comes first, rule 2 holds for it as for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from laminar.client.errors import Error, OutcomeUnknown
from laminar.client.policy.partition_queue import MOST_FLYING, PartitionQueue, Pending, extended
from laminar.client.policy.resume_numbers import Numbers

# What a record costs in a frame beyond its bytes: offsets of value and key, validity.
RECORD_OVERHEAD_BYTES = 10
# A server's default limit; refused here, a larger record does not fail the others of its batch.
MAX_RECORD_BYTES = 8 << 20
MAX_WINDOW = MOST_FLYING


class RecordAccumulator:
    """All partition queues of a producer. Not thread-safe: a caller with threads holds its own lock.

    `put` is called per record and does as little as it can. `dirty` is true when there may be something to
    take since it was last cleared.
    """

    __slots__ = (
        "_batch_bytes",
        "_max_record_bytes",
        "_max_records",
        "_partial_window",
        "_partition_of_key",
        "_queue_of_key",
        "_stop_on_failure",
        "_window",
        "active",
        "buffered_bytes",
        "failures",
        "numbers",
        "queues",
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
        self.queues = [PartitionQueue(partition) for partition in range(partitions)]
        self.sticky = self.queues[first_partition % partitions]
        self.active: dict[int, PartitionQueue] = {}  # queues that are not idle, by partition
        self.buffered_bytes = 0
        self.failures: list[Pending] = []
        self.taken = 0
        self.resent = 0
        self.numbers = numbers  # of a producer with a name
        self._partition_of_key = partition_of_key
        self._queue_of_key: dict[bytes, PartitionQueue] = {}
        self._batch_bytes = batch_bytes
        self._max_records = max_records
        self._max_record_bytes = max_record_bytes
        self._window = window
        self._partial_window = partial_window
        self._stop_on_failure = stop_on_failure

    def queue_of(self, key: bytes) -> PartitionQueue:
        """Return the queue of a key. It is cached: a topic has few keys or many, rarely all of them twice."""
        queue = self._queue_of_key.get(key)
        if queue is None:
            if len(self._queue_of_key) >= 65_536:
                self._queue_of_key.clear()
            queue = self._queue_of_key[key] = self.queues[self._partition_of_key(key)]
        return queue

    def put(self, value: bytes, key: bytes | None, queue: PartitionQueue) -> Pending:
        """Add a record to `queue`; its position is the last of the returned batch's ``values``."""
        pending = queue.open
        if pending is None:
            if queue.error is not None:
                raise queue.error
            pending = queue.open = Pending(queue.partition)
            self.active[queue.partition] = queue
        size_bytes = len(value)
        if size_bytes > self._max_record_bytes:
            self._refuse(queue, pending, size_bytes)
        size_bytes += RECORD_OVERHEAD_BYTES
        if key is not None:
            pending.keyed = True
            size_bytes += len(key)
        if pending.size_bytes + size_bytes > self._batch_bytes and pending.values:
            queue.close_open()
            pending = queue.open = Pending(queue.partition)
            pending.keyed = key is not None
        pending.values.append(value)
        pending.keys.append(key)
        pending.size_bytes += size_bytes
        self.buffered_bytes += size_bytes
        # Full when another like this one would not fit: so a batch is closed by its own last record, and what
        # comes next without a key begins in the next partition, even if nothing could be sent in between.
        if pending.size_bytes + size_bytes > self._batch_bytes or len(pending.values) >= self._max_records:
            queue.close_open()
            if queue is self.sticky:
                self.sticky = self.queues[(queue.partition + 1) % len(self.queues)]
        return pending

    def put_with(
        self,
        value: bytes,
        key: bytes | None,
        queue: PartitionQueue,
        *,
        tag: str | None,
        headers: Mapping[str, bytes] | None,
        timestamp_ms: int | None,
    ) -> Pending:
        """Do as `put` for a record with more columns."""
        pending = self.put(value, key, queue)
        before = len(pending.values) - 1
        if tag is not None:
            pending.tags = extended(pending.tags, before, tag)
        if headers is not None:
            pending.headers = extended(pending.headers, before, headers)
        if timestamp_ms is not None:
            pending.timestamps = extended(pending.timestamps, before, timestamp_ms)
        return pending

    def checkpoint(self) -> int:
        """Return the program's highest number up to which all is durable; 0 without numbers."""
        return self.numbers.checkpoint(self.active.values()) if self.numbers is not None else 0

    def all_accepted(self) -> bool:
        """Return whether everything that was put is durable, or in the log of some leader."""
        return all(queue.all_accepted() for queue in self.active.values())

    def _refuse(self, queue: PartitionQueue, pending: Pending, size_bytes: int) -> None:
        if not pending.values:
            queue.open = None
            if queue.idle():
                self.active.pop(queue.partition, None)
        raise Error(
            f"a value of {size_bytes} bytes is over the limit of {self._max_record_bytes}",
            code="too_large",
            field="value",
            value=size_bytes,
            limit=self._max_record_bytes,
            outcome="not_applied",
        )

    def take(self, queue: PartitionQueue, *, now_ms: int) -> Pending | None:
        """Return the next batch of `queue` to send now, or None."""
        pending = queue.take(now_ms=now_ms, window=self._window, partial_window=self._partial_window)
        doubtful, queue.doubtful = queue.doubtful, []
        for each in doubtful:
            message = f"partition {queue.partition}: the receipt was lost, and an earlier batch failed"
            self._settle(each, OutcomeUnknown(message, code="outcome_unknown", outcome="unknown"))
        if pending is None:
            if queue.idle():
                self.active.pop(queue.partition, None)
            return None
        if queue is self.sticky:
            # Spread by batch: what comes next without a key goes to the next partition.
            self.sticky = self.queues[(queue.partition + 1) % len(self.queues)]
        self.taken += 1
        self.resent += pending.attempts > 1
        return pending

    def acknowledged(
        self, queue: PartitionQueue, pending: Pending, *, base_offset: int, replicas: int, synced: bool
    ) -> None:
        """Settle `pending` with its receipt."""
        if not queue.answered(pending):
            return
        queue.drop(pending)
        pending.base_offset = base_offset
        pending.replicas = replicas
        pending.synced = synced
        self._settle(pending, None)
        if queue.idle():
            self.active.pop(queue.partition, None)

    def accepted(
        self,
        queue: PartitionQueue,
        pending: Pending,
        *,
        base_offset: int,
        term: int,
        replicas: int,
        synced: bool,
    ) -> None:
        """Note that a leader took `pending` without a promise.

        `replicas` and `synced` hold once it is durable.
        """
        if queue.answered(pending):
            pending.base_offset = base_offset
            pending.replicas = replicas
            pending.synced = synced
            queue.accepted(pending, term=term)

    def learned(self, queue: PartitionQueue, *, term: int, committed: int) -> None:
        """Settle what is durable if, in `term`, everything before offset `committed` is."""
        queue.heard(term)
        for pending in queue.durable(term, committed):
            self._settle(pending, None)
        if queue.idle():
            self.active.pop(queue.partition, None)

    def retry(self, queue: PartitionQueue, pending: Pending, *, until_ms: int, maybe_applied: bool) -> None:
        """Note that an attempt failed, but not the batch: it is sent again from `until_ms` on."""
        if queue.answered(pending):
            pending.maybe_applied |= maybe_applied
            queue.hold(until_ms=until_ms)

    def renumber(self, queue: PartitionQueue, pending: Pending) -> bool:
        """Handle an answer that the server lacks what comes before `pending`; return whether to try again.

        After a batch that is to be sent again, or that failed, it is only out of turn. As the first it means
        that the server forgot the producer (it idled for days): nothing of this batch was applied, everything
        before it has its receipt, so it may begin the next epoch.
        """
        out_of_turn = queue.renumber or not queue.is_first(pending)
        forgotten = pending.sequence > 0 and not pending.maybe_applied and self.numbers is None
        if pending.settled or not (out_of_turn or forgotten):
            return False
        queue.renumber |= not out_of_turn
        self.retry(queue, pending, until_ms=0, maybe_applied=False)
        return True

    def failed(self, queue: PartitionQueue, pending: Pending, error: Error, *, maybe_applied: bool) -> None:
        """Fail `pending` with `error`, after a request of it ended."""
        if not queue.answered(pending):
            return
        pending.maybe_applied |= maybe_applied
        self.give_up(queue, pending, error)

    def give_up(self, queue: PartitionQueue, pending: Pending, error: Error) -> None:
        """Fail a batch that is not under way, and what cannot follow it (rule 3)."""
        if not self._stop_on_failure:
            queue.drop(pending)
            self._settle(pending, error)
            if pending.sequence >= 0:
                queue.renumber = True
                queue.hold(until_ms=0)
            return
        queue.error = error
        failed = queue.waiting()  # `pending` among them, in order of sending
        queue.closed.clear()
        queue.flying.clear()
        queue.open = None
        for each in failed:
            # One under way may yet be applied.
            each.maybe_applied |= each.under_way
            self._settle(each, error)
        self.active.pop(queue.partition, None)

    def _settle(self, pending: Pending, error: Error | None) -> None:
        self.buffered_bytes -= pending.size_bytes
        if error is not None:
            self.failures.append(pending)
            if self.numbers is not None:
                self.numbers.failed(pending.first_number)
        pending.settle(error)

    def silent(self, *, now_ms: int, patience_ms: int) -> tuple[list[PartitionQueue], int | None]:
        """Return the queues without an answer for `patience_ms`, and when the next one will be such.

        The time is None when nothing else is under way. The oldest request of each queue counts.
        """
        found: list[PartitionQueue] = []
        next_ms: int | None = None
        for queue in self.active.values():
            since_ms = queue.waits_since_ms()
            if since_ms is None:
                continue
            due_ms = since_ms + patience_ms
            if now_ms >= due_ms:
                found.append(queue)
            elif next_ms is None or due_ms < next_ms:
                next_ms = due_ms
        return found, next_ms

    def next_resume_ms(self) -> int | None:
        """Return the earliest instant at which a held queue may go on, None if none is held by time."""
        held = [queue.resume_ms for queue in self.active.values() if queue.recovering and not queue.under_way]
        return min(held, default=None)
