"""What to do with an answer: the pure half of every call the client makes.

Given an answer (a status and a code) or the loss of a connection, and whether the request may be repeated,
`judge_answer` and `judge_loss` say what happens next. They know no socket, clock or topic. `Backoff` gives
the pauses between attempts.

1. A request that may have been applied is repeated only if repeating cannot double it.
2. No verdict waits beyond what the server asked for or `Backoff` gives, whichever is
   longer; except that a missing leader is asked for again at our own pace: the server's
   figure is in whole seconds, an election takes a fraction of one.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass


class Step(enum.Enum):
    """Next step of a request."""

    DONE = "done"
    FOLLOW = "follow"  # at once, to `Verdict.location`
    RETRY = "retry"  # after `Verdict.wait_ms`
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The next step, and what was learned on the way.

    ``wait_ms`` is the least pause the server asked for. ``stale`` says that the map of leaders was wrong;
    ``avoid`` that other endpoints are to be preferred for a while; ``maybe_applied`` that a change may have
    happened although no receipt came.
    """

    step: Step
    location: str | None = None
    wait_ms: int = 0
    stale: bool = False
    avoid: bool = False
    maybe_applied: bool = False


DONE = Verdict(step=Step.DONE)
_OWN_PACE = frozenset({"no_leader", "not_leader", "not_a_replica", "replica_lagging"})
# Codes that tell us that the leader is not (or no longer) where we thought.
_MAP_STALE = frozenset({"no_leader", "not_leader", "not_a_replica", "draining"})
# Codes of one node's own trouble, which another may not have.
_AVOID = frozenset({"draining", "not_ready", "damaged"})
# A node that is missing does not come within a request: waiting would only hide the reason.
_FINAL = frozenset({"too_few_nodes"})
# Codes that say that a producer's batch does not follow the last one the server has.
OUT_OF_SEQUENCE = frozenset({"out_of_sequence", "sequence_gap", "unknown_producer"})
# How many redirects in a row are followed before one counts as a failed attempt: leader -> new
# leader is one; two nodes that name each other would otherwise spin.
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
    """Return what an answer means for a request that was redirected `redirects` times in a row so far.

    `repeatable` is true where a second application changes nothing: reads, PUTs, appends with a sequence.
    `outcome` is what the answer says of a change. Raises nothing; an unknown status is FAIL.
    """
    if 200 <= status < 300 or status == 304:
        return DONE
    if status in (307, 308) and location:
        if redirects < REDIRECTS_AT_ONCE:
            return Verdict(step=Step.FOLLOW, location=location, stale=True)
        return Verdict(step=Step.RETRY, location=location, stale=True)
    if code in _FINAL:
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
    """Return what a refused (`sent` false) or lost connection, or a silent server, means."""
    if sent and not repeatable:
        return Verdict(step=Step.FAIL, stale=True, avoid=True, maybe_applied=True)
    return Verdict(step=Step.RETRY, stale=True, avoid=True, maybe_applied=sent)


@dataclass(slots=True, kw_only=True)
class Backoff:
    """Pauses that double from `first_ms` to `ceiling_ms`, each drawn from the upper half.

    The ceiling is low on purpose: what most retries wait for is an election, which takes
    some 100 ms, and a client that sleeps a second after it was the whole outage.
    """

    rng: random.Random
    first_ms: int = 10
    ceiling_ms: int = 250
    attempts: int = 0

    def next_ms(self) -> int:
        """Return the pause before the next attempt."""
        # The exponent is bounded before the power is taken: attempts may run into thousands.
        full_ms = min(self.ceiling_ms, self.first_ms << min(self.attempts, 16))
        self.attempts += 1
        return self.rng.randint((full_ms + 1) // 2, full_ms)

    def reset(self) -> None:
        """Begin again with the shortest pause: something worked."""
        self.attempts = 0
