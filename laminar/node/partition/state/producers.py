"""The table of producers of one partition, by which a retry is recognised.

The table is a function of the log: only `appended` and `truncated` change it, and producers expire by the
append times in the log, never by a clock. So every replica has the same table at the same index, and a new
leader recognises every retry that the old one would have recognised (docs/consensus.md#derived-tables; the
idea is that of Raft's client sessions, section 6.3 of Ongaro's thesis).

A producer numbers its batches per partition: 0, 1, 2, … within an epoch, their *sequence numbers*. The leader
takes only the next number. A number that it remembers is a *duplicate*, and is answered with the first
receipt.

A producer's program may also number its records, in ascending order over all partitions. Then a batch
carries two such numbers: the `checkpoint` is the highest number of its records, and all records up to the
number `floor` are durable in all partitions. Both are remembered across epochs, so that a program that copies
records into the log can ask how far it has got. An entry of kind `FENCE` begins an epoch without a record:
after it the leader refuses batches of older epochs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from laminar.batch import NO_PRODUCER, Header, Kind

# Last batches of a producer that are recognised when they come again.
REMEMBERED_BATCHES = 64
MAX_PRODUCERS = 10_000
# Producers without an entry for this long, by append times, are forgotten.
IDLE_MS = 7 * 24 * 3_600_000
# No producer that appended within this time is forgotten, however many producers follow: see `full_for_ms`.
KEPT_MS = 3_600_000


@dataclass(slots=True, frozen=True)
class Place:
    """The place of a remembered batch: Raft index, first offset, number of records, sequence number.

    If its records were delayed, `delayed` is the number of the first one (`delayed_records`) and `offset` is
    meaningless.
    """

    index: int
    offset: int
    count: int
    sequence: int
    delayed: int | None = None


@dataclass(slots=True, frozen=True)
class Refused:
    """The refusal of a producer's batch, with the code `fenced`, `out_of_sequence` or `unknown_producer`.

    `expected` is the newer epoch if the code is `fenced`, else the sequence number that would be accepted.
    """

    code: str
    expected: int


@dataclass(slots=True, frozen=True)
class Progress:
    """The progress of a producer in one partition.

    `sequence` is the sequence number of its last batch, -1 if there is none in `epoch` yet. `checkpoint` and
    `floor` are the highest numbers of its program that it sent here (0: none), over all epochs.
    """

    epoch: int
    sequence: int
    checkpoint: int
    floor: int


@dataclass(slots=True)
class _Producer:
    epoch: int
    next_sequence: int
    batches: deque[Place]
    seen_ms: int
    # Index of the producer's last entry, by which the table is ordered.
    index: int
    checkpoint: int
    floor: int

    def progress(self) -> Progress:
        return Progress(self.epoch, self.next_sequence - 1, self.checkpoint, self.floor)


class ProducerEntry(msgspec.Struct, frozen=True, array_like=True):
    """One producer in the form stored in snapshots and `log_start` entries.

    `batches` holds (index, offset, count, sequence) of each remembered batch, oldest first; for delayed
    records there is a fifth value, `Place.delayed`.
    """

    producer_id: bytes
    epoch: int
    next_sequence: int
    seen_ms: int
    batches: list[tuple[int, ...]]
    index: int = 0
    checkpoint: int = 0
    floor: int = 0


class Producers:
    """The table of the producers of one partition, bounded by count and by idle time in the log."""

    __slots__ = ("_producers", "_undo")

    def __init__(self) -> None:
        self._producers: dict[bytes, _Producer] = {}
        # (index of the entry, producer id, the producer before) for changes that may be rolled back.
        self._undo: deque[tuple[int, bytes, _Producer | None]] = deque()

    def __len__(self) -> int:
        return len(self._producers)

    def check(self, producer_id: bytes, epoch: int, sequence: int) -> Place | Refused | None:
        """Return None if the batch may be appended, its place if it is a duplicate, else the refusal."""
        known = self._producers.get(producer_id)
        if known is None:
            # The producer is new or was forgotten; if forgotten, this batch may have been appended before.
            return None if sequence == 0 else Refused("unknown_producer", 0)
        if epoch > known.epoch:
            return None if sequence == 0 else Refused("out_of_sequence", 0)
        if epoch < known.epoch:
            return Refused("fenced", known.epoch)
        if sequence == known.next_sequence:
            return None
        if sequence > known.next_sequence:
            return Refused("out_of_sequence", known.next_sequence)
        for place in known.batches:
            if place.sequence == sequence:
                return place
        return Refused("out_of_sequence", known.next_sequence)

    @property
    def is_full(self) -> bool:
        """Return whether the table is so full that even producers not idle for `IDLE_MS` may be forgotten."""
        return len(self._producers) >= MAX_PRODUCERS

    def full_for_ms(self, producer_id: bytes, now_ms: int) -> int:
        """Return for how long (ms) a new producer must be refused, so that no recent one is forgotten for it.

        Recent are producers that appended within `KEPT_MS`. Return 0 if the producer is known or there is
        room. The leader refuses new producers for that time, as with `IdempotencyKeys.full_for_ms`.
        """
        if len(self._producers) < MAX_PRODUCERS or producer_id in self._producers:
            return 0
        oldest = next(iter(self._producers.values()))
        return max(0, oldest.seen_ms + KEPT_MS - now_ms)

    def fenced_at(self, producer_id: bytes, epoch: int) -> int | Refused | None:
        """Return the index of an entry after which batches of epochs before `epoch` are refused.

        That is the producer's last entry, if it is of this epoch. Return None if the epoch has not begun
        here, or a refusal if a later epoch has.
        """
        known = self._producers.get(producer_id)
        if known is None or epoch > known.epoch:
            return None
        return Refused("fenced", known.epoch) if epoch < known.epoch else known.index

    def progress(self, producer_id: bytes) -> Progress | None:
        """Return the producer's progress as of the log's end, which may be truncated; None if unknown."""
        known = self._producers.get(producer_id)
        return None if known is None else known.progress()

    def committed_progress(self, producer_id: bytes) -> Progress | None:
        """Return the producer's progress as of the last commit known here; None if unknown."""
        known = self._producers.get(producer_id)
        for _, each, before in self._undo:
            if each == producer_id:
                known = before
                break
        return None if known is None else known.progress()

    def appended(self, header: Header, *, delayed: tuple[int, int] | None = None) -> None:
        """Apply a batch or a fence that is now the log's last entry.

        `delayed` are the number of the first record and the count of records, if they are delayed.
        """
        producer_id = header.producer_id
        if producer_id == NO_PRODUCER:
            return
        known = self._producers.pop(producer_id, None)
        self._undo.append((header.index, producer_id, known))
        batches: deque[Place] = deque(maxlen=REMEMBERED_BATCHES)
        next_sequence = 0
        if header.kind is not Kind.FENCE:
            if known is not None and known.epoch == header.producer_epoch:
                batches.extend(known.batches)
            number, count = delayed or (None, header.count)
            batches.append(Place(header.index, header.base_offset, count, header.sequence, number))
            next_sequence = header.sequence + 1
        self._producers[producer_id] = _Producer(
            epoch=header.producer_epoch,
            next_sequence=next_sequence,
            batches=batches,
            seen_ms=header.append_time_ms,
            index=header.index,
            checkpoint=header.checkpoint if known is None else max(known.checkpoint, header.checkpoint),
            floor=header.floor if known is None else max(known.floor, header.floor),
        )
        self._expire(header.index, header.append_time_ms)

    def _expire(self, index: int, now_ms: int) -> None:
        # The dict is in order of last use, as `appended` inserts each producer again. The producer that was
        # just seen is last, so it is never the one that is dropped.
        while len(self._producers) > 1:
            oldest = next(iter(self._producers))
            state = self._producers[oldest]
            if len(self._producers) <= MAX_PRODUCERS and state.seen_ms + IDLE_MS >= now_ms:
                return
            self._undo.append((index, oldest, state))
            del self._producers[oldest]

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, which were truncated."""
        touched = False
        while self._undo and self._undo[-1][0] >= index:
            _, producer_id, before = self._undo.pop()
            touched = True
            if before is None:
                self._producers.pop(producer_id, None)
            else:
                self._producers[producer_id] = before
        if touched:
            # Producers that were rolled back are at the end of the dict now. Sort by the index of the last
            # entry, which is the order of last use.
            ordered = sorted(self._producers.items(), key=lambda item: item[1].index)
            self._producers = dict(ordered)

    def committed(self, index: int) -> None:
        """Forget how to roll back entries up to `index`: they are committed."""
        undo = self._undo
        while undo and undo[0][0] <= index:
            undo.popleft()

    def snapshot(self) -> list[tuple[bytes, int, int]]:
        """Return (producer id, epoch, next sequence) in order of last use, for comparing replicas."""
        return [(key, state.epoch, state.next_sequence) for key, state in self._producers.items()]

    def stored(self) -> list[ProducerEntry]:
        """Return all producers as of the log's end, in order of last use, as values for snapshots."""
        return [
            ProducerEntry(
                producer_id,
                known.epoch,
                known.next_sequence,
                known.seen_ms,
                [_stored(place) for place in known.batches],
                known.index,
                known.checkpoint,
                known.floor,
            )
            for producer_id, known in self._producers.items()
        ]

    def stored_at(self, index: int) -> list[ProducerEntry]:
        """Return the table as of entry `index`, which is the last committed one or a later one."""
        if not self._undo or self._undo[-1][0] <= index:
            return self.stored()
        copy = Producers()
        # Values of type `_Producer` are replaced, never changed, so the copies may be shallow.
        copy._producers = dict(self._producers)
        copy._undo = deque(self._undo)
        copy.truncated(index + 1)
        return copy.stored()

    def restore(self, entries: Iterable[ProducerEntry]) -> None:
        """Replace the table by one from a snapshot; no change before this can be rolled back."""
        self._undo.clear()
        self._producers = {
            entry.producer_id: _Producer(
                epoch=entry.epoch,
                next_sequence=entry.next_sequence,
                batches=deque((Place(*batch) for batch in entry.batches), maxlen=REMEMBERED_BATCHES),
                seen_ms=entry.seen_ms,
                # Older versions did not store `index`; each of their producers had a batch.
                index=entry.index or entry.batches[-1][0],
                checkpoint=entry.checkpoint,
                floor=entry.floor,
            )
            for entry in entries
        }


def _stored(place: Place) -> tuple[int, ...]:
    stored = (place.index, place.offset, place.count, place.sequence)
    return stored if place.delayed is None else (*stored, place.delayed)
