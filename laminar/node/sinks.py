"""What a coordinator knows of its sinks: epochs, and what was decided.

A sink is a named sequence of batches, each committed once and in order of their numbers, whoever drives it.
`begin` raises its epoch, so that an older driver is refused. A *decision* is the commit point of one batch;
it stands until it is published in every partition that it names, and nothing later is decided before.

The name of a producer is kept like a sink that never commits: an id, and an epoch for each that took it.

A function of the coordinator's log, as the tables of producers and stages (CONSENSUS.md 11).
"""

from __future__ import annotations

from collections import deque

import msgspec

from laminar.batch import Header
from laminar.node.wire import Buffer

_HEADER = 128
# Of producers; of more, those are forgotten that were not taken for longest. Their next epochs have new ids.
MAX_NAMES = 10_000


class Target(msgspec.Struct, frozen=True, array_like=True):
    """A partition of a decision. `group` tells it from one of the same name that was made later."""

    topic: str
    partition: int
    group: bytes


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """Batch `number`, staged under `epoch`, is committed in these partitions."""

    number: int
    epoch: int
    targets: tuple[Target, ...]


class Sink(msgspec.Struct, frozen=True, array_like=True):
    """`name` is for people. `number` is that of the last decision, -1 before the first; `undone` is that
    decision while it is not published everywhere. `producer` is the id that belongs to a producer's name.
    `begun_by`: the request that raised the epoch last; the same again does not raise it once more.
    """

    name: str
    epoch: int = 0
    number: int = -1
    undone: Decision | None = None
    changed_ms: int = 0
    producer: bytes = b""
    # What a log written before there were such says nothing of.
    begun_by: str = ""


class SinkChange(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a `sink` entry: the new state of the sink with this id (16 bytes)."""

    sink_id: bytes
    sink: Sink


class SinkEntry(msgspec.Struct, frozen=True, array_like=True):
    """One sink in a stored table."""

    sink_id: bytes
    sink: Sink


_decoder = msgspec.msgpack.Decoder(SinkChange)


class Sinks:
    """The sinks of one coordinator by id."""

    __slots__ = ("_sinks", "_undo")

    def __init__(self) -> None:
        self._sinks: dict[bytes, Sink] = {}
        self._undo: deque[tuple[int, bytes, Sink | None]] = deque()

    def __len__(self) -> int:
        return len(self._sinks)

    def get(self, sink_id: bytes) -> Sink | None:
        """The sink as the log's end has it: what a leader decides by."""
        return self._sinks.get(sink_id)

    def undone(self) -> list[bytes]:
        """Sinks with a decision that is not published everywhere, as far as the log says."""
        return [sink_id for sink_id, sink in self._sinks.items() if sink.undone is not None]

    def committed_at(self, sink_id: bytes) -> Sink | None:
        """The sink as it was before the first change that may still be truncated."""
        for _, changed, before in self._undo:
            if changed == sink_id:
                return before
        return self._sinks.get(sink_id)

    def appended(self, header: Header, frame: Buffer) -> None:
        """A `sink` entry is now the log's last."""
        change = _decoder.decode(memoryview(frame)[_HEADER:])
        self._undo.append((header.index, change.sink_id, self._sinks.get(change.sink_id)))
        self._sinks[change.sink_id] = msgspec.structs.replace(change.sink, changed_ms=header.append_time_ms)
        if change.sink.producer:
            self._forget_names(header.index, but=change.sink_id)

    def _forget_names(self, index: int, *, but: bytes) -> None:
        names = [
            (sink.changed_ms, sink_id)
            for sink_id, sink in self._sinks.items()
            if sink.producer and sink_id != but
        ]
        if len(names) >= MAX_NAMES:
            # By what is in the table alone, so that every replica forgets the same.
            _, oldest = min(names)
            self._undo.append((index, oldest, self._sinks.pop(oldest)))

    def truncated(self, index: int) -> None:
        """Entry `index` and all behind it are gone: roll back."""
        while self._undo and self._undo[-1][0] >= index:
            _, sink_id, before = self._undo.pop()
            if before is None:
                self._sinks.pop(sink_id, None)
            else:
                self._sinks[sink_id] = before

    def committed(self, index: int) -> None:
        """Entries up to `index` will never be truncated."""
        while self._undo and self._undo[0][0] <= index:
            self._undo.popleft()

    def stored(self) -> list[SinkEntry]:
        """All sinks as the log's end has them, by id."""
        return [SinkEntry(sink_id, sink) for sink_id, sink in sorted(self._sinks.items())]

    def stored_at(self, index: int) -> list[SinkEntry]:
        """All sinks as they were behind entry `index`: the last that was committed, or one behind it."""
        copy = Sinks()
        copy._sinks = dict(self._sinks)
        copy._undo = deque(self._undo)
        copy.truncated(index + 1)
        return copy.stored()

    def restore(self, entries: list[SinkEntry]) -> None:
        """Take a stored table over; what was known before is forgotten, and cannot be rolled back to."""
        self._undo.clear()
        self._sinks = {entry.sink_id: entry.sink for entry in entries}
