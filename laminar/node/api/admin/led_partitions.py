"""List the partitions that each node leads. Its shards are asked: the catalog records no leaders."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from laminar.http.api.problems import Problem
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.services import ShardServices
from laminar.node.transport.transport import Peer

ASK_TIMEOUT_S = 1.0


class LedPartitions:
    """The partitions that this shard leads, and those that other shards report to lead."""

    def __init__(self, services: ShardServices, exchange: Exchange) -> None:
        self._services = services
        self._exchange = exchange

    def own(self) -> list[str]:
        """Return the partitions that this shard leads, as "topic/number"."""
        return [
            f"{topic}/{number}"
            for (topic, number), partition in self._services.partitions.items()
            if partition.replica.core.is_leader and partition.replica.failure is None
        ]

    async def of(self, nodes: Iterable[str]) -> dict[str, list[str] | None]:
        """Return by node the partitions that it leads; None for a node if one of its shards is silent."""
        names = list(nodes)
        found = await asyncio.gather(*(self._of_node(name) for name in names))
        return dict(zip(names, found, strict=True))

    async def _of_node(self, name: str) -> list[str] | None:
        view = self._services.view
        record = view.nodes().get(name)
        if record is None or not view.alive(name):
            return None
        shards = await asyncio.gather(*(self._of_shard(name, shard) for shard in range(record.shards)))
        answered = [led for led in shards if led is not None]
        return sorted(each for led in answered for each in led) if len(answered) == len(shards) else None

    async def _of_shard(self, node: str, shard: int) -> list[str] | None:
        if (node, shard) == (self._services.node, self._services.number):
            return self.own()
        address = self._services.view.address(node, shard + 1)
        if address is None:
            return None
        try:
            led: list[str] = await self._exchange.ask(
                address, "led", b"", kind=list[str], timeout_s=ASK_TIMEOUT_S
            )
        except Problem:
            return None
        return led

    async def on_led(self, peer: Peer, payload: bytes) -> list[str]:
        """Answer another shard with the partitions that this one leads."""
        return self.own()
