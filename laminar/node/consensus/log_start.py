"""The `log_start` entry, by which the replicas of a group remove their oldest records together.

The leader appends it like any other entry; once it is committed, each replica lets its log begin after the
entry that it names. What was derived from the removed entries travels with it: the group's configuration, and
the state of the group's machine, as they were before this entry. So a log whose beginning is gone still tells
everything by itself: a reader that starts at its first entry finds the first `log_start` entry, whose state
is complete, because every start that a log can have was set by an entry after it.

The state is bytes here; a partition's is a `laminar.node.partition.state.derived_state.DerivedState`.
"""

from __future__ import annotations

import msgspec

from laminar.batch import Buffer, Kind, body_of, build_control
from laminar.node.consensus.raft_wire import ConfigurationRecord


class LogStartRecord(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a `log_start` entry: the entry before the new first one, and what must outlive the rest.

    `offset` is that of the first record kept, `time_ms` the append time of entry `index`. `state` is encoded,
    as it is large and seldom read.
    """

    index: int
    term: int
    offset: int
    time_ms: int
    configuration: ConfigurationRecord
    state: bytes

    def frame(self) -> bytearray:
        """Return the entry's batch, not stamped yet."""
        return build_control(Kind.LOG_START, msgspec.msgpack.encode(self))


_decoder = msgspec.msgpack.Decoder(LogStartRecord)


def log_start_record(frame: Buffer) -> LogStartRecord:
    """Return the record in a whole `log_start` batch."""
    return _decoder.decode(body_of(frame))
