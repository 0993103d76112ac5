"""The entry by which a partition's replicas give up their oldest records together.

The leader appends it like any other; when it is committed, each replica lets its log begin behind the entry
that it names. What was derived from the entries given up travels with it: the group's configuration, the
producers' numbers, the idempotency keys and the cursors, all as they were before this entry. So a log whose
beginning is gone still tells everything by itself: whoever reads it from its start finds the first such
entry, whose state is whole, because every start that a log can have was set by an entry that lies behind it.
"""

from __future__ import annotations

import msgspec

from laminar.batch import Buffer, Kind, body_of, build_control
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.partition.state.cursors import CursorEntry
from laminar.node.partition.state.idempotency_keys import KeyEntry
from laminar.node.partition.state.producers import ProducerEntry
from laminar.node.partition.state.sinks import SinkEntry
from laminar.node.partition.state.staged_batches import StoredStages


class DerivedState(msgspec.Struct, frozen=True, array_like=True):
    """What a partition made from its log up to an entry: producers in order of last use, cursors by name,
    what is staged, what is decided, and the idempotency keys.
    """

    producers: list[ProducerEntry]
    cursors: list[CursorEntry]
    # What a log written before there were stages says nothing of.
    stages: StoredStages = StoredStages()
    sinks: list[SinkEntry] = []
    # What a log written before there were keys says nothing of; oldest first.
    keys: list[KeyEntry] = []
    # See `Sinks.floor`. 0 in what was stored before there was one.
    sinks_floor: int = 0


class LogStartRecord(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a `log_start` entry: the entry before the new first one, and what must outlive the rest.

    `offset` is that of the first record kept, `time_ms` the append time of entry `index`. `state` is an
    encoded `DerivedState`: large and seldom read, so it is decoded only where it is needed.
    """

    index: int
    term: int
    offset: int
    time_ms: int
    configuration: ConfigurationRecord
    state: bytes

    def derived(self) -> DerivedState:
        """Producers and cursors as they were before the entry that carries this."""
        return _state_decoder.decode(self.state)

    def frame(self) -> bytearray:
        """The unstamped entry."""
        return build_control(Kind.LOG_START, msgspec.msgpack.encode(self))


_state_decoder = msgspec.msgpack.Decoder(DerivedState)
_decoder = msgspec.msgpack.Decoder(LogStartRecord)


def encode_state(state: DerivedState) -> bytes:
    """`LogStartRecord.state`."""
    return msgspec.msgpack.encode(state)


def log_start_record(frame: Buffer) -> LogStartRecord:
    """Read a whole `log_start` batch."""
    return _decoder.decode(body_of(frame))
