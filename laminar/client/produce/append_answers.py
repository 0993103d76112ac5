"""The answers to appends of batches: what a leader says of a batch that is durable, or only in its log."""

from __future__ import annotations

import msgspec

from laminar.batch.header import Buffer
from laminar.client.policy.partition_queue import Pending


class Placed(msgspec.Struct):
    """The place of consecutive records of a batch: partition, first offset, and their number."""

    partition: int
    offset: int
    count: int


class Durability(msgspec.Struct):
    """How many replicas the partition has, and whether a majority of them has the batch on disk."""

    replicas: int = 0
    synced: bool = False


class Appended(msgspec.Struct):
    """The answer to an append that is durable. `scheduled` are the ids of records that are delayed."""

    placed: list[Placed]
    durable: Durability = msgspec.field(default_factory=Durability)
    scheduled: list[str] = msgspec.field(default_factory=list)


class Accepted(msgspec.Struct):
    """The answer to an append that a leader has in its log, but that is not durable yet."""

    partition: int
    offset: int
    count: int
    term: int
    committed: int
    when_durable: Durability


_APPENDED = msgspec.json.Decoder(Appended)
_ACCEPTED = msgspec.json.Decoder(Accepted)


def read_accepted(body: Buffer, pending: Pending) -> Accepted:
    """Return the decoded answer to a batch that was accepted.

    Raises:
        ValueError: the answer cannot be read, or is that of another batch.
    """
    taken = _ACCEPTED.decode(body)
    if taken.partition != pending.partition or taken.count != len(pending.values):
        raise ValueError(f"{taken} is not the batch that was sent")
    return taken


def read_appended(body: Buffer, pending: Pending) -> tuple[Appended, int]:
    """Return the decoded receipt of a batch, and the offset of its first record; -1 if they are delayed.

    Delayed records whose times had passed when they arrived are appended at once, and have offsets.

    Raises:
        ValueError: the receipt cannot be read, or is that of another batch.
    """
    receipt = _APPENDED.decode(body)
    if receipt.scheduled:
        if len(receipt.scheduled) != len(pending.values) or receipt.placed:
            raise ValueError(f"{receipt} is not the delayed batch that was sent")
        return receipt, -1
    if not receipt.placed:
        raise ValueError(f"{receipt} says no place")
    placed = receipt.placed[0]
    if placed.partition != pending.partition or placed.count != len(pending.values):
        raise ValueError(f"{placed} is not the batch that was sent")
    return receipt, placed.offset
