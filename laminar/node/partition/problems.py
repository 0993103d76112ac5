"""The problems that a partition answers with: one function for each reason.

A problem's outcome says whether the request was applied: `not_applied`, or `unknown` if this replica cannot
tell. The argument `name` is the partition's, as in ``orders/3``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from laminar.batch import Header
from laminar.http.api.problems import Outcome, Problem, over_limit
from laminar.node.partition.state.idempotency_keys import KeyEntry
from laminar.node.partition.state.kept_log import KeptLog
from laminar.node.partition.state.producers import Refused

FROM_TABLES: Final = frozenset(
    {
        "fenced",
        "idempotency_key_reused",
        "key_expired",
        "offset_beyond_end",
        "out_of_sequence",
        "precondition_failed",
        "quota",
        "unknown_producer",
    }
)
"""Codes of refusals that are derived from the tables or the log's end: outdated ones on a deposed leader."""


class Maker(NamedTuple):
    """The principal that creates something in a partition (a cursor, a sink, an upload), and its limit."""

    principal: str = ""
    """Its name; empty if the cluster itself is the creator."""
    most: int | None = None
    """How many of these things the principal may have; None: no limit."""

    def check(self, what: str, held: Callable[[str], int]) -> None:
        """Check that the principal may create one more.

        `what` names the things in the message; `held` returns how many of them a principal has.

        Raises:
            Problem: 429 `quota` if the principal has as many as it may.
        """
        if self.most is not None and (has := held(self.principal)) >= self.most:
            raise over_limit(what, has + 1, self.most)


NO_MAKER: Final = Maker()


def not_leader(name: str, *, outcome: Outcome) -> Problem:
    """Return the `not_leader` problem (503, retriable) for a partition that this replica does not lead."""
    return Problem(
        "not_leader", f"this replica of {name} is not the leader", retry_after_ms=50, outcome=outcome
    )


def truncated(name: str, outcome: Outcome) -> Problem:
    """Return the problem of an append whose entry was truncated in favour of another leader's entry.

    If the outcome is `not_applied` the problem is `not_leader`, which clients retry, else `outcome_unknown`.
    """
    if outcome == "not_applied":
        return not_leader(name, outcome=outcome)
    return Problem("outcome_unknown", f"another replica of {name} leads now")


def with_keepers(problem: Problem, name: str, kept: KeptLog | None) -> Problem:
    """Add the channels that keep this log to a `disk_full` problem; return other problems unchanged."""
    if kept is None or problem.code != "disk_full":
        return problem
    return Problem(
        problem.code,
        f"{problem.detail}; {kept.size_bytes} bytes of {name} are kept beyond its retention for {kept}",
        field=problem.field,
        value=problem.value,
        limit=problem.limit,
        hint="Let the consumers of the channels continue: they are served until the free space is below half "
        "of the low-water mark. Or free space on the node's disk. A channel also keeps less when you move it "
        "(`laminar channel seek`), drop its dead records, or delete it.",
        retry_after_ms=problem.retry_after_ms,
        outcome=problem.outcome,
    )


def too_few_replicas(name: str, in_sync: Sequence[str], *, replicas: int, wanted: int) -> Problem:
    """Return the `too_few_replicas` problem (503) for a partition with too few voters in sync.

    `in_sync` are the nodes of the voters in sync, `replicas` is the number of all voters, `wanted` the
    topic's `min_replicas`.
    """
    return Problem(
        "too_few_replicas",
        f"{name} has {len(in_sync)} of {replicas} replicas in sync "
        f"({', '.join(sorted(in_sync))}), and min_replicas is {wanted}",
        field="min_replicas",
        value=len(in_sync),
        limit=wanted,
        outcome="not_applied",
    )


def too_much_uncommitted(name: str, used_bytes: int, limit_bytes: int) -> Problem:
    """Return the `overloaded` problem (503) for a partition with too many bytes waiting for their commit."""
    return Problem(
        "overloaded",
        f"partition {name} has {used_bytes} bytes waiting to be committed",
        field="uncommitted_bytes",
        value=used_bytes,
        limit=limit_bytes,
        retry_after_ms=100,
        outcome="not_applied",
    )


def entry_too_large(name: str, size_bytes: int, limit_bytes: int) -> Problem:
    """Return the `too_large` problem (413) for a batch that is larger than a message to a replica may be."""
    return Problem(
        "too_large",
        f"a batch for {name} is larger than a message to a replica may be",
        field="batch_bytes",
        value=size_bytes,
        limit=limit_bytes,
        outcome="not_applied",
    )


def not_delayed(name: str, field: str, why: str, *, value: object = None) -> Problem:
    """Return the `invalid` problem (422) of an append whose records cannot be delayed; `why` says why."""
    return Problem("invalid", f"{name}: {why}", field=field, value=value, outcome="not_applied")


def too_much_delayed(name: str, field: str, value: int, limit: int) -> Problem:
    """Return the `quota` problem (429) of a partition that holds as many delayed records as it may."""
    return Problem(
        "quota",
        f"{name} holds too many delayed records",
        field=field,
        value=value,
        limit=limit,
        retry_after_ms=60_000,
        outcome="not_applied",
    )


def sealed(name: str, version: int) -> Problem:
    """Return the `sealed` problem (409) of a partition whose seal is final.

    Its `limit` is `version`, the version of the topic's route that names the partitions that follow.
    """
    return Problem(
        "sealed",
        f"{name} takes no more records: route {version} names the partitions that follow it",
        field="partition",
        limit=version,
        outcome="not_applied",
    )


def not_open(name: str) -> Problem:
    """Return the `changing` problem (503, retriable) of a partition whose inputs are not all sealed yet."""
    return Problem(
        "changing", f"{name} takes records when the partitions before it have ended", outcome="not_applied"
    )


def in_doubt(name: str) -> Problem:
    """Return the `changing` problem (503, retriable) of a partition whose log may have lost its seal."""
    return Problem(
        "changing",
        f"{name} may have lost entries of its log; the catalog is asked whether it has been sealed",
        outcome="not_applied",
    )


def held(name: str) -> Problem:
    """Return the `changing` problem (503, retriable) of a new transaction or upload before a seal."""
    return Problem(
        "changing",
        f"{name} begins no transaction and no large record now: its route is about to change",
        outcome="not_applied",
    )


def seal_uncommitted(name: str) -> Problem:
    """Return the `changing` problem (503, retriable) of a partition whose seal is not committed yet."""
    return Problem(
        "changing", f"{name} is being sealed; its seal is not committed yet", outcome="not_applied"
    )


def refused_batch(refused: Refused, header: Header) -> Problem:
    """Return the problem of a batch whose producer is fenced or unknown, or which is out of sequence."""
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
            "the partition does not know this producer, or has forgotten it since its last batch; the first "
            "batch here has the number 0",
            field="sequence",
            value=header.sequence,
            limit=refused.expected,
            # If the producer was forgotten, this batch may have been appended before.
            outcome="unknown",
        )
    return Problem(
        refused.code,
        "batches of a producer are numbered 0, 1, 2, … in each partition and taken in order",
        field="sequence",
        value=header.sequence,
        limit=refused.expected,
        # A batch with a lower number was applied, so long ago that its place is forgotten.
        outcome="unknown" if header.sequence < refused.expected else "not_applied",
    )


def table_full(name: str, *, field: str, limit: int, wait_ms: int) -> Problem:
    """Return the `quota` problem (429): every known key or producer is too recent to be evicted.

    `field` says which table is full and `limit` how many the table holds. The problem asks the client to
    retry after `wait_ms`, but at the latest after a minute.
    """
    return Problem(
        "quota",
        f"{name} remembers {limit} at a time, and all of them are too recent to be forgotten",
        field=field,
        value=limit,
        limit=limit,
        retry_after_ms=min(wait_ms, 60_000),
        outcome="not_applied",
    )


def key_reused(entry: KeyEntry) -> Problem:
    """Return the `idempotency_key_reused` problem (422) of a key that came with another request before."""
    return Problem(
        "idempotency_key_reused",
        f"this key came with another request, whose records have the offsets {entry.offset} to "
        f"{entry.offset + entry.count - 1}",
        field="idempotency-key",
        outcome="not_applied",
    )


def key_expired(name: str, made_ms: int, known_from_ms: int) -> Problem:
    """Return the `key_expired` problem (409) of an idempotency key that may have been used and forgotten.

    The client created the key at `made_ms`; only keys used since `known_from_ms` are surely remembered.
    """
    return Problem(
        "key_expired",
        f"{name} remembers the idempotency keys since {known_from_ms} ms; this key is older",
        field="laminar-key-time",
        value=made_ms,
        limit=known_from_ms,
    )


def key_in_progress(name: str) -> Problem:
    """Return the `in_progress` problem (409): the key's first request is appended, and not yet committed."""
    return Problem(
        "in_progress",
        f"the first request with this key is not committed yet in {name}",
        field="idempotency-key",
        retry_after_ms=100,
        outcome="unknown",
    )
