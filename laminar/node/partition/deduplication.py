"""Recognition of batches that were appended before, by idempotency key or by producer and sequence number.

The tables of keys and of producers are read as of the log's end, committed or not, so a retry also finds an
original whose commit is still under way. This module turns what they hold into a receipt or a problem.
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
    """Return whether the batch's key, or its producer's sequence number, is remembered. Never raises."""
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

    `key_made_ms` is the time at which its idempotency key was made, as its client says; None: not said.

    Raises:
        Problem: when the key came with another request, its first request is not committed yet, or it is
            old enough to have been forgotten; when a newer epoch of the producer has written, or the batch
            does not follow the producer's last; when a new key or producer has no room (`check_room`). A
            partition that takes no records raises neither of the last two for a batch that is not here.
    """
    takes_records = context.state.succession.takes_records
    if header.flags & Flag.KEYED:
        known_key = find_key(context, header.producer_id, content=header.sequence, made_ms=key_made_ms)
        if known_key is None and takes_records:
            check_room(context, header)
        return known_key
    if header.producer_id == NO_PRODUCER:
        return None
    known = context.state.producers.check(header.producer_id, header.producer_epoch, header.sequence)
    if isinstance(known, Refused):
        if takes_records or not _is_surely_new(context, known, header):
            raise refused_batch(known, header)
        return None
    if known is None:
        if takes_records:
            check_room(context, header)
        return None
    return known.index, Receipt(
        context.number, known.offset, known.count, duplicate=True, delayed=known.delayed
    )


def _is_surely_new(context: PartitionContext, refused: Refused, header: Header) -> bool:
    """Return whether a batch that does not follow its producer's last was never appended here.

    A later batch of a producer whose next one is not here was not appended, and neither was one of a producer
    that is not known, unless it was forgotten for others.
    """
    if refused.code == "unknown_producer":
        return not context.state.producers.is_full
    return refused.code == "out_of_sequence" and header.sequence >= refused.expected


def find_key(
    context: PartitionContext, key_id: bytes, *, content: int, made_ms: int | None
) -> tuple[int, Receipt] | None:
    """Return the Raft index and receipt of what was appended with an idempotency key, or None.

    Raises:
        Problem: when the key came with another request, its first request is not committed yet, or it is not
            known, and old enough to have been forgotten.
    """
    entry = context.state.keys.get(key_id)
    if entry is None:
        if made_ms is not None:
            _check_age(context, made_ms)
        return None
    if entry.content != content:
        raise key_reused(entry)
    if entry.index > context.committed_index:
        raise key_in_progress(context.name)
    return entry.index, Receipt(
        context.number, entry.offset, entry.count, duplicate=True, delayed=entry.delayed
    )


def _check_age(context: PartitionContext, key_made_ms: int) -> None:
    """Raise 409 `key_expired` for an unknown key that is old enough to have been forgotten.

    Its request may have been appended before, so it must not be appended now.
    """
    known_from_ms = context.state.keys.complete_from_ms(context.now_ms())
    if key_made_ms < known_from_ms:
        raise key_expired(context.name, key_made_ms, known_from_ms)


def check_room(context: PartitionContext, header: Header) -> None:
    """Raise 429 `quota` if the batch's key or producer is new and would evict one that is too recent.

    The new one is refused, rather than a recent one forgotten: otherwise a crowd of new ids would turn every
    retry of the others into an append (docs/consensus.md#derived-tables).
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
