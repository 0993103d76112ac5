"""The queue of one partition's batches: waiting, in flight, or to be sent again. Pure objects, without I/O.

A `Pending` is a batch from its first record to its receipt; a `PartitionQueue` holds those of one partition
in order. Both follow the rules at the head of `record_accumulator`, whose `RecordAccumulator` is the only
user of the queues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from laminar.client.errors import Error, Undelivered
from laminar.client.records import Receipt

T = TypeVar("T")
# Bytes that a record takes in a frame besides its value and key: the offsets of both, and validity bits.
RECORD_OVERHEAD_BYTES = 10
# The server remembers this number of a producer's batches to recognise repetitions. If more were in flight,
# the oldest could not be sent again safely.
MOST_FLYING = 64


def extended(column: list[T | None] | None, before: int, cell: T) -> list[T | None]:
    """Append `cell` to a column as cell number `before`, and return the column; None means an empty one.

    Cells that are missing before it become None.
    """
    if column is None:
        column = []
    column.extend([None] * (before - len(column)))
    column.append(cell)
    return column


def padded(column: list[T | None] | None, count: int) -> list[T | None] | None:
    """Return `column` filled with None up to `count` cells; None for a column that no record uses."""
    if column is not None:
        column.extend([None] * (count - len(column)))
    return column


class Pending:
    """One batch: its records in columns, then its receipt or error.

    ``values`` and ``keys`` have one element for each record; the other columns are None until a record uses
    them, and may be shorter. `settled` becomes true once, before the callbacks run. `term` is the term of the
    leader that accepted the batch before it was durable, -1 if none did. `numbers` are the program's own
    numbers of the records of a named producer, `first_number` and `last_number` the first and last of them, 0
    without numbers. `named` has the positions of records whose partition the caller named. `order` is a
    number by which batches are sorted in order of sending. `deadline_ms`, `sequence` and `base_offset` are -1
    until they are known. The records of a `delayed` batch all have delivery times, those of other batches
    none: a leader accepts no mixed batch. `scheduled` has the ids in the receipt of a delayed batch; it is
    empty if the times had passed.

    If a partition has ended without a batch, the batch's records are moved to other batches. `parts` then
    says for each record in which batch and at which position it is; that batch gets its receipt.
    """

    __slots__ = (
        "attempts",
        "base_offset",
        "callbacks",
        "deadline_ms",
        "delayed",
        "delivery_times",
        "epoch",
        "error",
        "first_number",
        "headers",
        "keyed",
        "keys",
        "last_number",
        "maybe_applied",
        "named",
        "numbers",
        "order",
        "partition",
        "parts",
        "replicas",
        "scheduled",
        "sent_ms",
        "sequence",
        "settled",
        "size_bytes",
        "synced",
        "tags",
        "term",
        "timestamps",
        "trace_ids",
        "under_way",
        "values",
    )

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.values: list[bytes] = []
        self.keys: list[bytes | None] = []
        self.keyed = False
        self.named: set[int] | None = None
        self.numbers: list[int] | None = None
        self.order = 0
        self.parts: list[tuple[Pending, int]] | None = None
        self.tags: list[str | None] | None = None
        self.headers: list[Mapping[str, bytes] | None] | None = None
        self.timestamps: list[int | None] | None = None
        self.trace_ids: list[bytes | None] | None = None
        self.delayed = False
        self.delivery_times: list[int] = []
        self.scheduled: list[str] = []
        self.size_bytes = 0
        self.deadline_ms = -1
        self.sequence = -1
        self.epoch = 0
        self.attempts = 0
        self.sent_ms = -1
        self.under_way = False
        self.maybe_applied = False
        self.settled = False
        self.error: Error | None = None
        self.base_offset = -1
        self.term = -1
        self.first_number = 0
        self.last_number = 0
        self.replicas = 0
        self.synced = False
        self.callbacks: list[Callable[[], None]] = []

    def receipt(self, position: int) -> Receipt:
        """Return the receipt of the record at `position`, or raise its error; only once settled."""
        if self.parts is not None:
            part, place = self.parts[position]
            return part.receipt(place)
        if self.error is not None:
            raise self.error
        assert self.settled, "asked for a receipt before the batch was settled"
        offset = self.base_offset + position if self.base_offset >= 0 else -1
        scheduled = self.scheduled[position] if self.scheduled else None
        return Receipt(self.partition, offset, self.replicas, self.synced, scheduled)

    def when_settled(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the batch is settled, at once if it is already.

        `callback` may be called twice, and from the caller's thread or the one that settles. No lock is
        needed between them, because `settled` is checked after the callback was added to the list.
        """
        self.callbacks.append(callback)
        if self.settled:
            callback()

    def number(self, number: int) -> None:
        """Set the program's own number of the record that was added last."""
        if self.numbers is None:
            self.numbers = []
        self.numbers.append(number)
        self.first_number = self.first_number or number
        self.last_number = number

    def move(self, parts: list[tuple[Pending, int]]) -> None:
        """Note that the records were moved: `parts` has the new batch and position of each record.

        This batch is settled when all those batches are. Its own columns are dropped.
        """
        self.parts = parts
        self.values, self.keys, self.size_bytes = [], [], 0
        self.tags = self.headers = self.timestamps = self.trace_ids = self.named = self.numbers = None
        self.delivery_times = []
        for part in {id(part): part for part, _ in parts}.values():
            part.when_settled(self._part_settled)

    def _part_settled(self) -> None:
        assert self.parts is not None
        if not self.settled and all(part.settled for part, _ in self.parts):
            self.settle()

    def settle(self, error: Error | None = None) -> None:
        """Settle the batch, as failed with `error` or as durable, and run the callbacks."""
        assert not self.settled, f"batch {self.sequence} of partition {self.partition} settled twice"
        self.error = error
        self.settled = True
        for callback in self.callbacks:
            callback()

    def undelivered(self) -> list[Undelivered]:
        """Return the records of this failed batch in the form in which `ProduceError` reports them."""
        assert self.error is not None
        outcome = "unknown" if self.maybe_applied else "not_applied"
        return [
            Undelivered(value, key, self.partition, outcome, self.error)
            for value, key in zip(self.values, self.keys, strict=True)
        ]


class PartitionQueue:
    """One partition's batches, in the order of their records: `flying`, then `closed`, then `open`.

    `flying` has the batches that were sent, oldest first: their request is under way, or a leader accepted
    them and they are not known to be durable. `closed` has full batches that wait to be sent; `open` takes
    records. `under_way` counts requests without an answer. While `recovering`, nothing is sent until all
    requests have ended; then the batches of `flying` are sent again. `term` is the highest term that an
    answer named.

    A queue is `ended` if its partition takes no new records, because other partitions replace it. It only
    sends batches again that have no final answer; batches that were refused (`refuse`) or never sent wait to
    be moved to other queues. A queue that is `gated` sends nothing: it waits for records from ended ones.
    """

    __slots__ = (
        "closed",
        "doubtful",
        "ended",
        "epoch",
        "error",
        "flying",
        "gated",
        "next_sequence",
        "open",
        "partition",
        "recovering",
        "renumber",
        "resume_ms",
        "term",
        "under_way",
    )

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self.ended = False
        self.gated = False
        self.open: Pending | None = None
        self.closed: deque[Pending] = deque()
        self.flying: deque[Pending] = deque()
        self.doubtful: list[Pending] = []  # removed by `_renumber`, for the accumulator to settle
        self.under_way = 0
        self.next_sequence = 0
        self.epoch = 0
        self.recovering = False
        self.renumber = False
        self.resume_ms = 0
        self.term = 0
        self.error: Error | None = None

    def idle(self) -> bool:
        """Return whether the queue has no batch at all, neither waiting nor in flight."""
        return self.open is None and not self.closed and not self.flying

    def close_open(self) -> None:
        """Close the open batch: it takes no more records."""
        if self.open is not None:
            self.closed.append(self.open)
            self.open = None

    def take(self, *, now_ms: int, window: int, partial_window: int) -> Pending | None:
        """Return the next batch to send, and count it as in flight; None if there is none to send now.

        At most `window` requests are under way at a time. A batch that is not full is sent only while fewer
        than `partial_window` are: until then it collects more records, so that fewer requests are needed.
        """
        if self.recovering and not self._recovered(now_ms=now_ms):
            return None
        if self.under_way >= window or len(self.flying) >= MOST_FLYING:
            return None
        if self.gated:
            return None
        if self.ended:
            doubtful = next(self._doubtful(), None)
            if doubtful is None:
                return None
            self.closed.remove(doubtful)
            pending = doubtful
        elif self.closed:
            pending = self.closed.popleft()
        elif self.open is not None and self.under_way < partial_window:
            pending = self.open
            self.open = None
        else:
            return None
        if pending.sequence < 0:
            pending.sequence = self.next_sequence
            pending.epoch = self.epoch
            self.next_sequence += 1
        pending.attempts += 1
        pending.term = -1
        pending.sent_ms = now_ms
        pending.under_way = True
        self.flying.append(pending)
        self.under_way += 1
        return pending

    def _recovered(self, *, now_ms: int) -> bool:
        """Return whether sending may begin again after a failure; if so, move `flying` back to `closed`."""
        if self.under_way or now_ms < self.resume_ms:
            return False
        if self.renumber and not self.ended:
            self._renumber()
        self.closed.extendleft(reversed(self.flying))
        self.flying.clear()
        self.recovering = False
        return True

    def _renumber(self) -> None:
        """Start the next producer epoch: batches get new sequence numbers, from 0, when they are sent.

        Batches that may have been appended already must not get a new number: they move to `doubtful`.
        """
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

    # -- the end of the partition ----------------------------------------------------------------

    def refuse(self, pending: Pending) -> None:
        """Note that the partition has ended without `pending`, as the answer to its request says.

        The batch counts as never sent. The answers to other requests are awaited, and batches without a final
        answer are sent again.
        """
        self.flying.remove(pending)
        pending.sequence = -1
        pending.attempts = 0
        pending.maybe_applied = False
        self.closed.append(pending)
        self.end()

    def end(self) -> None:
        """Note that the partition has ended: it takes no new records. Idempotent."""
        if not self.ended:
            self.ended = True
            self.renumber = False
            self.hold(until_ms=0)

    @property
    def resolved(self) -> bool:
        """Whether the partition has ended, and of each batch it is certain whether the partition has it.

        The remaining batches, which it does not have, may then be moved.
        """
        return (
            self.ended
            and not self.gated
            and not self.under_way
            and not self.flying
            and next(self._doubtful(), None) is None
        )

    @property
    def sends(self) -> bool:
        """Whether there may be a batch to send, now or after a pause."""
        if self.gated:
            return False
        if self.ended:
            return bool(self.flying) or next(self._doubtful(), None) is not None
        return not self.idle()

    def _doubtful(self) -> Iterator[Pending]:
        return (pending for pending in self.closed if pending.sequence >= 0)

    def clear(self) -> list[Pending]:
        """Remove and return all batches, in order of sending. Call it only when none is under way."""
        assert not self.under_way and not self.flying, f"partition {self.partition} has requests under way"
        found = self.waiting()
        self.closed.clear()
        self.open = None
        return found

    def never_sent(self) -> list[Pending]:
        """Remove and return the batches that are certainly not in the partition, in order of sending."""
        found = [pending for pending in self.waiting() if pending.sequence < 0 and not pending.under_way]
        for pending in found:
            self.drop(pending)
        return found

    def put_first(self, batches: list[Pending]) -> list[Pending]:
        """Put batches before all others of the queue and return the others. Only if none of them was sent."""
        assert not self.flying, f"partition {self.partition} has batches in flight"
        newer = self.waiting()
        self.closed.extendleft(reversed(batches))
        return newer

    def put_closed(self, batches: list[Pending]) -> list[Pending]:
        """Put batches after the closed ones; return the open batch, if any, which now comes after them."""
        self.closed.extend(batches)
        return [] if self.open is None else [self.open]

    # -- answers -----------------------------------------------------------------------------------

    def answered(self, pending: Pending) -> bool:
        """Note that the request of `pending` ended; return False if the batch was settled meanwhile."""
        assert pending.under_way, f"batch {pending.sequence} was not under way"
        pending.under_way = False
        self.under_way -= 1
        return not pending.settled

    def accepted(self, pending: Pending, *, term: int) -> None:
        """Note that the leader of `term` has `pending` in its log. The batch may still be lost with it."""
        pending.term = term
        pending.maybe_applied = True
        if term < self.term:
            self.hold(until_ms=0)  # there is a newer leader, so the batch may be lost

    def observe_term(self, term: int) -> None:
        """Note that an answer named `term`. Batches that an older leader accepted are sent again."""
        if term > self.term:
            self.term = term
            if any(0 <= each.term < term for each in self.flying):
                self.hold(until_ms=0)

    def durable(self, term: int, committed: int) -> list[Pending]:
        """Remove and return the accepted batches that are durable now, oldest first.

        The leader of `term` reported that all records before offset `committed` are durable.
        """
        found: list[Pending] = []
        while self.flying:
            first = self.flying[0]
            if first.under_way or first.term != term or first.base_offset + len(first.values) > committed:
                break
            found.append(self.flying.popleft())
        return found

    def all_accepted(self) -> bool:
        """Return whether every batch was at least accepted: it is in the log of some leader."""
        return not (self.under_way or self.closed or self.open is not None or self.recovering)

    def first_number(self) -> int:
        """Return the lowest number (see `Pending`) of a record without a receipt; 0 if there is none."""
        if self.ended:  # what is in doubt comes after what the partition did not take
            return min((each.first_number for each in self.waiting() if each.first_number), default=0)
        for queue in (self.flying, self.closed):
            if queue:
                return queue[0].first_number
        return self.open.first_number if self.open is not None else 0

    def hold(self, *, until_ms: int) -> None:
        """Stop sending until all requests under way have ended and `until_ms` is past; then send again."""
        self.recovering = True
        self.resume_ms = max(self.resume_ms, until_ms)

    def waits_since_ms(self) -> int | None:
        """Return when the oldest request under way was sent (ms); None if none is under way."""
        return min((each.sent_ms for each in self.flying if each.under_way), default=None)

    def is_first(self, pending: Pending) -> bool:
        """Return whether every batch sent before `pending` has its receipt."""
        return bool(self.flying) and self.flying[0] is pending

    def drop(self, pending: Pending) -> None:
        """Remove a batch that is settled, or is about to be settled, from the queue."""
        for queue in (self.flying, self.closed):
            if pending in queue:
                queue.remove(pending)
                return
        if self.open is pending:
            self.open = None

    def waiting(self) -> list[Pending]:
        """Return all batches without a receipt, in order of sending."""
        found = [*self.flying, *self.closed, *([self.open] if self.open is not None else [])]
        if self.ended:
            found.sort(key=lambda pending: pending.order)
        return found
