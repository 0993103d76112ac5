"""The table of sinks of one coordinator: their epochs and decisions.

A sink is a named sequence of batches, each committed once, in the order of their numbers. Each start of a
driver (the program that writes through the sink) raises the sink's epoch by `begin`, so that older drivers
are refused. A *decision* is the commit point of one batch. It stays *open* (`Sink.undone`) until the batch is
published in every partition that the decision names; no later batch is decided before that.

The name of a producer is an item of this table, too, like a sink that never commits: it has the producer's
id, and a new epoch for each program that starts under the name.

A single-use sink, begun with `once`, commits one batch and is never used again; clients generate its name.
Such sinks are forgotten some time later, otherwise each of these writes would leave an item for ever. Sinks
with names that people chose are kept: if one were forgotten, repeated batches would be taken for new ones.

A deleted sink stays in the table: first while partitions may still have state of it, then as a free name,
which a new sink may use. The number of free names is bounded together with that of single-use sinks that have
committed. When a free name is forgotten, the *floor* rises to its last epoch. A sink that is not in the table
begins above the floor, so that no epoch of a deleted sink is used twice.

The table is a function of the coordinator's log, like those of producers and of staged batches
(docs/consensus.md#derived-tables).
"""

from __future__ import annotations

import heapq
from collections import deque
from enum import IntEnum

import msgspec

from laminar.batch import Buffer, Header, body_of

# Most names of producers. When there is a further one, the name that was used least recently is forgotten; if
# a program starts under it again, it gets a new producer id.
MAX_NAMES = 10_000
# Most single-use sinks that have committed, together with free names of deleted sinks. The same limit holds,
# counted separately, for single-use sinks that have not committed, so that fast ones do not evict a slow one.
# Beyond it the one that was changed least recently is forgotten, but none that was changed within ONCE_MS, by
# append times: clients repeat their commits for a while.
MAX_ONCE = 10_000
# Most sinks of one coordinator that are kept for ever; `begin` refuses more.
MAX_KEPT = 10_000
ONCE_MS = 2 * 3_600_000
# Most sinks that one change forgets in each of the two tables that MAX_ONCE bounds. A table that outgrew the
# bound, because all in it was recent, shrinks gradually.
_FORGOTTEN_AT_ONCE = 2
# Epochs of single-use sinks begin here; see `first_once_epoch`.
FIRST_ONCE_EPOCH = 1 << 31
_ONCE_EPOCHS = 1 << 30


def first_once_epoch(index: int) -> int:
    """Return the first epoch of a single-use sink that begins when the log's last entry is `index`.

    If the name is forgotten and used again, the sink begins at a higher index and so with a higher epoch.
    Sinks that are kept have epochs from 1, below all of these. So no epoch of a name is used twice.
    """
    return FIRST_ONCE_EPOCH + index % _ONCE_EPOCHS


class Deletion(IntEnum):
    """The progress of a sink's deletion."""

    NONE = 0
    # No batch of the sink is decided any more; partitions may still have state of it.
    BEGUN = 1
    # No partition has state of the sink: its name may be used again.
    DONE = 2


class Target(msgspec.Struct, frozen=True, array_like=True):
    """A partition in which a decision is published.

    `group` is the id of its Raft group, which tells it from a later partition of the same name.
    `prepare_index` is the index of the `prepare` entry there, which tells the decided stages from stages that
    are prepared again later. `pin_index` is the index of the entry that pinned the records of channels that
    the batch acknowledges there (0: none). `has_records` says whether the batch has stages there.
    """

    topic: str
    partition: int
    group: bytes
    # 0 in decisions of older versions, which did not name the prepare.
    prepare_index: int = 0
    # The fields from here on came with acknowledgements: every target had records.
    pin_index: int = 0
    has_records: bool = True


class Decision(msgspec.Struct, frozen=True, array_like=True):
    """The decision to commit batch `number`, staged under `epoch`, in the partitions `targets`."""

    number: int
    epoch: int
    targets: tuple[Target, ...]


class Sink(msgspec.Struct, frozen=True, array_like=True):
    """The state of one sink, or of a producer's name.

    `name` is for people; the sink's id is a hash of it. `epoch` is 0 before the first `begin`.
    `number` is the number of the last decided batch, -1 before the first.
    `undone` is the last decision until it is published in all its partitions, then None.
    `changed_ms` is the append time of the last change.
    `producer` is the producer's id if this is a producer's name, else empty.
    `begun_by` is the request that raised the epoch last; a repetition of this request raises nothing.
    `first` is the sink's first epoch, or the one that it will get if it has not begun.
    `once` is True for a single-use sink, which is forgotten some time after its last change.
    `fingerprint` is the driver's digest of the last decided batch; "" if none was given.
    `deletion` is the progress of its deletion; from `BEGUN` on no batch is decided under epochs to `epoch`.
    `deleted_by` is the request that deleted an earlier sink of this name; a repetition of this request does
    not delete the present sink.
    `made_by` is the principal that created the sink and whose limit it counts towards; "": none.
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
    made_by: str = ""

    @property
    def exists(self) -> bool:
        """Whether this is a sink (not a producer's name) that has begun and whose deletion has not begun."""
        return self.epoch > 0 and not self.deletion and not self.producer

    @property
    def is_listed(self) -> bool:
        """Whether the sink exists, or its deletion is under way."""
        return self.exists or self.deletion is Deletion.BEGUN

    @property
    def last_epoch(self) -> int:
        """The highest epoch that a sink of this name may have had; the next epoch is one higher."""
        return max(self.epoch, self.first - 1)


class SinkChange(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a `sink` entry: the new state of the sink with this id (16 bytes)."""

    sink_id: bytes
    sink: Sink


class SinkEntry(msgspec.Struct, frozen=True, array_like=True):
    """One sink in the form stored in snapshots and `log_start` entries."""

    sink_id: bytes
    sink: Sink


_decoder = msgspec.msgpack.Decoder(SinkChange)


class _ByAge:
    """A set of ids in the order of their last change; those of the same millisecond are ordered by id.

    The order depends only on the ids and times, not on the order of the calls of `put`. So replicas agree on
    it, even if one replayed the log and another restored a snapshot.
    """

    __slots__ = ("_changed_ms", "_heap")

    def __init__(self) -> None:
        self._changed_ms: dict[bytes, int] = {}
        # (time, id) of all that is held, and outdated pairs, which `oldest` removes when they come first.
        self._heap: list[tuple[int, bytes]] = []

    def __len__(self) -> int:
        return len(self._changed_ms)

    def __contains__(self, sink_id: bytes) -> bool:
        return sink_id in self._changed_ms

    def put(self, sink_id: bytes, changed_ms: int) -> None:
        self._changed_ms[sink_id] = changed_ms
        heapq.heappush(self._heap, (changed_ms, sink_id))
        if len(self._heap) > 2 * len(self._changed_ms) + 64:
            self._heap = [(changed, held) for held, changed in self._changed_ms.items()]
            heapq.heapify(self._heap)

    def discard(self, sink_id: bytes) -> None:
        self._changed_ms.pop(sink_id, None)

    def oldest(self) -> tuple[int, bytes]:
        """Return (time of change, id) of the least recently changed id; the set must not be empty."""
        while self._changed_ms.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0]


class Sinks:
    """The table of sinks and producers' names of one coordinator, by id."""

    __slots__ = ("_begun", "_names", "_once", "_sinks", "_undo", "floor")

    def __init__(self) -> None:
        self._sinks: dict[bytes, Sink] = {}
        # The highest epoch of any sink that was deleted and forgotten, single-use sinks left out.
        self.floor = 0
        # (index of the entry, id, sink before, floor before) of changes that may be rolled back.
        self._undo: deque[tuple[int, bytes, Sink | None, int]] = deque()
        # Ids that may be forgotten: names of producers; single-use sinks that have not committed; those that
        # have, and free names of deleted sinks.
        self._names = _ByAge()
        self._begun = _ByAge()
        self._once = _ByAge()

    def __len__(self) -> int:
        return len(self._sinks)

    @property
    def kept(self) -> int:
        """Number of sinks that are never forgotten."""
        return len(self._sinks) - len(self._names) - len(self._begun) - len(self._once)

    def made_by(self, principal: str) -> int:
        """Return how many sinks a principal has created, apart from those that may be forgotten now."""
        return sum(
            sink.made_by == principal and not sink.producer and sink_id not in self._once
            for sink_id, sink in self._sinks.items()
        )

    def names_made_by(self, principal: str) -> int:
        """Return how many names of producers were first used by a principal."""
        return sum(bool(sink.producer) and sink.made_by == principal for sink in self._sinks.values())

    def get(self, sink_id: bytes) -> Sink | None:
        """Return the sink as of the log's end, committed or not; None if it is not in the table."""
        return self._sinks.get(sink_id)

    @property
    def unknown(self) -> Sink:
        """The initial state of a sink that is not in the table.

        Its first epoch is above all forgotten ones (the floor).
        """
        return Sink("", first=self.floor + 1)

    def listed(self, *, prefix: str, after: str, limit: int) -> list[Sink]:
        """Return at most `limit` listed sinks, by name, that begin with `prefix` and come after `after`."""
        found = (
            sink
            for sink in self._sinks.values()
            if sink.is_listed and sink.name > after and sink.name.startswith(prefix)
        )
        return heapq.nsmallest(limit, found, key=_name)

    def undone(self) -> list[bytes]:
        """Return the ids of sinks whose last decision is not published in all its partitions yet."""
        return [sink_id for sink_id, sink in self._sinks.items() if sink.undone is not None]

    def committed_at(self, sink_id: bytes) -> Sink | None:
        """Return the sink as of the last commit known here, before every change that may be truncated."""
        for _, changed, before, _ in self._undo:
            if changed == sink_id:
                return before
        return self._sinks.get(sink_id)

    def appended(self, header: Header, frame: Buffer) -> None:
        """Apply a `sink` entry that is now the log's last."""
        change = _decoder.decode(body_of(frame))
        now_ms = header.append_time_ms
        # Which items are forgotten depends only on the table and the entry: every replica forgets the same.
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
            # The epochs of this sink are forgotten now. A later sink of its name must not get one of them.
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
        """Return all sinks as of the log's end, by id, as values for snapshots and `log_start` entries."""
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
        """Return the floor (the highest epoch of forgotten names) as of entry `index`.

        `index` is that of the last committed entry or a later one.
        """
        return next((floor for at, _, _, floor in self._undo if at > index), self.floor)

    def restore(self, entries: list[SinkEntry], floor: int = 0) -> None:
        """Replace the table by one from a snapshot; no change before this can be rolled back."""
        self._sinks = {}
        self.floor = floor
        self._names, self._begun, self._once = _ByAge(), _ByAge(), _ByAge()
        self._undo.clear()
        for entry in entries:
            self._set(entry.sink_id, entry.sink)


def _name(sink: Sink) -> str:
    return sink.name
