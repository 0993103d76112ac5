"""Lookup of partitions' leaders, as far as this shard can tell.

A shard that holds a replica knows the leader from its own Raft core. Any other shard asks the replicas, in
the order of the placement, and caches the answer until it proves wrong. The answer is a hint: a shard that
gets a request for the leader checks itself whether it leads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from laminar.http.api.deadlines import (
    ASK_WHO_LEADS_S,
    ELECTION_WAIT_S,
    FIRST_LOOK_UP_PAUSE_S,
    LOOK_UP_PAUSE_S,
    STILL_LEADS_CHECK_S,
)
from laminar.http.api.problems import Problem
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.services import ShardServices
from laminar.node.transport.transport import Address, Peer

T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class ReplicaEndpoint:
    """The shard of a node that holds a partition's replica: its peer address and HTTP URL."""

    node: str
    address: Address
    url: str


class _LeaderQuestion(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    partition: int


class Locator:
    """The lookup of leaders and replicas for one shard."""

    def __init__(self, services: ShardServices, exchange: Exchange) -> None:
        self._services = services
        self.exchange = exchange
        self._cache: dict[tuple[str, int], str] = {}

    def where(self, node: str, topic: str, number: int) -> ReplicaEndpoint | None:
        """Return the shard that owns the partition on `node`; None if the node is unknown."""
        view = self._services.view
        address = view.partition_address(node, topic, number)
        url = view.partition_url(node, topic, number)
        return None if address is None or url is None else ReplicaEndpoint(node, address, url)

    def replicas(self, topic: str, number: int) -> list[ReplicaEndpoint]:
        """Return the endpoints of the partition's replicas, those on live nodes first."""
        record = self._services.view.partition(topic, number)
        if record is None:
            return []
        nodes = [replica.node for replica in record.replicas]
        # A replica that is being removed may lead until it is.
        nodes += [each.replica.node for each in record.leaving if each.replica.node not in nodes]
        nodes.sort(key=lambda node: not self._services.view.alive(node))
        found = [self.where(node, topic, number) for node in nodes]
        return [where for where in found if where is not None]

    def known_leader(self, topic: str, number: int) -> ReplicaEndpoint | None:
        """Return the leader if it is known without asking another shard, else None."""
        partition = self._services.partitions.get((topic, number))
        if partition is not None:
            node = partition.replica.leader_node
            if node is not None:
                return self.where(node, topic, number)
        cached = self._cache.get((topic, number))
        return self.where(cached, topic, number) if cached is not None else None

    def forget(self, topic: str, number: int) -> None:
        """Drop the cached leader after it proved wrong."""
        self._cache.pop((topic, number), None)

    async def leader(self, topic: str, number: int, *, wait_s: float = ELECTION_WAIT_S) -> ReplicaEndpoint:
        """Return the leader, waiting up to `wait_s` for an election to end.

        Raises:
            Problem: 503 `no_leader` when the time is over.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        pause_s = FIRST_LOOK_UP_PAUSE_S
        while True:
            where = self.known_leader(topic, number)
            if where is not None:
                return where
            if (topic, number) not in self._services.partitions:
                node = await self._ask_replicas(topic, number)
                if node is not None:
                    self._cache[(topic, number)] = node
                    continue
            if loop.time() >= deadline:
                raise Problem(
                    "no_leader",
                    f"partition {topic}/{number} has no known leader at the moment",
                    retry_after_ms=300,
                    outcome="not_applied",
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_UP_PAUSE_S)

    async def until_leader_changes(
        self, where: ReplicaEndpoint, topic: str, number: int, asking: Coroutine[Any, Any, T]
    ) -> T:
        """Return the result of `asking`, a request to the leader `where`; cancel it once another one leads.

        A leader that is stopped or cut off does not close its connections, so nothing else would end the
        wait. Use it only for requests that may be repeated.

        Raises:
            Problem: `outcome_unknown` if another replica leads by now.
        """
        task = asyncio.ensure_future(asking)
        try:
            while True:
                done, _ = await asyncio.wait([task], timeout=STILL_LEADS_CHECK_S)
                if done:
                    return task.result()
                partition = self._services.partitions.get((topic, number))
                if partition is not None:
                    leader = partition.replica.leader_node
                else:
                    leader = await self._ask_replicas(topic, number, but=where.node)
                if leader not in (None, where.node) and not task.done():
                    detail = f"{where.node} did not answer, and {leader} leads {topic}/{number} now"
                    raise Problem("outcome_unknown", detail)
        finally:
            task.cancel()

    async def _ask_replicas(self, topic: str, number: int, *, but: str | None = None) -> str | None:
        """Ask the replicas for the leader's node; return the first answer that names one, None if none does.

        The replica on node `but` is not asked.
        """
        for where in self.replicas(topic, number):
            if where.node == but:
                continue
            try:
                node: str = await self.exchange.ask(
                    where.address,
                    "leader",
                    _LeaderQuestion(topic, number),
                    kind=str,
                    timeout_s=ASK_WHO_LEADS_S,
                )
            except Problem:
                continue
            if node:
                return node
        return None

    async def on_leader(self, peer: Peer, payload: bytes) -> str:
        """Answer another shard with the leader's node of one of this shard's partitions; "" if unknown."""
        question = msgspec.msgpack.decode(payload, type=_LeaderQuestion)
        partition = self._services.partitions.get((question.topic, question.partition))
        return (partition.replica.leader_node or "") if partition is not None else ""
