"""What an append comes to that took several tries, or went to several partitions in parts.

A try that ended without an answer may have been carried out: then nobody says any more that nothing was done.
Whether there is another try depends on what is asked: one that is recognised may be made in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from laminar.http.api.problems import CODES, Problem
from laminar.node.partition.receipts import Receipt


def may_retry(problem: Problem, repeatable: bool, *, again: bool = False) -> bool:
    """Whether the same may be asked again, of another leader perhaps.

    `again`: it was asked before, and that may be under way.
    """
    if problem.code == "in_progress" and again:
        return True
    if problem.code not in ("not_leader", "no_leader", "draining", "not_a_replica"):
        return repeatable and problem.code == "outcome_unknown"
    return repeatable or problem.outcome == "not_applied"


def of_all_tries(unknown: Sequence[Problem], last: Problem) -> Problem:
    """What the client is told after several tries, of which the last ended so."""
    if unknown and last.outcome == "not_applied":
        # That is true of the last try alone.
        return Problem("outcome_unknown", f"{unknown[0].detail}; then: {last.detail or last.title}")
    return last


def final(problem: Problem) -> Problem:
    """What the client is told: a leader lost in the middle is an outcome nobody knows."""
    if problem.code in ("no_leader", "not_leader") and problem.outcome == "unknown":
        return Problem("outcome_unknown", problem.detail)
    if problem.code == "not_leader":
        return Problem("no_leader", problem.detail, outcome="not_applied")
    return problem


def whole(results: Sequence[Any], topic: str) -> list[Receipt]:
    """All receipts, or an error that lists what is durable all the same."""
    receipts = [result for result in results if isinstance(result, Receipt)]
    failures = [result for result in results if isinstance(result, BaseException)]
    if not failures:
        return receipts
    unknown = (each for each in failures if not isinstance(each, Problem) or each.outcome == "unknown")
    worst = next(unknown, failures[0])
    if not isinstance(worst, Problem) or not receipts:
        raise worst
    durable = ", ".join(f"{r.partition}: {r.offset} to {r.offset + r.count - 1}" for r in receipts)
    detail = f"{worst.detail or worst.title}; durable in {topic} all the same: {durable}"
    if CODES[worst.code].retriable:
        # Nobody may repeat the whole of it as if nothing had been done.
        raise Problem("outcome_unknown", detail) from worst
    worst.detail, worst.outcome = detail, "unknown"
    raise worst
