"""Recognition of batches that were appended before, by idempotency key or by producer and sequence number.

What is remembered covers the log's end, committed or not, so a retry also finds an original whose commit is
still under way. The state's tables are asked here, and their answer becomes a receipt or a problem.
"""

from __future__ import annotations

from laminar.batch import NO_PRODUCER, Header
from laminar.batch.header import Flag
from laminar.node.partition.context import PartitionContext
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


def is_duplicate(context: PartitionContext, header: Header) -> bool:
    """Return whether the batch's key, or its producer's sequence number, is remembered."""
    if header.flags & Flag.KEYED:
        return context.state.keys.get(header.producer_id) is not None
    if header.producer_id == NO_PRODUCER:
        return False
    known = context.state.producers.check(header.producer_id, header.producer_epoch, header.sequence)
    return isinstance(known, Place)


def find_duplicate(
    context: PartitionContext, header: Header, *, key_made_ms: int | None = None
) -> tuple[int, Receipt] | None:
    """Return the Raft index and receipt of the batch as it was appended before, or None if it is new.

    `key_made_ms` is when its idempotency key was made, as its client says.

    Raises:
        Problem: when the key came with another request, or its first request is not committed yet; when a
            newer epoch of the producer has written; when the batch does not follow the producer's last.
    """
    if header.flags & Flag.KEYED:
        entry = context.state.keys.get(header.producer_id)
        if entry is None:
            if key_made_ms is not None:
                _check_age(context, key_made_ms)
            check_room(context, header)
            return None
        if entry.content != header.sequence:
            raise key_reused(entry)
        if entry.index > context.committed_index:
            raise key_in_progress(context.name)
        return entry.index, Receipt(context.number, entry.offset, entry.count, duplicate=True)
    if header.producer_id == NO_PRODUCER:
        return None
    known = context.state.producers.check(header.producer_id, header.producer_epoch, header.sequence)
    if isinstance(known, Refused):
        raise refused_batch(known, header)
    if known is None:
        check_room(context, header)
        return None
    return known.index, Receipt(context.number, known.offset, known.count, duplicate=True)


def _check_age(context: PartitionContext, key_made_ms: int) -> None:
    """Raise 409 `key_expired` for an absent key that may have been forgotten: it is not appended again."""
    known_from_ms = context.state.keys.complete_from_ms(context.now_ms())
    if key_made_ms < known_from_ms:
        raise key_expired(context.name, key_made_ms, known_from_ms)


def check_room(context: PartitionContext, header: Header) -> None:
    """Raise 429 `quota` where a new key or producer would evict one that is still young.

    The newcomer is refused and not the one that was there before: otherwise a crowd of new ones would turn
    every retry of the others into an append (docs/consensus.md#derived-tables).
    """
    now_ms = context.now_ms()
    if header.flags & Flag.KEYED:
        wait_ms = context.state.keys.full_for_ms(now_ms)
        if wait_ms:
            raise table_full(
                context.name, field="idempotency-key", limit=idempotency_keys.MAX_KEYS, wait_ms=wait_ms
            )
    else:
        wait_ms = context.state.producers.full_for_ms(header.producer_id, now_ms)
        if wait_ms:
            raise table_full(
                context.name, field="producer_id", limit=producers.MAX_PRODUCERS, wait_ms=wait_ms
            )
