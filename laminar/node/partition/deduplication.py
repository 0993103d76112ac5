"""Recognition of batches that were appended before, by idempotency key or by producer and sequence number.

The tables of keys and of producers are read as of the log's end, committed or not, so a retry also finds an
original whose commit is still under way. This module turns the entry of a table into a receipt or a problem.
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

    `key_made_ms` is the time at which the client says that it created the idempotency key; None: unknown.

    Raises:
        Problem: for a batch with a key, the problems of `find_key`. For a producer's batch: 409 `fenced` if a
            newer epoch of the producer has written; `out_of_sequence` or `unknown_producer` if the batch does
            not follow the producer's last one. For a new key or producer: 429 `quota` (`check_room`). If this
            partition takes no records, a batch that is surely new raises neither of the latter two: None is
            returned, and the caller refuses the batch because of the seal.
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
    """Return whether a batch that does not follow its producer's last one was surely never appended here.

    True for a batch after the next expected one, as batches are appended in order. True for an unknown
    producer, unless the table was full, because then the producer may have been evicted from it.
    """
    if refused.code == "unknown_producer":
        return not context.state.producers.is_full
    return refused.code == "out_of_sequence" and header.sequence >= refused.expected


def find_key(
    context: PartitionContext, key_id: bytes, *, content: int, made_ms: int | None
) -> tuple[int, Receipt] | None:
    """Return the Raft index and receipt of the records appended with an idempotency key; None if it is new.

    `content` is the hash of the request. `made_ms` is the time at which the key was created, or None.

    Raises:
        Problem: 422 `idempotency_key_reused` if the key came with another request before; 409 `in_progress`
            if its first request is not committed yet; 409 `key_expired` if the key is unknown, and so old
            that it may have been used and forgotten.
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
    """Raise 409 `key_expired` for an unknown key so old that the table may have forgotten it.

    The request of such a key may have been appended before, so it must not be appended now.
    """
    known_from_ms = context.state.keys.complete_from_ms(context.now_ms())
    if key_made_ms < known_from_ms:
        raise key_expired(context.name, key_made_ms, known_from_ms)


def check_room(context: PartitionContext, header: Header) -> None:
    """Raise 429 `quota` if the batch's key or producer is new, and the table is full of recent ones.

    The new one is refused so that no recent one is evicted. Otherwise many new ids would evict the ids of
    others, whose retries would be appended a second time (docs/consensus.md#derived-tables).
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
