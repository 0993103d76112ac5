"""Outcomes of requests that took several attempts, or that went to several partitions in parts.

An attempt that ended without an answer may have been carried out, so after it the client never gets the
answer that nothing was done. A further attempt depends on the request: it may always be repeated if the
leader recognises the repetition, or if it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from laminar.http.api.problems import CODES, Problem
from laminar.node.partition.receipts import Receipt

LEADER_MOVED = frozenset({"not_leader", "no_leader", "draining", "not_a_replica"})
"""Codes of a shard that does not lead the partition: find the leader again, and ask it."""


def may_retry(problem: Problem, repeatable: bool, *, again: bool = False) -> bool:
    """Return whether the request may be repeated after `problem`, perhaps at another leader.

    `repeatable` says that the leader recognises a second attempt, or that the request changes nothing.
    `again` says that an earlier attempt had an unknown outcome, and may still be under way.
    """
    if problem.code == "in_progress" and again:
        return True
    if problem.code not in LEADER_MOVED:
        return repeatable and problem.code == "outcome_unknown"
    return repeatable or problem.outcome == "not_applied"


def combine_outcomes(unknown: Sequence[Problem], last: Problem) -> Problem:
    """Return the problem that answers an append: 504 unless it is certain that none of it was appended.

    The refusal by a sealed partition makes that certain for earlier attempts, too: the partition would have
    recognised records that one of them appended, and takes none from an attempt that is still under way.
    """
    if unknown and last.outcome == "not_applied" and last.code != "sealed":
        # The refusal is about the last attempt only; an earlier one may have been carried out.
        return Problem("outcome_unknown", f"{unknown[0].detail}; then: {last.detail or last.title}")
    return client_problem(last)


def keep_code(unknown: Sequence[Problem], last: Problem) -> Problem:
    """Return the last problem under its own code; its outcome is unknown if that of any attempt is unknown.

    `not_leader`, which clients do not get, becomes `no_leader`.
    """
    problem = last
    if last.code == "not_leader":
        problem = Problem("no_leader", last.detail, outcome=last.outcome)
    if unknown:
        problem.outcome = "unknown"
    return problem


def last_problem(unknown: Sequence[Problem], last: Problem) -> Problem:
    """Return the last problem of a read: a read changes nothing, so earlier attempts don't matter."""
    return last


def client_problem(problem: Problem) -> Problem:
    """Translate a problem between shards into the one that a client gets; return other problems unchanged.

    `not_leader`, which is for shards, becomes `no_leader`. If the outcome is unknown, either becomes
    `outcome_unknown`.
    """
    if problem.code in ("no_leader", "not_leader") and problem.outcome == "unknown":
        return Problem("outcome_unknown", problem.detail)
    if problem.code == "not_leader":
        return Problem("no_leader", problem.detail, outcome="not_applied")
    return problem


def _places(receipt: Receipt) -> str:
    if receipt.delayed is not None:
        return f"{receipt.partition}: {receipt.count} delayed records"
    return f"{receipt.partition}: {receipt.offset} to {receipt.offset + receipt.count - 1}"


def merge_receipts(results: Sequence[Any], topic: str) -> list[Receipt]:
    """Return the receipts of all parts of an append, if all succeeded.

    Raises:
        Problem: the problem of a failed part, preferably one with an unknown outcome. Its detail lists the
            parts that are durable.
    """
    receipts = [result for result in results if isinstance(result, Receipt)]
    failures = [result for result in results if isinstance(result, BaseException)]
    if not failures:
        return receipts
    unknown = (each for each in failures if not isinstance(each, Problem) or each.outcome == "unknown")
    worst = next(unknown, failures[0])
    if not isinstance(worst, Problem) or not receipts:
        raise worst
    durable = ", ".join(_places(receipt) for receipt in receipts)
    detail = f"{worst.detail or worst.title}; durable in {topic} all the same: {durable}"
    if CODES[worst.code].retriable:
        # A part was appended, so the answer must not allow the client to repeat the whole.
        raise Problem("outcome_unknown", detail) from worst
    worst.detail, worst.outcome = detail, "unknown"
    raise worst
