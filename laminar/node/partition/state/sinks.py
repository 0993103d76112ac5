"""The table of sinks of one coordinator: their epochs and decisions.

A sink is a named sequence of batches, each committed once and in order of their numbers, by whichever driver.
`begin` raises its epoch, so that an older driver is refused. A *decision* is the commit point of one batch;
it remains until it is published in every partition that it names, and nothing later is decided before.

The name of a producer is kept like a sink that never commits: an id, and an epoch for each program that took
it.

A sink that is begun `once` writes one batch and is never used again: its name is made up for it. Such sinks
are forgotten in time, or each write of that kind would leave an entry for ever. Names that people chose
are kept: forgetting one would make its batches new again.

One that is deleted is known as such: first as one of which partitions still know something, then as one
whose name is free. Their number is bounded like that of those that wrote once. When one is forgotten, the
*floor* rises to its last epoch: a sink that is not known begins above it, so no epoch of one that was deleted
comes again.

A function of the coordinator's log, as the tables of producers and stages (docs/consensus.md#derived-tables).
"""

from __future__ import annotations

import heapq
from collections import deque
from enum import IntEnum

import msgspec

from laminar.batch import Buffer, Header, body_of

# Of producers; of more, those are forgotten that were not taken for longest. Their next epochs have new ids.
MAX_NAMES = 10_000
# Of sinks that write once and have done so; of more, those go that were not changed for longest, but none
# that was changed within ONCE_MS by times in the log, as commits are tried again for a while. As many of
# those that have not: so one that takes long is not forgotten for others that come and go meanwhile.
MAX_ONCE = 10_000
# Sinks of one coordinator that are kept for ever: no more are begun.
MAX_KEPT = 10_000
ONCE_MS = 2 * 3_600_000
# A table that outgrew its bound, as it held nothing that old, shrinks gradually.
_FORGOTTEN_AT_ONCE = 2
# Epochs of sinks that write once begin here; see `first_once_epoch`.
FIRST_ONCE_EPOCH = 1 << 31
_ONCE_EPOCHS = 1 << 30


def first_once_epoch(index: int) -> int:
    """Return the first epoch of a sink that writes once, on a log whose last entry is `index`.

    A forgotten name that is used again begins after a later entry: so no epoch that was ever announced comes
    again, not even as one of a sink that is kept, whose epochs begin at 1.
    """
    return FIRST_ONCE_EPOCH + index % _ONCE_EPOCHS


class Deletion(IntEnum):
    """The progress of a sink's deletion."""

    NONE = 0
    # Nothing more is decided; partitions may still hold state of it.
    BEGUN = 1
    # No partition holds state of it: its name may be used again.
    DONE = 2


class Target(msgspec.Struct, frozen=True, array_like=True):
    """A partition of a decision.

    `group` distinguishes it from one of the same name that was made later. `pin`, the index of the pin there,
    distinguishes the stages that were pinned for the decision from what is staged and pinned again.
    """

    topic: str
    partition: int
    group: bytes
    # 0 in decisions that were made before they named it.
    pin: int = 0


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The decision that batch `number`, staged under `epoch`, is committed in these partitions."""

    number: int
    epoch: int
    targets: tuple[Target, ...]


class Sink(msgspec.Struct, frozen=True, array_like=True):
    """The state of one sink, or of a producer's name.

    `name` is for people. `number` is that of the last decision, -1 before the first; `undone` is that
    decision while it is not published everywhere. `producer` is the id that belongs to a producer's name.
    `begun_by`: the request that raised the epoch last; the same again does not raise it once more.
    `first`: the epoch that it began with, or would. `once`: it is forgotten some time after its last change.
    `fingerprint`: its driver's digest of the last decided batch, which tells it from others; "": none given.
    `deletion`: under the epochs up to this one nothing is decided any more. `deleted_by`: the request that
    deleted the sink which had this name before; the same again does not delete this one.
    """

    name: str
    epoch: int = 0
    number: int = -1
    undone: Decision | None = None
    changed_ms: int = 0
    producer: bytes = b""
    # The fields from here on were added later: older logs lack them.
    begun_by: str = ""
    first: int = 1
    once: bool = False
    fingerprint: str = ""
    deletion: Deletion = Deletion.NONE
    deleted_by: str = ""

    @property
    def exists(self) -> bool:
        """Whether it began, was not deleted, and is no producer's name."""
        return self.epoch > 0 and not self.deletion and not self.producer

    @property
    def is_listed(self) -> bool:
        """Whether it exists, or its deletion is under way."""
        return self.exists or self.deletion is Deletion.BEGUN

    @property
    def last_epoch(self) -> int:
        """The highest epoch that one of this name may have had."""
        return max(self.epoch, self.first - 1)


class SinkChange(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a `sink` entry: the new state of the sink with this id (16 bytes)."""

    sink_id: bytes
    sink: Sink


class SinkEntry(msgspec.Struct, frozen=True, array_like=True):
    """One sink in a stored table."""

    sink_id: bytes
    sink: Sink


_decoder = msgspec.msgpack.Decoder(SinkChange)


class _ByAge:
    """Ids in the order of their last change; those of the same millisecond in that of their bytes.

    A function of what it holds, however that came about: so replicas agree that got there by other ways.
    """

    __slots__ = ("_changed_ms", "_heap")

    def __init__(self) -> None:
        self._changed_ms: dict[bytes, int] = {}
        # All that is held, and what was held before: that is passed over when it comes up.
        self._heap: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._changed_ms)

    def put(self, sink_id: bytes, changed_ms: int) -> None:
        self._changed_ms[sink_id] = changed_ms
        heapq.heappush(self._heap, (changed_ms, sink_id))
        if len(self._heap) > 2 * len(self._changed_ms) + 64:
            self._heap = [(changed, held) for held, changed in self._changed_ms.items()]
            heapq.heapify(self._heap)

    def discard(self, sink_id: bytes) -> None:
        self._changed_ms.pop(sink_id, None)

    def oldest(self) -> tuple[int, bytes]:
        """Return the time of change and the id of the oldest; there must be one."""
        while self._changed_ms.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0]


class Sinks:
    """The sinks of one coordinator by id."""

    __slots__ = ("_begun", "_names", "_once", "_sinks", "_undo", "floor")

    def __init__(self) -> None:
        self._sinks: dict[bytes, Sink] = {}
        # No sink that was deleted and forgotten had a higher epoch, but those that began to write once.
        self.floor = 0
        # (index, id, sink before, floor before) of changes that may be truncated.
        self._undo: deque[tuple[int, bytes, Sink | None, int]] = deque()
        # What may be forgotten of the sinks: names of producers; what writes once, before that and after it.
        self._names = _ByAge()
        self._begun = _ByAge()
        self._once = _ByAge()

    def __len__(self) -> int:
        return len(self._sinks)

    @property
    def kept(self) -> int:
        """Number of sinks that are never forgotten."""
        return len(self._sinks) - len(self._names) - len(self._begun) - len(self._once)

    def get(self, sink_id: bytes) -> Sink | None:
        """Return the sink as of the log's end, by which a leader decides."""
        return self._sinks.get(sink_id)

    @property
    def unknown(self) -> Sink:
        """The state of a sink that is not in the table."""
        return Sink("", first=self.floor + 1)

    def listed(self, *, prefix: str, after: str, limit: int) -> list[Sink]:
        """Return the first `limit` listed sinks whose names begin with `prefix` and follow `after`."""
        found = (
            sink
            for sink in self._sinks.values()
            if sink.is_listed and sink.name > after and sink.name.startswith(prefix)
        )
        return heapq.nsmallest(limit, found, key=_name)

    def undone(self) -> list[bytes]:
        """Return the sinks with a decision that is not published everywhere, as of the log's end."""
        return [sink_id for sink_id, sink in self._sinks.items() if sink.undone is not None]

    def committed_at(self, sink_id: bytes) -> Sink | None:
        """Return the sink as it is committed: before the first change that may still be truncated."""
        for _, changed, before, _ in self._undo:
            if changed == sink_id:
                return before
        return self._sinks.get(sink_id)

    def appended(self, header: Header, frame: Buffer) -> None:
        """Apply a `sink` entry that is now the log's last."""
        change = _decoder.decode(body_of(frame))
        now_ms = header.append_time_ms
        # What is forgotten follows from the table and the entry, so that every replica forgets the same.
        if change.sink.producer:
            self._names.discard(change.sink_id)
            while len(self._names) >= MAX_NAMES:
                self._change(header.index, self._names.oldest()[1], None)
        self._change(header.index, change.sink_id, msgspec.structs.replace(change.sink, changed_ms=now_ms))
        if change.sink.once or change.sink.deletion is Deletion.DONE:
            for table in [self._begun, self._once] * _FORGOTTEN_AT_ONCE:
                if len(table) <= MAX_ONCE:
                    continue
                changed_ms, oldest = table.oldest()
                if changed_ms + ONCE_MS <= now_ms:
                    self._change(header.index, oldest, None)

    def _change(self, index: int, sink_id: bytes, sink: Sink | None) -> None:
        before = self._sinks.get(sink_id)
        self._undo.append((index, sink_id, before, self.floor))
        self._set(sink_id, sink)
        if before is None or before.producer or before.epoch >= FIRST_ONCE_EPOCH:
            return
        if sink is None or sink.epoch >= FIRST_ONCE_EPOCH:
            # Its epochs are forgotten: a sink of that name that begins later must not get one of them.
            self.floor = max(self.floor, before.epoch)

    def _set(self, sink_id: bytes, sink: Sink | None) -> None:
        for table in (self._names, self._begun, self._once):
            table.discard(sink_id)
        if sink is None:
            self._sinks.pop(sink_id, None)
            return
        self._sinks[sink_id] = sink
        if sink.producer:
            self._names.put(sink_id, sink.changed_ms)
        elif sink.deletion is Deletion.DONE:
            self._once.put(sink_id, sink.changed_ms)
        elif sink.once and sink.undone is None and not sink.deletion:
            (self._begun if sink.number < 0 else self._once).put(sink_id, sink.changed_ms)

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, which were truncated."""
        while self._undo and self._undo[-1][0] >= index:
            _, sink_id, before, self.floor = self._undo.pop()
            self._set(sink_id, before)

    def committed(self, index: int) -> None:
        """Forget how to roll back entries up to `index`: they are committed."""
        while self._undo and self._undo[0][0] <= index:
            self._undo.popleft()

    def stored(self) -> list[SinkEntry]:
        """Return all sinks as of the log's end, by id."""
        return [SinkEntry(sink_id, sink) for sink_id, sink in sorted(self._sinks.items())]

    def stored_at(self, index: int) -> list[SinkEntry]:
        """Return all sinks as of entry `index`, which is the last committed one or a later one."""
        sinks = dict(self._sinks)
        for at, sink_id, before, _ in reversed(self._undo):
            if at <= index:
                break
            if before is None:
                sinks.pop(sink_id, None)
            else:
                sinks[sink_id] = before
        return [SinkEntry(sink_id, sink) for sink_id, sink in sorted(sinks.items())]

    def floor_at(self, index: int) -> int:
        """Return the floor as of entry `index`, as `stored_at` does the sinks."""
        return next((floor for at, _, _, floor in self._undo if at > index), self.floor)

    def restore(self, entries: list[SinkEntry], floor: int = 0) -> None:
        """Replace the table by a stored one, without a way back to what was known before."""
        self._sinks = {}
        self.floor = floor
        self._names, self._begun, self._once = _ByAge(), _ByAge(), _ByAge()
        self._undo.clear()
        for entry in entries:
            self._set(entry.sink_id, entry.sink)


def _name(sink: Sink) -> str:
    return sink.name
