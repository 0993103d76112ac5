"""Who is asked for a step that only a partition's leader can do."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from laminar.node.api.common.leader_call import at_leader
from laminar.node.api.common.leader_lookup import Locator, Where
from laminar.node.transport.transport import TcpAddress


async def test_a_leader_that_is_cut_off_is_left_for_the_one_that_leads_now() -> None:
    """It never answers, and this shard has no replica that would know better: the others are asked."""
    shard: Any = SimpleNamespace(partitions={})
    exchange: Any = None
    locator: Any = Locator(shard, exchange)
    locator.where = lambda node, topic, number: Where(node, TcpAddress("h", 1), f"http://{node}")
    leads = ["old"]

    async def ask_replicas(topic: str, number: int, *, but: str | None = None) -> str | None:
        return leads[-1] if leads[-1] != but else None

    locator._ask_replicas = ask_replicas
    asked = []

    async def there(where: Where) -> str:
        asked.append(where.node)
        if where.node == "old":
            leads.append("new")
            await asyncio.Event().wait()
        return where.node

    async def here(partition: Any) -> str:
        raise AssertionError("not led here")

    async with asyncio.timeout(60):
        assert "new" == await at_leader(shard, locator, "t", 0, here=here, there=there)
        assert "new" == await at_leader(shard, locator, "t", 0, here=here, there=there)
    assert ["old", "new", "new"] == asked
