"""Requests that only a partition's leader can carry out: find it, ask it, retry when leadership moves.

All retries of such requests are in this one loop. A `RetryPolicy` says which requests may be repeated, and
which problem the caller gets in the end; the durations are those of `laminar.http.api.deadlines`.

Invariant: an attempt that may have been carried out is repeated only if the request is repeatable. If all
attempts fail, the final problem reports that the outcome is unknown, also if a later attempt was refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

from laminar.http.api.deadlines import (
    APPEND_ATTEMPTS_S,
    ELECTION_WAIT_S,
    FIRST_LOOK_UP_PAUSE_S,
    FORWARDED_STEP_S,
    LOOK_UP_PAUSE_S,
    READ_ATTEMPTS_S,
    STEP_ATTEMPTS_S,
    STEP_PAUSE_S,
)
from laminar.http.api.problems import Problem
from laminar.node.api.common.attempts import (
    LEADER_MOVED,
    combine_outcomes,
    keep_code,
    last_problem,
    may_retry,
)
from laminar.node.api.common.leader_lookup import Locator, ReplicaEndpoint
from laminar.node.api.common.services import ShardServices
from laminar.node.partition.partition import Partition

T = TypeVar("T")
R = TypeVar("R", bound="OfPartition")

Conclusion = Callable[[Sequence[Problem], Problem], Problem]
"""Makes the final problem from those of earlier attempts with an unknown outcome, and the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """The rules for retrying a request at a leader, and for the problem if all attempts fail."""

    attempts_s: float
    """The time in seconds after the first attempt within which another attempt may begin."""
    pause_s: float
    """Longest pause before another attempt; the first ones are shorter."""
    repeatable: bool
    """Whether a second attempt is harmless: a read, or a request that the leader recognises."""
    conclude: Conclusion
    election_wait_s: float = ELECTION_WAIT_S
    """How long each attempt waits until some leader is known."""
    repeats_here: bool = True
    """Whether there may be another attempt after a problem at this shard's own partition."""
    replaces_leader: bool = True
    """Whether an attempt at another shard is cancelled, if repeatable, once another leader is known."""


READ = RetryPolicy(
    attempts_s=READ_ATTEMPTS_S,
    pause_s=LOOK_UP_PAUSE_S,
    repeatable=True,
    conclude=last_problem,
    repeats_here=False,
    # A read may wait long for records, and asking the replicas for the leader all that time costs more.
    replaces_leader=False,
)
STEP = RetryPolicy(attempts_s=STEP_ATTEMPTS_S, pause_s=STEP_PAUSE_S, repeatable=True, conclude=keep_code)
SINK_STEP = RetryPolicy(
    attempts_s=STEP_ATTEMPTS_S,
    pause_s=STEP_PAUSE_S,
    repeatable=True,
    conclude=keep_code,
    election_wait_s=STEP_ATTEMPTS_S,
    # A step may publish to many partitions: it is not repeated while its leader is busy with it.
    replaces_leader=False,
)


def append_policy(*, repeatable: bool, repeats_here: bool) -> RetryPolicy:
    """Return the rules for retrying an append at the partition's leader.

    `repeats_here` requires that an attempt at this shard's own partition does not change the body.
    """
    return RetryPolicy(
        attempts_s=APPEND_ATTEMPTS_S,
        pause_s=LOOK_UP_PAUSE_S,
        repeatable=repeatable,
        conclude=combine_outcomes,
        repeats_here=repeats_here,
    )


class OfPartition(Protocol):
    """A request for the leader of one partition, which names the partition."""

    @property
    def topic(self) -> str:
        """The partition's topic."""

    @property
    def partition(self) -> int:
        """The partition's number."""


class LeaderCall:
    """Carries out requests at partitions' leaders: at this shard if it leads, else at the shard that does."""

    def __init__(self, services: ShardServices, locator: Locator) -> None:
        self._services = services
        self.locator = locator

    def led(self, topic: str, number: int) -> Partition | None:
        """Return the partition if this shard leads it, else None."""
        partition = self._services.partitions.get((topic, number))
        return partition if partition is not None and partition.leads else None

    def led_here(self, topic: str, number: int) -> Partition:
        """Return partition `number` of `topic`, which this shard leads.

        Raises:
            Problem: 503 `not_leader` if it leads no such partition.
        """
        partition = self.led(topic, number)
        if partition is None:
            raise Problem("not_leader", f"{topic}/{number} is not led here", outcome="not_applied")
        return partition

    async def ask(
        self,
        method: str,
        request: R,
        kind: type[T],
        *,
        here: Callable[[Partition, R], Awaitable[T]],
        policy: RetryPolicy,
        timeout_s: float = FORWARDED_STEP_S,
        payload: Any = None,
    ) -> T:
        """Return `here(partition, request)` if this shard leads; else call `method` of the leader's shard.

        `payload`, if given, is sent instead of the request.

        Raises:
            Problem: the final problem, which `policy.conclude` chooses from those of all attempts.
        """
        sent = request if payload is None else payload

        async def there(where: ReplicaEndpoint) -> T:
            exchange = self.locator.exchange
            answer: T = await exchange.ask(where.address, method, sent, kind=kind, timeout_s=timeout_s)
            return answer

        return await self(
            request.topic,
            request.partition,
            here=lambda partition: here(partition, request),
            there=there,
            policy=policy,
        )

    async def __call__(
        self,
        topic: str,
        number: int,
        *,
        here: Callable[[Partition], Awaitable[T]],
        there: Callable[[ReplicaEndpoint], Coroutine[Any, Any, T]],
        policy: RetryPolicy,
    ) -> T:
        """Return `here(partition)` if this shard leads the partition, else `there(endpoint of the leader)`.

        Attempts are repeated by `policy` when leadership moves.

        Raises:
            Problem: the final problem, which `policy.conclude` chooses from those of all attempts.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + policy.attempts_s
        unknown: list[Problem] = []
        pause_s = min(FIRST_LOOK_UP_PAUSE_S, policy.pause_s)
        while True:
            led = None
            try:
                where = await self.locator.leader(topic, number, wait_s=policy.election_wait_s)
            except Problem as problem:
                _conclude(policy, unknown, problem)
            try:
                led = self.led(topic, number)
                if led is not None:
                    return await here(led)
                if policy.repeatable and policy.replaces_leader:
                    return await self.locator.until_leader_changes(where, topic, number, there(where))
                return await there(where)
            except Problem as problem:
                if problem.code in LEADER_MOVED or problem.outcome == "unknown":
                    self.locator.forget(topic, number)
                again = may_retry(problem, policy.repeatable, again=bool(unknown))
                again = again and (led is None or policy.repeats_here)
                if not again or loop.time() >= deadline:
                    _conclude(policy, unknown, problem)
                if problem.outcome == "unknown":
                    unknown.append(problem)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, policy.pause_s)


def _conclude(policy: RetryPolicy, unknown: Sequence[Problem], last: Problem) -> NoReturn:
    problem = policy.conclude(unknown, last)
    if problem is last:
        raise last
    raise problem from last
