"""Pins: records of channels that are reserved for a transaction, which will acknowledge them when it commits.

A batch of a sink (a transaction) may acknowledge records of channels. Before the batch is decided, the leader
of their partition *pins* these records: they stay out (given out, not acknowledged) under their delivery,
their time does not run out, and no consumer may acknowledge or fail them. All pins of a batch end together:
the records are then done, or out as before. So between the decision and the publish no other consumer gets a
record that the decision acknowledges.

A pin belongs to one batch, named by sink, number and epoch, and by the entry that pinned. If a late request
pins for the same batch with another entry, the decision does not count these pins as its own. A record that
leaves the table of channels otherwise (an operator moves or deletes the channel, or deletes records) is not
pinned any more; the batch stays in this table until its pins are ended.

This table is part of the table of channels, which applies its changes
(`laminar.node.partition.state.channels`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from laminar.node.partition.state.staged_batches import BatchKey
from laminar.wire.channels import Named

PINS_SINCE: Final = 5
"""The code version from which on all nodes know pins."""


class PartAcks(NamedTuple):
    """The records of one channel that a batch is to acknowledge in a partition, as a request names them.

    `channel` is the channel's id, or 0 if the catalog has no channel of the name in the request.
    """

    channel: int
    named: list[Named]


class Pinned(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Change: pin (reserve) records of one channel that are out (given out), for a batch of a sink.

    `runs` are their offsets, encoded by `spaced_runs`. All pins of a batch in a partition are in one entry.
    """

    channel: int
    sink: bytes
    number: int
    epoch: int
    runs: list[int]


class PinsEnded(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """Change: end all pins (reservations of records) of a batch in this partition.

    With `done` their records are acknowledged, otherwise they are out as before.
    """

    sink: bytes
    number: int
    epoch: int
    done: bool


class PinnedBatch(NamedTuple):
    """The records that a batch has pinned in this partition, and the index of the entry that pinned them.

    `parts` are pairs (channel id, offsets encoded by `spaced_runs`). Some of these records may not be pinned
    any more: `Channel.pins` says which still are.
    """

    entry: int
    parts: tuple[tuple[int, tuple[int, ...]], ...]


class StoredPins(msgspec.Struct, frozen=True, array_like=True):
    """The pins of one batch in the form stored in snapshots and `log_start` entries.

    `parts` has only the records that are still pinned.
    """

    batch: BatchKey
    entry: int
    parts: list[tuple[int, list[int]]]
