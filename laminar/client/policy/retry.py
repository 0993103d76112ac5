"""The decision what a client does after an answer or a lost connection: retry, redirect or fail.

Given the status and the code of an answer, or the loss of a connection, and whether the request may be
repeated, `judge_answer` and `judge_loss` return the next step. They know no socket, clock or topic. `Backoff`
gives the pauses between attempts, `StepTimeout` the time that each may take.

1. A request that may have been applied is repeated only if a second application changes nothing.
2. The pause before an attempt is the longer one of the server's `Retry-After` and `Backoff`. If the
   reason was a missing leader, only `Backoff` counts: the server's figure is in whole seconds, and
   an election takes a fraction of one.
3. A quota that does not refill with time (the number of topics, for example) has no `Retry-After`: nothing is
   repeated.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass


class Step(enum.Enum):
    """The next step of a request after an answer or a lost connection."""

    DONE = "done"
    FOLLOW = "follow"  # at once, to `Verdict.location`
    RETRY = "retry"  # after `Verdict.wait_ms`
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The next step of a request, and what the answer showed.

    ``wait_ms`` is the pause that the server asked for, 0 if none. ``stale`` says that the map of leaders is
    out of date; ``avoid`` that other nodes are to be preferred for a while; ``maybe_applied`` that the change
    may have been made although no receipt came.
    """

    step: Step
    location: str | None = None
    wait_ms: int = 0
    stale: bool = False
    avoid: bool = False
    maybe_applied: bool = False


DONE = Verdict(step=Step.DONE)
_OWN_PACE = frozenset({"no_leader", "not_leader", "not_a_replica", "replica_lagging"})
# Codes that say that the asked node does not lead the partition, or not any more.
_MAP_STALE = frozenset({"no_leader", "not_leader", "not_a_replica", "draining"})
# Codes of problems of the asked node alone: another node may not have them.
_AVOID = frozenset({"draining", "not_ready", "damaged"})
# A missing node does not join within the time of a request, and no program is replaced in it: repeating would
# only hide the reason.
_FINAL = frozenset({"too_few_nodes", "not_enabled"})
# Codes that say that a producer's batch does not follow the last one the server has.
OUT_OF_SEQUENCE = frozenset({"out_of_sequence", "sequence_gap", "unknown_producer"})
# Number of redirects in a row that are followed at once. The next one counts as a failed attempt, with a
# pause: otherwise two nodes that name each other would be asked in turns without end.
REDIRECTS_AT_ONCE = 3


def judge_answer(
    *,
    status: int,
    code: str | None,
    location: str | None,
    retry_after_ms: int | None,
    repeatable: bool,
    redirects: int = 0,
    outcome: str | None = None,
) -> Verdict:
    """Return the next step after an answer; `redirects` is the number of redirects directly before it.

    `repeatable` is true if a second application changes nothing: reads, PUTs, appends with a sequence number.
    `outcome` is the member of that name in the problem document. An unknown status is FAIL.
    """
    if 200 <= status < 300 or status == 304:
        return DONE
    if status in (307, 308) and location:
        if redirects < REDIRECTS_AT_ONCE:
            return Verdict(step=Step.FOLLOW, location=location, stale=True)
        return Verdict(step=Step.RETRY, location=location, stale=True)
    if code in _FINAL or (code == "quota" and retry_after_ms is None):
        return Verdict(step=Step.FAIL)
    if status in (429, 502, 503, 507):
        # 502 comes from a proxy, whose upstream may have done anything.
        broken = status == 502
        maybe_applied = broken or outcome == "unknown"
        if maybe_applied and not repeatable:
            return Verdict(step=Step.FAIL, maybe_applied=True)
        wait_ms = 0 if code in _OWN_PACE else (retry_after_ms or 0)
        return Verdict(
            step=Step.RETRY,
            wait_ms=wait_ms,
            stale=code in _MAP_STALE or broken,
            avoid=code in _AVOID or broken,
            maybe_applied=maybe_applied,
        )
    if status == 504 or code == "outcome_unknown":
        return Verdict(step=Step.RETRY if repeatable else Step.FAIL, stale=True, maybe_applied=True)
    return Verdict(step=Step.FAIL)


def judge_loss(*, sent: bool, repeatable: bool) -> Verdict:
    """Return the next step after a failed connection: to retry or to fail.

    `sent` says that the request may have arrived; it is then retried only if it is `repeatable`.
    """
    if sent and not repeatable:
        return Verdict(step=Step.FAIL, stale=True, avoid=True, maybe_applied=True)
    return Verdict(step=Step.RETRY, stale=True, avoid=True, maybe_applied=sent)


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Pauses between attempts: they double from `first_ms` to `ceiling_ms`.

    Each pause is drawn at random between half of its value and all of it, so that clients do not retry
    together. The ceiling is low because most retries wait for an election, which takes some 100 ms: a client
    that slept for a second would prolong the outage.
    """

    rng: random.Random
    first_ms: int = 10
    ceiling_ms: int = 250
    attempts: int = 0

    def next_ms(self) -> int:
        """Return the pause in ms before the next attempt, which is counted: the pause after it is longer."""
        # The exponent is bounded before the power is taken: attempts may run into thousands.
        full_ms = min(self.ceiling_ms, self.first_ms << min(self.attempts, 16))
        self.attempts += 1
        return self.rng.randint((full_ms + 1) // 2, full_ms)

    def reset(self) -> None:
        """Begin again with the shortest pause, after a success."""
        self.attempts = 0


class StepTimeout:
    """An adaptive time-out for a step that is repeated until it succeeds: `seconds` for the next attempt.

    It doubles, up to `most_s`, when an attempt uses all of it: with a fixed time-out a slow cluster would
    carry out every attempt, and answer none in time. After a success it halves, but not below four times the
    duration of that attempt, nor below `least_s`.
    """

    def __init__(self, *, least_s: float, most_s: float) -> None:
        self.seconds = least_s
        self.took_s = 0.0
        """What the last successful try took."""
        self._least_s = least_s
        self._most_s = most_s

    def succeeded(self, took_s: float) -> None:
        """Adapt the time-out to an attempt that got its answer after `took_s` seconds."""
        self.took_s = took_s
        self.seconds = min(max(self._least_s, self.seconds / 2, 4 * took_s), self._most_s)

    def failed(self, took_s: float, timeout_s: float) -> None:
        """Adapt the time-out to an attempt that failed after `took_s` of its `timeout_s` seconds."""
        if took_s >= timeout_s / 2:
            self.seconds = min(max(self.seconds, 2 * timeout_s), self._most_s)
