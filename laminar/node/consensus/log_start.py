"""The `log_start` entry, by which the replicas of a group remove their oldest records together.

The leader appends it like any other entry; once it is committed, each replica lets its log begin after the
entry that it names. The `log_start` entry contains all that was derived from the removed entries: the group's
configuration and the state of its state machine, as they were before this entry. So a trimmed log is still
complete by itself: an entry that sets the log's start lies after that start, so a reader that begins at the
first entry always comes to a `log_start` entry, and its state is complete.

The state is bytes here; a partition's is a `laminar.node.partition.state.derived_state.DerivedState`.
"""

from __future__ import annotations

import msgspec

from laminar.batch import Buffer, Kind, body_of, build_control
from laminar.node.consensus.raft_wire import ConfigurationRecord


class LogStartRecord(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a `log_start` entry: where the log begins, and the state derived from the removed entries.

    (`index`, `term`) is the last entry that is removed, `time_ms` its append time; `offset` is that of the
    first record kept. `state` is left encoded, as it is large and seldom read.
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
