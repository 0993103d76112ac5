"""Outcomes of requests that took several attempts, or that went to several partitions in parts.

An attempt that ended without an answer may have been carried out. After one, the client is never answered
that nothing was done. Whether there is another attempt depends on the request: one that the leader
recognises, or that changes nothing, may always be repeated.
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

    `repeatable`: the leader recognises a second attempt, or it changes nothing. `again`: an earlier attempt
    had an unknown outcome, and may still be under way.
    """
    if problem.code == "in_progress" and again:
        return True
    if problem.code not in LEADER_MOVED:
        return repeatable and problem.code == "outcome_unknown"
    return repeatable or problem.outcome == "not_applied"


def combine_outcomes(unknown: Sequence[Problem], last: Problem) -> Problem:
    """Return the problem that answers an append: 504 unless it is sure that nothing of it was appended.

    A sealed partition is sure also of earlier attempts: it would have recognised what one has appended, and
    takes nothing of one that is still under way.
    """
    if unknown and last.outcome == "not_applied" and last.code != "sealed":
        # The refusal is about the last attempt only; an earlier one may have been carried out.
        return Problem("outcome_unknown", f"{unknown[0].detail}; then: {last.detail or last.title}")
    return client_problem(last)


def keep_code(unknown: Sequence[Problem], last: Problem) -> Problem:
    """Return the last problem under its own code, with an unknown outcome if that of any attempt is unknown.

    `not_leader`, which clients do not get, becomes `no_leader`.
    """
    problem = last
    if last.code == "not_leader":
        problem = Problem("no_leader", last.detail, outcome=last.outcome)
    if unknown:
        problem.outcome = "unknown"
    return problem


def last_problem(unknown: Sequence[Problem], last: Problem) -> Problem:
    """Return the last problem as it is: a read changes nothing, so earlier attempts don't matter."""
    return last


def client_problem(problem: Problem) -> Problem:
    """Return `problem` as clients get it.

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
    """Return all receipts, if all parts of an append succeeded.

    Raises:
        Problem: that of a part that failed, first one with an unknown outcome; it lists the durable parts.
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
