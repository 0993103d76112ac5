"""The `log_start` entry, by which the replicas of a group remove their oldest records together.

The leader appends it like any other entry. Once it is committed, each replica trims its log up to the entry
that it names. The `log_start` entry contains everything that was derived from the removed entries: the
group's configuration and the state of its state machine, as they were before this entry. So a trimmed log is
still complete by itself: the `log_start` entry lies after the start that it sets, so a reader that begins at
the first entry always comes to it, and then has the complete state.

The state is bytes here; a partition's is a `laminar.node.partition.state.derived_state.DerivedState`.
"""

from __future__ import annotations

import msgspec

from laminar.batch import Buffer, Kind, body_of, build_control
from laminar.node.consensus.raft_wire import ConfigurationRecord


class LogStartRecord(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a `log_start` entry: the new start of the log, and the state from the removed entries.

    (`index`, `term`) is the last entry that is removed, `time_ms` its append time; `offset` is the offset of
    the first record that is kept. `state` stays encoded, because it is large and seldom read.
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
    """Decode the payload of a `log_start` entry from the entry's frame."""
    return _decoder.decode(body_of(frame))
