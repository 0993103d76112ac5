"""Who is asked for a step that only a partition's leader can do."""

from __future__ import annotations

import asyncio
from typing import Any

from laminar.node.api.common.leader_call import STEP, LeaderCall
from laminar.node.api.common.leader_lookup import Locator, ReplicaEndpoint
from tests.node.services import TOPIC, Services, exchange


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

    async def here(partition: Any) -> str:
        raise AssertionError("not led here")

    async with asyncio.timeout(60):
        assert "new" == await leaders(TOPIC, 0, here=here, there=there, policy=STEP)
        assert "new" == await leaders(TOPIC, 0, here=here, there=there, policy=STEP)
    assert ["old", "new", "new"] == asked
