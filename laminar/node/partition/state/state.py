"""The derived state of one replica: everything that follows from its log, and nothing else.

Every table is a function of the log: changed when an entry is appended, rolled back when it is truncated,
informed of what is committed, stored beside the log and shipped with catch-up
(docs/consensus.md#derived-tables). Here they are kept together, so that one that is added can't be forgotten
in one of these places. Beside the tables of producers, keys, cursors and stages that is the group's
configuration, and where the log is to begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from laminar.batch import Buffer, Header, Kind, body_of
from laminar.batch.header import Flag
from laminar.node.consensus.log_start import LogStartRecord, log_start_record
from laminar.node.consensus.raft_wire import ConfigurationRecord, configuration_record
from laminar.node.partition.state.cursors import Cursors
from laminar.node.partition.state.derived_state import DerivedState, decode_state
from laminar.node.partition.state.idempotency_keys import IdempotencyKeys
from laminar.node.partition.state.producers import Producers
from laminar.node.partition.state.sinks import Sinks
from laminar.node.partition.state.staged_batches import StagedBatches


class PartitionState:
    """The tables of one replica."""

    def __init__(self, start_index: int) -> None:
        """Begin the state of a log that starts after entry `start_index`, before any of its entries."""
        self.producers = Producers()
        self.keys = IdempotencyKeys()
        self.cursors = Cursors()
        self.stages = StagedBatches()
        self.sinks = Sinks()
        self.committed_index = start_index
        # A log that does not begin at its first entry tells in its first `log_start` what came before.
        self._beheaded = start_index > 0
        # `log_start` entries of which it is not known that they are committed, by index.
        self._starts: deque[tuple[int, LogStartRecord]] = deque()
        # The last that is committed, without its state.
        self._last_start: tuple[int, LogStartRecord] | None = None
        # The last committed `log_start` entry, until it is carried out.
        self.due_start: tuple[int, LogStartRecord] | None = None
        # Configurations by the entry that set each: all that may be truncated, and the last before them.
        self._configurations: list[tuple[int, ConfigurationRecord]] = []
        # The highest commit index that a batch here was stamped with: the tables don't go back before it.
        self.stamped_index = 0
        # Entries that damage kept from being replayed: the tables are those of all others. Until they are
        # repaired, or known to be nowhere, nothing that rests on these is decided here.
        self.left_out: list[int] = []
        # Bytes of log that a start would replay now.
        self.underived_bytes = 0

    def appended(self, header: Header, frame: Buffer) -> None:
        """Apply an entry that is now the log's last."""
        self.underived_bytes += len(frame)
        self.stamped_index = max(self.stamped_index, header.committed_index)
        if header.kind in (Kind.DATA, Kind.FENCE):
            if not header.flags & Flag.KEYED:
                self.producers.appended(header)
            self.keys.appended(header)
            # What the header says is committed is never rolled back, so a replayed log piles up no undo
            # history.
            self.producers.committed(header.committed_index)
            self.keys.committed(header.committed_index)
        elif header.kind == Kind.CURSOR:
            self.cursors.appended(header, body_of(frame))
            self.cursors.committed(header.committed_index)
        elif header.kind in (Kind.STAGED, Kind.PIN, Kind.PUBLISH):
            self.stages.appended(header, frame)
            self.stages.committed(header.committed_index)
        elif header.kind == Kind.SINK:
            self.sinks.appended(header, frame)
            self.sinks.committed(header.committed_index)
        elif header.kind == Kind.LOG_START:
            record = log_start_record(frame)
            if self._beheaded:
                self._restore_tables(decode_state(record.state))
                self._beheaded = False
            self.stages.started(header.index, record.index)
            self.stages.committed(header.committed_index)
            self._starts.append((header.index, record))
            self._configurations.append((header.index, record.configuration))
        elif header.kind == Kind.CONFIGURATION:
            self._configurations.append((header.index, configuration_record(body_of(frame))))

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, which were truncated."""
        self.left_out = [each for each in self.left_out if each < index]
        self.producers.truncated(index)
        self.keys.truncated(index)
        self.cursors.truncated(index)
        self.stages.truncated(index)
        self.sinks.truncated(index)
        while self._starts and self._starts[-1][0] >= index:
            self._starts.pop()
        while self._configurations and self._configurations[-1][0] >= index:
            self._configurations.pop()

    def committed(self, index: int) -> None:
        """Take note that entries up to `index` are committed; a `log_start` among them becomes due."""
        self.committed_index = index
        self.producers.committed(index)
        self.keys.committed(index)
        self.cursors.committed(index)
        self.stages.committed(index)
        self.sinks.committed(index)
        while len(self._configurations) > 1 and self._configurations[1][0] <= index:
            del self._configurations[0]
        while self._starts and self._starts[0][0] <= index:
            at, record = self._starts.popleft()
            self._last_start = self.due_start = (at, msgspec.structs.replace(record, state=b""))

    @property
    def start_is_moving(self) -> bool:
        """Whether a `log_start` entry waits for its commit, or to be carried out."""
        return bool(self._starts) or self.due_start is not None

    def state(self) -> DerivedState:
        """Return all tables as of the log's end."""
        return DerivedState(
            producers=self.producers.stored(),
            cursors=self.cursors.stored(),
            stages=self.stages.stored(),
            sinks=self.sinks.stored(),
            keys=self.keys.stored(),
            sinks_floor=self.sinks.floor,
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
        )

    def configurations_up_to(self, index: int) -> list[tuple[int, ConfigurationRecord]]:
        """Return the known configurations that entries up to `index` set."""
        return [(at, record) for at, record in self._configurations if at <= index]

    def last_start_up_to(self, index: int) -> tuple[int, LogStartRecord] | None:
        """Return the last committed `log_start` entry, without its state, unless it comes after `index`."""
        return self._last_start if self._last_start is not None and self._last_start[0] <= index else None

    def restore(
        self,
        state: DerivedState,
        configurations: Sequence[tuple[int, ConfigurationRecord]],
        start: tuple[int, LogStartRecord] | None,
    ) -> None:
        """Restore the state derived up to a committed entry, in place of replaying the log."""
        self._restore_tables(state)
        self._configurations = list(configurations)
        self._beheaded = False
        if start is not None:
            self._starts.append(start)

    def _restore_tables(self, state: DerivedState) -> None:
        self.producers.restore(state.producers)
        self.cursors.restore(state.cursors)
        self.stages.restore(state.stages)
        self.sinks.restore(state.sinks, state.sinks_floor)
        self.keys.restore(state.keys)

    def adopt(self, whole: PartitionState) -> None:
        """Replace the tables by those of a complete replay that ran beside this replica."""
        self.producers, self.cursors = whole.producers, whole.cursors
        self.stages, self.sinks, self.keys = whole.stages, whole.sinks, whole.keys
        self.producers.committed(self.committed_index)
        self.cursors.committed(self.committed_index)
        self.stages.committed(self.committed_index)
        self.sinks.committed(self.committed_index)
        self.keys.committed(self.committed_index)
        self.left_out = []
