"""How a partition knows a batch that was appended before: by its idempotency key, or its producer's numbers.

What is remembered is of the log's end, committed or not: so a retry finds its first try also while that is
under way. The tables are asked here, and what they say becomes a receipt or a refusal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from laminar.batch import NO_PRODUCER, Header
from laminar.batch.header import Flag
from laminar.node.partition.problems import (
    key_expired,
    key_in_progress,
    key_reused,
    refused_batch,
    table_full,
)
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state import idempotency_keys, producers
from laminar.node.partition.state.producers import Place, Refused

if TYPE_CHECKING:
    from laminar.node.partition.partition import Partition


def has_seen(partition: Partition, header: Header) -> bool:
    """Whether something is remembered under this batch's key, or under its producer's number."""
    if header.flags & Flag.KEYED:
        return partition.tables.keys.get(header.producer_id) is not None
    if header.producer_id == NO_PRODUCER:
        return False
    known = partition.producers.check(header.producer_id, header.producer_epoch, header.sequence)
    return isinstance(known, Place)


def first_try(
    partition: Partition, header: Header, *, key_made_ms: int | None = None
) -> tuple[int, Receipt] | None:
    """Raft index and receipt of the batch as it was appended before; None: it is new.

    Raises `Problem` where it is neither: another request has its key, or its first try is under way; a newer
    epoch has written, or it does not follow its producer's last.
    """
    if header.flags & Flag.KEYED:
        entry = partition.tables.keys.get(header.producer_id)
        if entry is None:
            if key_made_ms is not None:
                _check_age(partition, key_made_ms)
            check_room(partition, header)
            return None
        if entry.content != header.sequence:
            raise key_reused(entry)
        if entry.index > partition.committed_index:
            raise key_in_progress(partition)
        return entry.index, Receipt(partition.number, entry.offset, entry.count, duplicate=True)
    if header.producer_id == NO_PRODUCER:
        return None
    known = partition.producers.check(header.producer_id, header.producer_epoch, header.sequence)
    if isinstance(known, Refused):
        raise refused_batch(known, header)
    if known is None:
        check_room(partition, header)
        return None
    return known.index, Receipt(partition.number, known.offset, known.count, duplicate=True)


def _check_age(partition: Partition, key_made_ms: int) -> None:
    """Raise 409 `key_expired` for a key that is not here and may have been: it is not appended anew."""
    now_ms = max(partition.replica.wall_ms(), partition.log.last_append_time_ms)
    known_from_ms = partition.tables.keys.complete_from_ms(now_ms)
    if key_made_ms < known_from_ms:
        raise key_expired(partition, key_made_ms, known_from_ms)


def check_room(partition: Partition, header: Header) -> None:
    """Raise 429 `quota` where a new key or producer would push one out that came a short while ago.

    Who comes last in a crowd is refused, not who was there before: else a neighbour's crowd would make
    every retry of the others an append (docs/consensus.md#derived-tables).
    """
    now_ms = max(partition.replica.wall_ms(), partition.log.last_append_time_ms)
    if header.flags & Flag.KEYED:
        wait_ms = partition.tables.keys.full_for_ms(now_ms)
        if wait_ms:
            raise table_full(
                partition, field="idempotency-key", limit=idempotency_keys.MAX_KEYS, wait_ms=wait_ms
            )
    else:
        wait_ms = partition.producers.full_for_ms(header.producer_id, now_ms)
        if wait_ms:
            raise table_full(partition, field="producer_id", limit=producers.MAX_PRODUCERS, wait_ms=wait_ms)
