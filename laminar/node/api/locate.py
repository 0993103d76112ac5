"""Who leads a partition, as far as this shard can tell.

A shard that holds a replica knows from its own core. Any other asks the replicas, nearest
rank first, and remembers the answer until it proves wrong. This is a hint: the one who is
asked as leader checks for itself.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from laminar.http.errors import Problem
from laminar.node.api.exchange import Exchange
from laminar.node.transport import Address, Peer

if TYPE_CHECKING:
    from laminar.node.shard import Shard

LEADER_WAIT_S = 2.5
ASK_TIMEOUT_S = 0.5
RETRY_S = 0.02


@dataclass(slots=True, frozen=True)
class Where:
    """A partition's replica on some node: its shard's peer address and HTTP URL."""

    node: str
    address: Address
    url: str


class _LeaderQuestion(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int


class Locator:
    """Finds leaders and replicas for one shard."""

    def __init__(self, shard: Shard, exchange: Exchange) -> None:
        self._shard = shard
        self._exchange = exchange
        self._cache: dict[tuple[str, int], str] = {}

    def where(self, node: str, topic: str, number: int) -> Where | None:
        """The shard that owns the partition on a node."""
        view = self._shard.view
        address = view.partition_address(node, topic, number)
        url = view.partition_url(node, topic, number)
        return None if address is None or url is None else Where(node, address, url)

    def replicas(self, topic: str, number: int) -> list[Where]:
        """Where the partition's replicas are, those on nodes that are alive first."""
        record = self._shard.view.partition(topic, number)
        if record is None:
            return []
        nodes = [replica.node for replica in record.replicas]
        nodes.sort(key=lambda node: not self._shard.view.alive(node))
        found = [self.where(node, topic, number) for node in nodes]
        return [where for where in found if where is not None]

    def known_leader(self, topic: str, number: int) -> Where | None:
        """The leader, if it is known without asking."""
        partition = self._shard.partitions.get((topic, number))
        if partition is not None:
            node = partition.replica.leader_node
            if node is not None:
                return self.where(node, topic, number)
        cached = self._cache.get((topic, number))
        return self.where(cached, topic, number) if cached is not None else None

    def forget(self, topic: str, number: int) -> None:
        """The answer proved wrong."""
        self._cache.pop((topic, number), None)

    async def leader(self, topic: str, number: int, *, wait_s: float = LEADER_WAIT_S) -> Where:
        """The leader; waits through an election. Raises 503 `no_leader` when the time is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            where = self.known_leader(topic, number)
            if where is not None:
                return where
            if (topic, number) not in self._shard.partitions:
                node = await self._ask_replicas(topic, number)
                if node is not None:
                    self._cache[(topic, number)] = node
                    continue
            if loop.time() >= deadline:
                raise Problem(
                    "no_leader",
                    f"partition {topic}/{number} has no leader that this shard can find",
                    retry_after_ms=300,
                    outcome="not_applied",
                )
            await asyncio.sleep(RETRY_S)

    async def _ask_replicas(self, topic: str, number: int) -> str | None:
        for where in self.replicas(topic, number):
            try:
                node: str = await self._exchange.ask(
                    where.address, "leader", _LeaderQuestion(topic, number), kind=str, timeout_s=ASK_TIMEOUT_S
                )
            except Problem:
                continue
            if node:
                return node
        return None

    async def on_leader(self, peer: Peer, payload: bytes) -> str:
        """Another shard asks who leads a partition of ours."""
        question = msgspec.msgpack.decode(payload, type=_LeaderQuestion)
        partition = self._shard.partitions.get((question.topic, question.partition))
        return (partition.replica.leader_node or "") if partition is not None else ""
