"""Acknowledgements that transactions have pinned: records that are out, and that a batch of a sink ends.

A batch of a sink may acknowledge records of channels. The leader of their partition *pins* them before the
batch is decided: they stay out under their delivery, no time runs for them, and no consumer may end them. The
pins of a batch end all at once, with the records done, or out as before. So between the decision and the
publish no other consumer is given what the decision counts as done.

A pin is of one batch, named by sink, number and epoch, and by the entry that made it: a batch that another
entry pins later, by a request that was late, is another one. What leaves the table of channels in another way
(a person moves the channel, or deletes it, or records) is not pinned any more; the batch stays in this table
until it is ended.

The table is part of that of channels, which applies its changes (`laminar.node.partition.state.channels`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import msgspec

from laminar.node.partition.state.staged_batches import BatchKey
from laminar.wire.channels import Named

PINS_SINCE: Final = 5
"""The code version from which on all nodes know pins."""


class PartAcks(NamedTuple):
    """The records of one channel that a batch acknowledges in a partition, as a request names them.

    `channel` is 0 if the catalog has none of the name that was given.
    """

    channel: int
    named: list[Named]


class Pinned(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Pin records that are out, for a batch of a sink: runs, as `spaced_runs`.

    All pins of a batch in a partition are changes of one entry.
    """

    channel: int
    sink: bytes
    number: int
    epoch: int
    runs: list[int]


class PinsEnded(msgspec.Struct, frozen=True, array_like=True, tag=12):
    """End all pins of a batch here. `done`: their records are acknowledged; else they are out as before."""

    sink: bytes
    number: int
    epoch: int
    done: bool


class PinnedBatch(NamedTuple):
    """What a batch has pinned in this partition, and the index of the entry that did.

    `parts` are pairs (channel, runs as `spaced_runs`). Some of these may not be pinned any more: see
    `Channel.pins`.
    """

    entry: int
    parts: tuple[tuple[int, tuple[int, ...]], ...]


class StoredPins(msgspec.Struct, frozen=True, array_like=True):
    """The pins of one batch in a stored table; `parts` has those that are pinned still."""

    batch: BatchKey
    entry: int
    parts: list[tuple[int, list[int]]]
