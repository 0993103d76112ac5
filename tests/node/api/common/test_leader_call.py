"""Who is asked for a step that only a partition's leader can do."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from laminar.http.api.problems import Outcome, Problem
from laminar.node.api.common.leader_call import READ, STEP, LeaderCall, RetryPolicy, append_policy
from laminar.node.api.common.leader_lookup import Locator, ReplicaEndpoint
from tests.node.services import TOPIC, Services, exchange


def led_elsewhere() -> LeaderCall:
    """The calls of a shard without replicas; node `x` leads."""

    async def leader(node: str, payload: bytes) -> str:
        return "x"

    services = Services(elsewhere=["x"])
    return LeaderCall(services, Locator(services, exchange(leader=leader)))


async def not_here(partition: Any) -> str:
    raise AssertionError("not led here")


async def test_a_leader_that_is_cut_off_is_left_for_the_one_that_leads_now() -> None:
    """It never answers, and this shard has no replica that would know better: the others are asked."""
    leads = ["old"]

    async def leader(node: str, payload: bytes) -> str:
        return leads[-1]

    services = Services(elsewhere=["old", "new"])
    leaders = LeaderCall(services, Locator(services, exchange(leader=leader)))
    asked = []

    async def there(where: ReplicaEndpoint) -> str:
        asked.append(where.node)
        if where.node == "old":
            leads.append("new")
            await asyncio.Event().wait()
        return where.node

    async with asyncio.timeout(60):
        assert "new" == await leaders(TOPIC, 0, here=not_here, there=there, policy=STEP)
        assert "new" == await leaders(TOPIC, 0, here=not_here, there=there, policy=STEP)
    assert ["old", "new", "new"] == asked


@pytest.mark.parametrize(
    ("repeatable", "outcome", "attempts"),
    [(True, "unknown", 2), (False, "unknown", 1), (False, "not_applied", 2)],
)
async def test_what_may_have_been_done_is_repeated_only_if_that_is_harmless(
    repeatable: bool, outcome: Outcome, attempts: int
) -> None:
    """An append without an identity is not sent twice; one that was surely not applied is."""
    asked = 0

    async def there(where: ReplicaEndpoint) -> str:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise Problem("no_leader", "the connection ended", outcome=outcome)
        return "appended"

    policy = append_policy(repeatable=repeatable, repeats_here=True)
    if attempts == 2:
        assert "appended" == await led_elsewhere()(TOPIC, 0, here=not_here, there=there, policy=policy)
    else:
        with pytest.raises(Problem) as problem:
            await led_elsewhere()(TOPIC, 0, here=not_here, there=there, policy=policy)
        assert ("outcome_unknown", "unknown") == (problem.value.code, problem.value.outcome)
    assert attempts == asked


async def test_a_problem_that_another_leader_would_not_cure_is_told_at_once() -> None:
    """A request that is wrong stays wrong."""
    asked = 0

    async def there(where: ReplicaEndpoint) -> str:
        nonlocal asked
        asked += 1
        raise Problem("out_of_sequence")

    with pytest.raises(Problem) as problem:
        await led_elsewhere()(TOPIC, 0, here=not_here, there=there, policy=STEP)
    assert ("out_of_sequence", 1) == (problem.value.code, asked)


@pytest.mark.parametrize(("policy", "code"), [(STEP, "no_leader"), (READ, "not_leader")])
async def test_attempts_end_when_their_time_is_over(policy: RetryPolicy, code: str) -> None:
    """A step's outcome is unknown if one attempt's was; of a read the last problem is told as it is."""
    asked = 0

    async def there(where: ReplicaEndpoint) -> str:
        nonlocal asked
        asked += 1
        raise Problem("not_leader", outcome="unknown" if asked == 1 else "not_applied")

    with pytest.raises(Problem) as problem:
        await led_elsewhere()(
            TOPIC, 0, here=not_here, there=there, policy=replace(policy, attempts_s=0.1, pause_s=0.01)
        )
    assert asked > 1
    outcome = "unknown" if policy is STEP else "not_applied"
    assert (code, outcome) == (problem.value.code, problem.value.outcome)
