"""Check whether a node's replicas have caught up, so that a rolling restart may stop the next node.

The leaders of the partitions are asked. A restart that goes on while replicas of the last node lag can leave
their partitions without a majority.
"""

from __future__ import annotations

from laminar.node.api.cluster.health import in_sync_of
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.node_call import NodeCall, of_siblings
from laminar.node.api.common.services import HostServices
from laminar.node.api.common.slices import Kept, in_slices
from laminar.node.partition.partition import Partition
from laminar.node.transport.transport import Peer


class CurrentReplicas:
    """Asks all nodes whether replicas of this node lag, and answers the same question of other nodes."""

    def __init__(self, services: HostServices, exchange: Exchange) -> None:
        self._services = services
        self._nodes = NodeCall[int](
            services,
            exchange,
            method="node_behind",
            own=lambda: self._of_node(services.node),
            kind=int,
            payload=services.node.encode(),
        )
        self._reasons = Kept(self._ask, clock=services.clock, version=lambda: services.view.version)

    async def reasons(self) -> list[str]:
        """Return reasons why replicas of this node may lag; none if each has all committed entries."""
        return await self._reasons.get()

    async def _ask(self) -> list[str]:
        view = self._services.view
        if not view.is_confirmed:
            return ["this node has not heard from the catalog since its start"]
        answers = await self._nodes.of_all(name for name in sorted(view.nodes()) if view.alive(name))
        silent = [name for name, behind in answers.items() if behind is None]
        behind = sum(filter(None, answers.values()))
        found = [f"{behind} replicas of this node have not caught up"] if behind else []
        if silent:
            found.append(f"{', '.join(silent)} did not say whether the replicas of this node have caught up")
        return found

    async def on_node_behind(self, peer: Peer, payload: bytes) -> int:
        """Answer another node with the number of its replicas that lag in partitions led by this node."""
        return await self._of_node(payload.decode())

    async def on_shard_behind(self, peer: Peer, payload: bytes) -> bytes:
        """Answer another process of this node with how many replicas of a node lag in groups led here.

        `payload` is the node's name; the number is answered as text.
        """
        return str(await self._of_shard(payload.decode())).encode()

    async def _of_node(self, node: str) -> int:
        answers = await of_siblings(self._services, "shard_behind", payload=node.encode())
        missing = sum(answer is None for answer in answers.values())  # each counts as one that lags
        known = sum(int(answer) for answer in answers.values() if answer is not None)
        return missing + known + await self._of_shard(node)

    async def _of_shard(self, node: str) -> int:
        services, behind = self._services, 0
        is_own = node == services.node

        def look(partition: Partition) -> None:
            nonlocal behind
            replica = partition.replica
            if replica.core.is_leader and replica.failure is None:
                members = replica.configuration.members()
                held = node in (replica.nodes[member] for member in members)
                behind += held and node not in in_sync_of(partition)
            elif is_own:
                behind += (
                    replica.leader_node is None or replica.core.recovering or replica.failure is not None
                )

        await in_slices(list(services.partitions.values()), look, clock=services.clock)
        return behind + (len(services.lost) + len(services.failed) if is_own else 0)
