"""What a partition remembers of its producers, so that a retry is recognised.

A function of the log: `appended` and `truncated` follow the log, nothing else changes the
table, and expiry counts append times found in the log, never a clock. So every replica
holds the same table at the same index, and a new leader knows every retry the old one knew
(CONSENSUS.md 6; the idea is Raft's client sessions, section 6.3 of Ongaro's thesis).

A producer numbers its batches per partition: 0, 1, 2, … within an epoch. The leader takes
only the next number; one it has seen again is a *duplicate* and gets the first receipt.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from laminar.batch import Header

NOBODY = bytes(16)
REMEMBERED_BATCHES = 64
MAX_PRODUCERS = 10_000
IDLE_MS = 7 * 24 * 3_600_000


@dataclass(slots=True, frozen=True)
class Place:
    """Where a remembered batch lies: Raft index, first offset, records, sequence."""

    index: int
    offset: int
    count: int
    sequence: int


@dataclass(slots=True, frozen=True)
class Refused:
    """Why a producer's batch is not taken: `fenced`, or `out_of_sequence`."""

    code: str
    expected: int


@dataclass(slots=True)
class _Producer:
    epoch: int
    next_sequence: int
    batches: deque[Place]
    seen_ms: int


class Producers:
    """The table of one partition, bounded by count and by idle time in the log."""

    __slots__ = ("_producers", "_undo")

    def __init__(self) -> None:
        self._producers: dict[bytes, _Producer] = {}
        # (index, producer id, epoch and next sequence before) of entries that may be truncated.
        self._undo: deque[tuple[int, bytes, _Producer | None]] = deque()

    def __len__(self) -> int:
        return len(self._producers)

    def check(self, producer_id: bytes, epoch: int, sequence: int) -> Place | Refused | None:
        """None: take it. A place: seen before, this is where it lies. Else why it is refused."""
        known = self._producers.get(producer_id)
        if known is None or epoch > known.epoch:
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

    def appended(self, header: Header) -> None:
        """A batch is now the log's last."""
        producer_id = header.producer_id
        if producer_id == NOBODY:
            return
        known = self._producers.pop(producer_id, None)
        self._undo.append((header.index, producer_id, known))
        place = Place(header.index, header.base_offset, header.count, header.sequence)
        batches: deque[Place] = deque(maxlen=REMEMBERED_BATCHES)
        if known is not None and known.epoch == header.producer_epoch:
            batches.extend(known.batches)
        batches.append(place)
        self._producers[producer_id] = _Producer(
            epoch=header.producer_epoch,
            next_sequence=header.sequence + 1,
            batches=batches,
            seen_ms=header.append_time_ms,
        )
        self._expire(header.index, header.append_time_ms)

    def _expire(self, index: int, now_ms: int) -> None:
        # Insertion order is order of last use, as `appended` re-inserts. The producer that
        # was just seen is last, so it is never the one dropped.
        while len(self._producers) > 1:
            oldest = next(iter(self._producers))
            state = self._producers[oldest]
            if len(self._producers) <= MAX_PRODUCERS and state.seen_ms + IDLE_MS >= now_ms:
                return
            self._undo.append((index, oldest, state))
            del self._producers[oldest]

    def truncated(self, index: int) -> None:
        """Entry `index` and all behind it are gone: roll back."""
        touched = False
        while self._undo and self._undo[-1][0] >= index:
            _, producer_id, before = self._undo.pop()
            touched = True
            if before is None:
                self._producers.pop(producer_id, None)
            else:
                self._producers[producer_id] = before
        if touched:
            # Order of last use again, as it was: the rolled back ones went to the end. The
            # sort is stable and by index, which is what the order means.
            ordered = sorted(self._producers.items(), key=lambda item: item[1].batches[-1].index)
            self._producers = dict(ordered)

    def committed(self, index: int) -> None:
        """Entries up to `index` will never be truncated."""
        undo = self._undo
        while undo and undo[0][0] <= index:
            undo.popleft()

    def snapshot(self) -> list[tuple[bytes, int, int]]:
        """(producer id, epoch, next sequence) in order of last use: for comparing replicas."""
        return [(key, state.epoch, state.next_sequence) for key, state in self._producers.items()]
