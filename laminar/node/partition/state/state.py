"""The derived state of one replica: everything that can be computed from its log, and nothing else.

Each table is a function of the log (docs/consensus.md#derived-tables). It changes when an entry is appended,
is rolled back when the entry is truncated, is notified of commits, and is stored in snapshots and in
`log_start` entries. This module does all of that for all tables, so that a new table can't be left out of one
of these steps. The tables are those of producers, idempotency keys, cursors, channels, delayed records,
staged batches, sinks, and of the partition's place in its topic's routes. The state also has the group's
Raft configuration, and the start that the log is to get.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import msgspec

from laminar.batch import NO_PRODUCER, Buffer, Header, Kind, body_of
from laminar.batch.header import Flag
from laminar.node.consensus.log_start import LogStartRecord, log_start_record
from laminar.node.consensus.raft_wire import ConfigurationRecord, configuration_record
from laminar.node.partition.state.channels import Channels, Started
from laminar.node.partition.state.cursors import Cursors
from laminar.node.partition.state.delayed_records import Added, DelayedRecords, delayed_change
from laminar.node.partition.state.derived_state import DerivedState, decode_state
from laminar.node.partition.state.idempotency_keys import IdempotencyKeys
from laminar.node.partition.state.producers import Producers
from laminar.node.partition.state.sinks import Sinks
from laminar.node.partition.state.staged_batches import StagedBatches
from laminar.node.partition.state.staging_entries import publish_record
from laminar.node.partition.state.succession import Sealed, Succession


class _Table(Protocol):
    """A table whose changes can each be rolled back until their entries are committed."""

    def committed(self, index: int) -> None:
        """Forget how to roll back entries up to `index`."""


class PartitionState:
    """The tables of one replica, its Raft configurations and log starts: all that is derived from its log."""

    def __init__(self, start_index: int) -> None:
        """Create the empty state of a log that starts after entry `start_index`; no entry is applied yet."""
        self.producers = Producers()
        self.keys = IdempotencyKeys()
        self.cursors = Cursors()
        self.channels = Channels()
        self.delayed = DelayedRecords()
        self.stages = StagedBatches()
        self.sinks = Sinks()
        self.succession = Succession()
        # The tables with changes that may be rolled back, and the index of the last entry that changed each.
        self._changed: dict[_Table, int] = {}
        self.committed_index = start_index
        # Whether the log was trimmed and its first `log_start` entry is not applied yet. That entry contains
        # the state after the trimmed entries.
        self._beheaded = start_index > 0
        # `log_start` entries that are not known to be committed, with their indexes, in order.
        self._starts: deque[tuple[int, LogStartRecord]] = deque()
        # The last committed `log_start` entry with its index, without the state that it carries.
        self._last_start: tuple[int, LogStartRecord] | None = None
        # The same until the log's start has been moved there; then None.
        self.due_start: tuple[int, LogStartRecord] | None = None
        # Configurations with the indexes of their entries: the last committed one, and all after it.
        self._configurations: list[tuple[int, ConfigurationRecord]] = []
        # The highest commit index in the header of any entry. The tables cannot be rolled back to before it.
        self.stamped_index = 0
        # Indexes of entries that could not be replayed because they are damaged: the tables lack them. Until
        # they are repaired, or known to be lost on all replicas, this replica decides nothing by the tables.
        self.left_out: list[int] = []
        # Bytes of log after the last snapshot, which a start would replay now.
        self.underived_bytes = 0

    def appended(self, header: Header, frame: Buffer) -> None:
        """Apply an entry that is now the log's last."""
        self.underived_bytes += len(frame)
        self.stamped_index = max(self.stamped_index, header.committed_index)
        if header.kind in (Kind.DATA, Kind.FENCE):
            self._note_producer(header, None)
        elif header.kind == Kind.DELAYED:
            change = delayed_change(frame)
            if isinstance(change, Added):
                self._note_producer(header, (change.first, change.count))
            self.delayed.appended(header, change)
            self._note_change(self.delayed, header)
        elif header.kind == Kind.CURSOR:
            self.cursors.appended(header, body_of(frame))
            self._note_change(self.cursors, header)
        elif header.kind == Kind.CHANNEL:
            self.channels.appended(header, frame)
            self._note_change(self.channels, header)
        elif header.kind in (Kind.STAGED, Kind.PREPARE, Kind.PUBLISH):
            self.stages.appended(header, frame)
            self._note_change(self.stages, header)
            if header.kind == Kind.PUBLISH and self.delayed:
                due = publish_record(frame).due
                if due is not None:
                    self.delayed.published(header, due.rows)
                    self._note_change(self.delayed, header)
        elif header.kind == Kind.SINK:
            self.sinks.appended(header, frame)
            self._note_change(self.sinks, header)
        elif header.kind in (Kind.SEAL, Kind.OPEN):
            self.succession.appended(header, frame)
            self._note_change(self.succession, header)
        elif header.kind == Kind.LOG_START:
            record = log_start_record(frame)
            if self._beheaded:
                self._restore_tables(decode_state(record.state))
                self._beheaded = False
            self.channels.started(header.index, Started(record.index, record.offset))
            self._note_change(self.channels, header)
            self.stages.started(header.index, record.index)
            self._note_change(self.stages, header)
            self._starts.append((header.index, record))
            self._configurations.append((header.index, record.configuration))
        elif header.kind == Kind.CONFIGURATION:
            configuration = configuration_record(body_of(frame))
            if configuration.successor_of:
                self.succession.made_by(header.index, configuration.successor_of)
                self._note_change(self.succession, header)
            self._configurations.append((header.index, configuration))

    def _note_producer(self, header: Header, delayed: tuple[int, int] | None) -> None:
        keyed = bool(header.flags & Flag.KEYED)
        if header.producer_id != NO_PRODUCER and not keyed:
            self.producers.appended(header, delayed=delayed)
            self._note_change(self.producers, header)
        if keyed or self.keys.by_key:
            self.keys.appended(header, delayed=delayed)
            self._note_change(self.keys, header)

    def _note_change(self, table: _Table, header: Header) -> None:
        self._changed[table] = header.index
        # What the header says is committed is never rolled back, so a replayed log piles up no undo history.
        table.committed(header.committed_index)

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, which were truncated."""
        self.left_out = [each for each in self.left_out if each < index]
        self.producers.truncated(index)
        self.keys.truncated(index)
        self.cursors.truncated(index)
        self.channels.truncated(index)
        self.delayed.truncated(index)
        self.stages.truncated(index)
        self.sinks.truncated(index)
        self.succession.truncated(index)
        while self._starts and self._starts[-1][0] >= index:
            self._starts.pop()
        while self._configurations and self._configurations[-1][0] >= index:
            self._configurations.pop()

    def committed(self, index: int) -> None:
        """Note that entries up to `index` are committed.

        The last `log_start` entry among them becomes `due_start`: the log's start is to be moved there.
        """
        self.committed_index = index
        if self._changed:
            self._forget_undo(index)
        while len(self._configurations) > 1 and self._configurations[1][0] <= index:
            del self._configurations[0]
        while self._starts and self._starts[0][0] <= index:
            at, record = self._starts.popleft()
            self._last_start = self.due_start = (at, msgspec.structs.replace(record, state=b""))

    def _forget_undo(self, index: int) -> None:
        for table, last in list(self._changed.items()):
            table.committed(index)
            if last <= index:
                del self._changed[table]

    @property
    def committed_seal(self) -> Sealed | None:
        """The `seal` entry that ends the partition, if this replica knows that it is committed, else None."""
        sealed = self.succession.sealed
        return sealed if sealed is not None and sealed.index <= self.committed_index else None

    @property
    def start_is_moving(self) -> bool:
        """Whether a `log_start` entry is not committed yet, or the log's start is not moved to it yet."""
        return bool(self._starts) or self.due_start is not None

    @property
    def next_start(self) -> int:
        """The offset at which the log will begin when all `log_start` entries in it are carried out."""
        last = self._starts[-1] if self._starts else self._last_start
        return 0 if last is None else last[1].offset

    def state(self) -> DerivedState:
        """Return all tables as of the log's end, as a value for snapshots and `log_start` entries."""
        return DerivedState(
            producers=self.producers.stored(),
            cursors=self.cursors.stored(),
            stages=self.stages.stored(),
            sinks=self.sinks.stored(),
            keys=self.keys.stored(),
            sinks_floor=self.sinks.floor,
            succession=self.succession.stored(),
            channels=self.channels.stored(),
            delayed=self.delayed.stored(),
            pins=self.channels.stored_pins(),
        )

    def state_at(self, index: int) -> DerivedState:
        """Return all tables as of entry `index`, which is the last committed one or a later one."""
        return DerivedState(
            producers=self.producers.stored_at(index),
            cursors=self.cursors.stored_at(index),
            stages=self.stages.stored_at(index),
            sinks=self.sinks.stored_at(index),
            keys=self.keys.stored_at(index),
            sinks_floor=self.sinks.floor_at(index),
            succession=self.succession.stored_at(index),
            channels=self.channels.stored_at(index),
            delayed=self.delayed.stored_at(index),
            pins=self.channels.stored_pins_at(index),
        )

    def configurations_up_to(self, index: int) -> list[tuple[int, ConfigurationRecord]]:
        """Return the Raft configurations set by entries up to `index`, each with the index of its entry.

        These are the last one that is committed, and all after it; older ones are forgotten.
        """
        return [(at, record) for at, record in self._configurations if at <= index]

    def last_start_up_to(self, index: int) -> tuple[int, LogStartRecord] | None:
        """Return the last committed `log_start` entry and its index; None if it comes after `index`.

        The state that it carries is left out.
        """
        return self._last_start if self._last_start is not None and self._last_start[0] <= index else None

    def restore(
        self,
        state: DerivedState,
        configurations: Sequence[tuple[int, ConfigurationRecord]],
        start: tuple[int, LogStartRecord] | None,
    ) -> None:
        """Restore the state as of a committed entry from a snapshot, instead of replaying the log up to it.

        `start` is the last `log_start` entry up to that entry; it is carried out again at the next commit.
        """
        self._restore_tables(state)
        self._configurations = list(configurations)
        self._beheaded = False
        if start is not None:
            self._starts.append(start)

    def _restore_tables(self, state: DerivedState) -> None:
        self.producers.restore(state.producers)
        self.cursors.restore(state.cursors)
        self.channels.restore(state.channels, state.pins)
        self.delayed.restore(state.delayed)
        self.stages.restore(state.stages)
        self.sinks.restore(state.sinks, state.sinks_floor)
        self.keys.restore(state.keys)
        self.succession.restore(state.succession)

    def adopt(self, whole: PartitionState) -> None:
        """Replace the tables, which lack damaged entries, by those of a complete replay of the log.

        The replay ran beside this replica after the entries were repaired. `left_out` is empty then.
        """
        self.producers, self.cursors = whole.producers, whole.cursors
        self.channels, self.delayed = whole.channels, whole.delayed
        self.stages, self.sinks, self.keys = whole.stages, whole.sinks, whole.keys
        whole.succession.in_doubt = self.succession.in_doubt
        self.succession = whole.succession
        self._changed = whole._changed
        self._forget_undo(self.committed_index)
        self.left_out = []
