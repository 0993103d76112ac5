"""What a partition answers when it does not do as it is asked: one function for each reason.

Each says whether the request was applied: `not_applied`, or `unknown` where nobody can tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from laminar.batch import Header
from laminar.http.api.problems import Outcome, Problem
from laminar.node.partition.state.idempotency_keys import KeyEntry
from laminar.node.partition.state.producers import Refused

if TYPE_CHECKING:
    from laminar.node.partition.partition import Partition


def lost_leadership(partition: Partition, *, outcome: Outcome) -> Problem:
    """Only the leader can do this."""
    return Problem(
        "not_leader",
        f"this replica of {partition.topic}/{partition.number} is not the leader",
        retry_after_ms=50,
        outcome=outcome,
    )


def cut_off(partition: Partition, outcome: Outcome) -> Problem:
    """The entry is no more in this log: another leader's has taken its place."""
    if outcome == "not_applied":
        return lost_leadership(partition, outcome=outcome)
    return Problem("outcome_unknown", f"another replica of {partition.topic}/{partition.number} leads now")


def too_few_replicas(partition: Partition, in_sync: Sequence[str], wanted: int) -> Problem:
    """What would be appended could not have as many copies as its topic asks for."""
    return Problem(
        "too_few_replicas",
        f"{partition.topic}/{partition.number} has {len(in_sync)} of {partition.replicas} replicas in sync "
        f"({', '.join(sorted(in_sync))}), and min_replicas is {wanted}",
        field="min_replicas",
        value=len(in_sync),
        limit=wanted,
        outcome="not_applied",
    )


def refused_batch(refused: Refused, header: Header) -> Problem:
    """A producer's batch that its partition does not take."""
    if refused.code == "fenced":
        return Problem(
            "fenced",
            "a newer epoch of this producer has written here",
            field="producer_epoch",
            value=header.producer_epoch,
            limit=refused.expected,
            outcome="not_applied",
        )
    if refused.code == "unknown_producer":
        return Problem(
            "unknown_producer",
            "the partition has never heard of this producer, or not for so long that it forgot it; the first "
            "batch here has the number 0",
            field="sequence",
            value=header.sequence,
            limit=refused.expected,
            # Forgotten: it may have been taken before that.
            outcome="unknown",
        )
    return Problem(
        refused.code,
        "batches of a producer are numbered 0, 1, 2, … in each partition and taken in order",
        field="sequence",
        value=header.sequence,
        limit=refused.expected,
        # A number taken long ago, whose place is forgotten: it was applied then.
        outcome="unknown" if header.sequence < refused.expected else "not_applied",
    )


def table_full(partition: Partition, *, field: str, limit: int, wait_ms: int) -> Problem:
    """So many keys, or producers, are new here that another would push one out that may still be repeated."""
    return Problem(
        "quota",
        f"{partition.topic}/{partition.number} remembers no more at a time, and forgets none this young",
        field=field,
        value=limit,
        limit=limit,
        retry_after_ms=min(wait_ms, 60_000),
        outcome="not_applied",
    )


def key_reused(entry: KeyEntry) -> Problem:
    """The idempotency key was used with another body."""
    return Problem(
        "idempotency_key_reused",
        f"this key came with another request, whose records lie at {entry.offset} to "
        f"{entry.offset + entry.count - 1}",
        field="idempotency-key",
        outcome="not_applied",
    )


def key_expired(partition: Partition, made_ms: int, known_from_ms: int) -> Problem:
    """The key was made before all that are remembered: its first request may have been appended."""
    return Problem(
        "key_expired",
        f"{partition.topic}/{partition.number} remembers the keys since {known_from_ms}; this is older",
        field="laminar-key-time",
        value=made_ms,
        limit=known_from_ms,
    )


def key_in_progress(partition: Partition) -> Problem:
    """The first request with this key is appended, and not committed."""
    return Problem(
        "in_progress",
        f"the first request with this key waits for its commit in {partition.topic}/{partition.number}",
        field="idempotency-key",
        retry_after_ms=100,
        outcome="unknown",
    )
