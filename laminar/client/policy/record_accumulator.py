"""The client's part of idempotent, ordered appends: it batches and numbers records, as a pure object.

Records go into the open batch of their partition's `PartitionQueue`. `take` returns the batches to send;
several of a queue may be in flight. `acknowledged`, `accepted`, `retry` and `failed` note how the request of
each ended. The clock, the connections and the building of frames belong to `sender.py`.

1. Batches of a queue get consecutive sequence numbers from 0, in the order their records were put,
   when they are first taken.
2. After a failure nothing of the queue is sent until every request under way was answered or
   lost. Then all batches without a receipt are sent again, in order, with the same sequence
   numbers. So whatever the server did with each of them, the log holds them once and in order.
3. A batch that failed for good leaves a gap in the sequence numbers. The batches after it either
   fail too (`stop_on_failure`: a producer, which promises the order of the whole stream), or are
   numbered again from 0 under the next epoch. The server refuses late copies from the old epoch.
   A batch whose outcome is unknown is never numbered again: that could append it twice. Batches of
   a named producer are never numbered again either: its epoch identifies the run of the program.
4. A batch that was accepted (is in the leader's log, not durable yet) keeps its records here until
   the leader that accepted it reports, in the same term, a committed end after it. If the term
   changes or the leader is lost before that, the batch is sent again by rule 2.
5. All records of a batch have a delivery time, or none has: if the next record differs, the open batch is
   closed. Delayed batches have sequence numbers like the others.
6. A partition that has ended (others replace it) refuses new batches as sealed. `lanes` says what becomes
   of them: `sealed` notes such an answer, and `adopt` takes over the topic's next route.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from laminar.client.errors import Error, OutcomeUnknown, Sealed, error_of_batch
from laminar.client.policy.lanes import (
    Cutter,
    LaneChange,
    copy_record,
    in_order,
    overlaps,
)
from laminar.client.policy.lineage import Lineage, ranges_of
from laminar.client.policy.partition_queue import (
    MOST_FLYING,
    RECORD_OVERHEAD_BYTES,
    PartitionQueue,
    Pending,
    extended,
)
from laminar.client.policy.resume_numbers import BLOCK, Numbers
from laminar.wire.key_route import Route, logical_of_block, logical_of_key

# A server's default limit. A larger record is refused here, before it could fail the others of its batch.
MAX_RECORD_BYTES = 8 << 20
MAX_WINDOW = MOST_FLYING


class RecordAccumulator:
    """All partition queues of a producer. Not thread-safe: a caller with threads holds its own lock.

    `queues` has, by number, the queues of the partitions in the topic's `route`. `gone` has the numbers of
    partitions that take no records any more. New queues begin with the producer epoch `epoch`. `active` are
    the queues that have batches without a receipt, `failures` the batches that failed. `sticky` is the queue
    that gets records without a key at the moment. `put` is called for each record, so it does very little.
    """

    __slots__ = (
        "_batch_bytes",
        "_block",
        "_block_queue",
        "_follows",
        "_last_order",
        "_max_record_bytes",
        "_max_records",
        "_partial_window",
        "_queue_of_key",
        "_stop_on_failure",
        "_window",
        "active",
        "buffered_bytes",
        "epoch",
        "failures",
        "gone",
        "numbers",
        "queues",
        "resent",
        "route",
        "sticky",
        "taken",
    )

    def __init__(
        self,
        *,
        route: Route,
        batch_bytes: int,
        max_records: int = 65_536,
        max_record_bytes: int = MAX_RECORD_BYTES,
        window: int = 4,
        partial_window: int = 1,
        stop_on_failure: bool = True,
        first_place: int = 0,
        numbers: Numbers | None = None,
        epoch: int = 0,
        gone: Iterable[int] = (),
    ) -> None:
        assert 1 <= partial_window <= window <= MAX_WINDOW, (partial_window, window)
        self.route = route
        self.epoch = epoch
        self.gone = set(gone)
        self.queues = {number: self._new_queue(number) for number in route.numbers}
        self._follows: dict[int, LaneChange] = {}  # by partitions that have ended
        self._last_order = 0  # of the batch that was made last
        self.sticky = self.queues[route.numbers[first_place % len(route)]]
        self.active: dict[int, PartitionQueue] = {}  # queues that are not idle, by partition
        self.buffered_bytes = 0
        self.failures: list[Pending] = []
        self.taken = 0
        self.resent = 0
        self.numbers = numbers  # of a producer with a name
        self._queue_of_key: dict[bytes, PartitionQueue] = {}
        self._block = -1  # of the record with a number that was put last, and its queue
        self._block_queue = self.sticky
        self._batch_bytes = batch_bytes
        self._max_records = max_records
        self._max_record_bytes = max_record_bytes
        self._window = window
        self._partial_window = partial_window
        self._stop_on_failure = stop_on_failure

    def queue_of(self, key: bytes) -> PartitionQueue:
        """Return the queue of the partition that a key belongs to.

        The results of up to 65,536 keys are cached: hashing is slower than a look-up.
        """
        queue = self._queue_of_key.get(key)
        if queue is None:
            if len(self._queue_of_key) >= 65_536:
                self._queue_of_key.clear()
            queue = self._queue_of_key[key] = self.queues[self.route.partition_of_key(key)]
        return queue

    def queue_of_block(self, block: int) -> PartitionQueue:
        """Return the queue of a block of numbered records without a key: the same in every run."""
        if block != self._block:
            assert self.numbers is not None, "only a named producer numbers its records"
            logical = logical_of_block(block, self.numbers.created_with)
            self._block, self._block_queue = block, self.queues[self.route.partition_of(logical)]
        return self._block_queue

    def _new_queue(self, number: int) -> PartitionQueue:
        queue = PartitionQueue(number)
        queue.epoch = self.epoch
        return queue

    def _new_batch(self, queue: PartitionQueue, *, delayed: bool) -> Pending:
        pending = Pending(queue.partition)
        pending.delayed = delayed
        self._last_order = pending.order = self._last_order + 1
        return pending

    def put(
        self, value: bytes, key: bytes | None, queue: PartitionQueue, *, delayed: bool = False
    ) -> Pending:
        """Add a record to `queue`; return its batch, in which it is the last record.

        `delayed` says that the record has a delivery time, which `put_with` then adds.

        Raises:
            Error: the value is larger than a record may be, or the queue has failed for good.
        """
        pending = queue.open
        if pending is None or pending.delayed is not delayed:
            if queue.error is not None:
                raise queue.error
            queue.close_open()
            pending = queue.open = self._new_batch(queue, delayed=delayed)
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
            pending = queue.open = self._new_batch(queue, delayed=delayed)
            pending.keyed = key is not None
        pending.values.append(value)
        pending.keys.append(key)
        pending.size_bytes += size_bytes
        self.buffered_bytes += size_bytes
        # The batch is full if another record of this size would not fit. It is closed now, not when the next
        # record comes, so that the next record without a key already goes to the next partition.
        if pending.size_bytes + size_bytes > self._batch_bytes or len(pending.values) >= self._max_records:
            queue.close_open()
            if queue is self.sticky:
                self.sticky = self.queues[self.route.after(queue.partition)]
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
        trace_id: bytes | None = None,
        deliver_at_ms: int | None = None,
    ) -> Pending:
        """Add a record that has a tag, headers, a timestamp, a trace id or a delivery time; see `put`."""
        pending = self.put(value, key, queue, delayed=deliver_at_ms is not None)
        if deliver_at_ms is not None:
            pending.delivery_times.append(deliver_at_ms)
        before = len(pending.values) - 1
        if tag is not None:
            pending.tags = extended(pending.tags, before, tag)
        if headers is not None:
            pending.headers = extended(pending.headers, before, headers)
        if timestamp_ms is not None:
            pending.timestamps = extended(pending.timestamps, before, timestamp_ms)
        if trace_id is not None:
            pending.trace_ids = extended(pending.trace_ids, before, trace_id)
        return pending

    def checkpoint(self) -> int:
        """Return the number of the named producer up to which all records are durable; 0 without numbers."""
        return self.numbers.checkpoint(self.active.values()) if self.numbers is not None else 0

    def all_accepted(self) -> bool:
        """Return whether every record that was put is durable, or at least in the log of some leader."""
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
        """Return the next batch to send, numbered and counted as in flight; None if there is none now."""
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
            # Records without a key are spread by batch: the next ones go to the next partition.
            self.sticky = self.queues[self.route.after(queue.partition)]
        self.taken += 1
        self.resent += pending.attempts > 1
        return pending

    def acknowledged(
        self,
        queue: PartitionQueue,
        pending: Pending,
        *,
        base_offset: int,
        replicas: int,
        synced: bool,
        scheduled: Sequence[str] = (),
    ) -> None:
        """Settle `pending` with its receipt: it is durable, and its first record has offset `base_offset`.

        For a delayed batch, `scheduled` has the ids of its records, which have no offset yet.
        """
        if queue.answered(pending):
            queue.drop(pending)
            pending.base_offset = base_offset
            pending.replicas = replicas
            pending.synced = synced
            pending.scheduled = list(scheduled)
            self._settle(pending, None)
        if queue.idle():
            self.active.pop(queue.partition, None)
        self._follow(queue)

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
        """Note that the leader of `term` has `pending` in its log, not durable yet.

        `replicas` and `synced` are for its receipt, once the batch is durable.
        """
        if queue.answered(pending):
            pending.base_offset = base_offset
            pending.replicas = replicas
            pending.synced = synced
            queue.accepted(pending, term=term)
        self._follow(queue)

    def learned(self, queue: PartitionQueue, *, term: int, committed: int) -> None:
        """Settle accepted batches: the leader of `term` has committed all records before `committed`."""
        queue.observe_term(term)
        for pending in queue.durable(term, committed):
            self._settle(pending, None)
        if queue.idle():
            self.active.pop(queue.partition, None)
        self._follow(queue)

    def retry(self, queue: PartitionQueue, pending: Pending, *, until_ms: int, maybe_applied: bool) -> None:
        """Note that a request of `pending` failed; the batch is sent again, not before `until_ms`."""
        if queue.answered(pending):
            pending.maybe_applied |= maybe_applied
            queue.hold(until_ms=until_ms)
        self._follow(queue)

    def renumber(self, queue: PartitionQueue, pending: Pending) -> bool:
        """Handle a refusal because the server lacks the batch before `pending`; return whether to send again.

        If an earlier batch of the queue has no receipt or failed, `pending` only came too early: it is sent
        again after that one. If `pending` is the first without a receipt, the server has forgotten the
        producer, which idled for days. Then `pending` was not appended, and is sent again as the first of the
        next epoch. That is not possible if an earlier attempt may have been applied, or with a named
        producer: then False is returned. If the partition has ended, the batch counts as refused by it.
        """
        if queue.ended and not pending.settled:
            if not pending.maybe_applied:
                self.sealed(queue, pending)
            return not pending.maybe_applied
        out_of_turn = queue.renumber or not queue.is_first(pending)
        forgotten = pending.sequence > 0 and not pending.maybe_applied and self.numbers is None
        if pending.settled or not (out_of_turn or forgotten):
            return False
        queue.renumber |= not out_of_turn
        self.retry(queue, pending, until_ms=0, maybe_applied=False)
        return True

    def failed(self, queue: PartitionQueue, pending: Pending, error: Error, *, maybe_applied: bool) -> None:
        """Note that a request of `pending` ended with a final `error`: fail the batch, and those after it."""
        if not queue.answered(pending):
            self._follow(queue)
            return
        pending.maybe_applied |= maybe_applied
        self.fail(queue, pending, error)

    def fail(self, queue: PartitionQueue, pending: Pending, error: Error) -> None:
        """Fail a batch whose request is not under way, and with it those that cannot follow it (rule 3)."""
        if not self._stop_on_failure:
            queue.drop(pending)
            self._settle(pending, error)
            if pending.sequence >= 0 and not queue.ended:
                queue.renumber = True
                queue.hold(until_ms=0)
            self._follow(queue)
            return
        self._stop(queue, error)
        self._follow(queue)

    def _stop(self, queue: PartitionQueue, error: Error) -> None:
        """Fail all batches of the queue with `error`, and all records that will be put into it."""
        queue.error = error
        failed = queue.waiting()  # `pending` among them, in order of sending
        queue.closed.clear()
        queue.flying.clear()
        queue.open = None
        for each in failed:
            # A batch whose request is under way may still be appended.
            each.maybe_applied |= each.under_way
            self._settle(each, error)
        self.active.pop(queue.partition, None)

    # -- partitions that end -----------------------------------------------------------------------

    def sealed(self, queue: PartitionQueue, pending: Pending) -> None:
        """Note that the partition has ended without `pending`, as the answer to its request says."""
        if queue.answered(pending):
            queue.refuse(pending)
        else:
            queue.end()
        self._follow(queue)

    def adopt(self, lineage: Lineage) -> None:
        """Adopt the route of `lineage` if it is newer: queues of partitions that it lacks end.

        New queues begin for the partitions that replace them. An older route changes nothing.
        """
        route = lineage.route
        if route.version <= self.route.version:
            return
        before, self.route = self.route, route
        queues = self.queues
        self.queues = {number: queues.get(number) or self._new_queue(number) for number in route.numbers}
        self._queue_of_key.clear()
        self._block = -1
        made: list[LaneChange] = []
        for inputs, outputs in overlaps(before, route):
            # Without the order of its numbers a checkpoint of a named producer would say too much.
            strict = self.numbers is not None or lineage.is_strict(
                *ranges_of(inputs, before), after=before.version
            )
            change = LaneChange(
                [queues[number] for number in inputs],
                {number: self.queues[number] for number in outputs},
                route,
                strict,
            )
            for queue in change.inputs:
                self._follows[queue.partition] = change
                queue.end()
            for queue in change.outputs.values():
                queue.gated = strict
            self.gone.update(inputs)
            made.append(change)
            if self.sticky.partition in inputs:
                self.sticky = change.next_output()
        for change in made:
            self._make(change)

    def _follow(self, queue: PartitionQueue) -> None:
        """Move the records of an ended queue by the change that ended it, as far as is possible now."""
        change = self._follows.get(queue.partition)
        if change is not None:
            self._make(change)

    def _make(self, change: LaneChange) -> None:
        """Move the records left in the ended queues of a change to its outputs, as far as is possible now.

        With strict order that is only once no batch of them is in doubt; with weak order, all that are not.
        """
        if change.made or not (change.strict or change.resolved):
            # Weak order: what was in doubt before an earlier change may come here later.
            for queue in change.inputs:
                self._move(queue.never_sent(), change)
                if queue.idle():
                    self.active.pop(queue.partition, None)
            for queue in change.outputs.values():
                self._follow(queue)
            return
        if not change.resolved:
            return
        change.made = True
        sources = [pending for queue in change.inputs for pending in queue.clear()]
        for queue in change.inputs:
            self.active.pop(queue.partition, None)
        self._move(sources, change)
        errors = [queue.error for queue in change.inputs if queue.error is not None]
        for queue in change.outputs.values():
            queue.gated = False
            if errors:
                self._stop(queue, errors[0])
            self._follow(queue)

    def _move(self, sources: list[Pending], change: LaneChange) -> None:
        """Divide the records of these batches into new batches of the outputs, ahead of newer records."""
        if not sources:
            return
        cutter = Cutter(batch_bytes=self._batch_bytes, max_records=self._max_records)
        named: dict[int, Pending] = {}  # by partition, of records for that one and no other
        parts: dict[Pending, dict[int, tuple[Pending, int]]] = {source: {} for source in sources}
        unkeyed: dict[Pending, PartitionQueue] = {}
        for source, position in in_order(sources):
            place = self._place_of(source, position)
            if source.named is not None and position in source.named:
                refused = named.setdefault(source.partition, Pending(source.partition))
                parts[source][position] = (refused, copy_record(source, position, refused))
            else:
                if place is not None:
                    queue = change.outputs[change.route.partition_of(place)]
                else:
                    queue = unkeyed.get(source) or unkeyed.setdefault(source, change.next_output())
                parts[source][position] = cutter.put(source, position, queue)
        for queue, batches in cutter.batches.items():
            self.active[queue.partition] = queue
            for pending in batches:
                self._last_order = pending.order = self._last_order + 1
            newer = queue.put_first(batches) if queue.gated else queue.put_closed(batches)
            for pending in newer:
                self._last_order = pending.order = self._last_order + 1
        for source in sources:
            self.buffered_bytes -= source.size_bytes
        for batches in [list(named.values()), *cutter.batches.values()]:
            self.buffered_bytes += sum(pending.size_bytes for pending in batches)
        for source in sources:
            source.move([parts[source][position] for position in range(len(source.values))])
        for partition, pending in named.items():
            self._settle(pending, sealed_error(partition, change.route.version))

    def _place_of(self, source: Pending, position: int) -> int | None:
        """Return the logical partition of a record; None if it has neither key nor number."""
        key = source.keys[position]
        if key is not None:
            return logical_of_key(key)
        if source.numbers is None or self.numbers is None:
            return None
        return logical_of_block(source.numbers[position] // BLOCK, self.numbers.created_with)

    def _settle(self, pending: Pending, error: Error | None) -> None:
        self.buffered_bytes -= pending.size_bytes
        if error is not None:
            self.failures.append(pending)
            if self.numbers is not None:
                self.numbers.failed(pending.first_number)
            error = error_of_batch(error, maybe_applied=pending.maybe_applied)
        pending.settle(error)

    def silent(self, *, now_ms: int, patience_ms: int) -> tuple[list[PartitionQueue], int | None]:
        """Return the queues whose oldest request has had no answer for `patience_ms`.

        The second value is the time (of the clock of `now_ms`) at which the next queue will be one of them;
        None if no other queue has a request under way.
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
        """Return the time (ms) at which the first paused queue may send again; None if none is paused."""
        held = [queue.resume_ms for queue in self.active.values() if queue.recovering and not queue.under_way]
        return min(held, default=None)


def sealed_error(partition: int, version: int) -> Sealed:
    """Return the error for records that name a `partition` that has ended; `version` is the new route's."""
    return Sealed(
        f"partition {partition} has ended, and accepts no more records: other partitions replace it",
        code="sealed",
        field="partition",
        value=partition,
        limit=version,
        hint="leave `partition` out, or choose one of the topic's present route",
        outcome="not_applied",
    )
