"""The stored form of a partition's derived state, in `log_start` entries and in snapshots.

It holds all tables of `laminar.node.partition.state.state` as values. The consensus layer carries it in
`LogStartRecord.state` as bytes, whose meaning it does not know.
"""

from __future__ import annotations

import msgspec

from laminar.node.partition.state.channels import StoredChannel
from laminar.node.partition.state.cursors import CursorEntry
from laminar.node.partition.state.delayed_records import StoredDelayed
from laminar.node.partition.state.idempotency_keys import KeyEntry
from laminar.node.partition.state.pins import StoredPins
from laminar.node.partition.state.producers import ProducerEntry
from laminar.node.partition.state.sinks import SinkEntry
from laminar.node.partition.state.staged_batches import StoredStages
from laminar.node.partition.state.succession import StoredSuccession


class DerivedState(msgspec.Struct, frozen=True, array_like=True):
    """All tables that are derived from the log up to one entry.

    Producers are in order of last use, cursors in no particular order, idempotency keys oldest first.
    Fields with a default may be absent: older versions did not store them.
    """

    producers: list[ProducerEntry]
    cursors: list[CursorEntry]
    stages: StoredStages = StoredStages()
    sinks: list[SinkEntry] = []
    keys: list[KeyEntry] = []
    # See `Sinks.floor`.
    sinks_floor: int = 0
    succession: StoredSuccession = StoredSuccession()
    channels: list[StoredChannel] = []
    delayed: StoredDelayed = StoredDelayed()
    pins: list[StoredPins] = []


_decoder = msgspec.msgpack.Decoder(DerivedState)


def encode_state(state: DerivedState) -> bytes:
    """Return `state` encoded as bytes, as `LogStartRecord.state` holds it."""
    return msgspec.msgpack.encode(state)


def decode_state(payload: bytes) -> DerivedState:
    """Return the state that `encode_state` has encoded in a `LogStartRecord.state`."""
    return _decoder.decode(payload)
