"""Routes of nodes for operators: weight, zone, drain, removal.

A node's `version` in the catalog counts its commands, and is its ETag. What a drain still waits for is
computed from the catalog, from what the node's shards lead, and from the catalog's voters.
"""

from __future__ import annotations

from collections.abc import Callable

from laminar.http.api.documents import administration as documents
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.admin.led_partitions import LedPartitions
from laminar.node.api.admin.operations import blocks_of_drain, holders
from laminar.node.api.common.etags import changed, etag, names, required
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.placement_call import PlacementCall
from laminar.node.api.common.services import ShardServices
from laminar.node.runtime.cluster_view import host_in_url
from membership.records import CatalogState, NodeRecord
from membership.requests import AlterNode, PlacementChange, RemoveNode


class NodeRoutes:
    """The handlers of the nodes' routes for operators."""

    def __init__(self, services: ShardServices, led: LedPartitions, placement: PlacementCall) -> None:
        self._services = services
        self._led = led
        self._placement = placement

    # -- what there is -------------------------------------------------------------------

    async def nodes(self, request: Request) -> Response:
        """Answer GET /v1/admin/nodes with all nodes as operators see them."""
        return Response.json(documents.AdminNodes(await self._describe(None)))

    async def node(self, request: Request, node: str) -> Response:
        """Answer GET /v1/admin/nodes/{node} with the node as operators see it."""
        await self._record(node)
        return await self._answer(node)

    async def _answer(self, node: str, *, status: int = 200) -> Response:
        found = await self._describe([node])
        if not found:
            raise _no_such_node(node)  # removed since
        (described,) = found
        return Response.json(described, status=status, headers=[etag(described.version)])

    async def _describe(self, only: list[str] | None) -> list[documents.AdminNode]:
        """Return descriptions of all nodes, or `only` of these, sorted by name.

        They are current as of the catalog's leader; if there is none, as of this shard's view, which may lag.
        """
        voters = await self._placement.newest_view()
        nodes = sorted(self._services.view.nodes()) if only is None else only
        led = await self._led.of(nodes)
        catalog = self._services.view.message
        assert catalog is not None, "a view with nodes has a catalog"
        held = _held(catalog.catalog)
        return [
            self._described(catalog.catalog, name, held=held.get(name, 0), led=led[name], voters=voters)
            for name in nodes
            if name in catalog.catalog.nodes
        ]

    def _described(
        self,
        state: CatalogState,
        name: str,
        *,
        held: int,
        led: list[str] | None,
        voters: list[str] | None,
    ) -> documents.AdminNode:
        view = self._services.view
        record = state.nodes[name]
        waits = []
        if led:
            waits.append(f"it leads {len(led)} partitions")
        if held:
            waits.append(f"it holds {held} replicas")
        if voters is None:
            waits.append("the catalog has no leader, so it is unknown whether the node votes in it")
        elif name in voters:
            waits.append("it votes in the catalog")
        alive = [each for each in state.nodes if view.alive(each)]
        return documents.AdminNode(
            node=name,
            url=f"{record.scheme}://{host_in_url(record.host)}:{record.http_port}",
            status=view.message.statuses.get(name, "unknown") if view.message is not None else "unknown",
            alive=view.alive(name),
            zone=record.effective_zone,
            announced_zone=record.zone,
            set_zone=record.set_zone,
            weight=record.effective_weight,
            announced_weight=record.weight,
            set_weight=record.set_weight,
            code_version=record.code_version,
            draining=record.draining,
            replicas=held,
            leads=None if led is None else len(led),
            catalog_voter=None if voters is None else name in voters,
            drain_waits_for=waits if record.draining else [],
            drain_blocked_by=blocks_of_drain(state, name, alive=alive) if record.draining else [],
            safe_to_stop=record.draining and not waits,
            version=record.version,
        )

    async def _record(self, node: str) -> NodeRecord:
        """Return the node's record; refresh the view first if it has none.

        Raises:
            Problem: 404 `no_such_node`.
        """
        if node not in self._services.view.nodes():
            await self._services.refresh_view()
        record = self._services.view.nodes().get(node)
        if record is None:
            raise _no_such_node(node)
        return record

    # -- commands ------------------------------------------------------------------------

    async def update(self, request: Request, node: str) -> Response:
        """Answer PATCH /v1/admin/nodes/{node}: merge-patch weight and zone, if If-Match names the version."""
        record = await self._record(node)
        wanted = required(request.headers.get("if-match"), what="node")
        if not names(wanted, record.version):
            await self._services.refresh_view()
            record = await self._record(node)
        if not names(wanted, record.version):
            raise changed(wanted, record.version, what="node")
        patch = json_body(request, documents.NodePatch)
        change = AlterNode(node, record.version, set_weight=patch.weight, set_zone=patch.zone)
        result = await self._placement.once(change, absent=lambda: _no_such_node(node))
        if result.outcome == "conflict":
            raise changed(wanted, (result.node or record).version, what="node")
        return await self._answer(node)

    async def drain(self, request: Request, node: str) -> Response:
        """Answer POST /v1/admin/nodes/{node}/drain: begin to move everything off the node."""
        await self._command(node, lambda record: AlterNode(node, record.version, draining=True))
        return await self._answer(node, status=202)

    async def undrain(self, request: Request, node: str) -> Response:
        """Answer POST /v1/admin/nodes/{node}/undrain: let the node hold replicas and lead again."""
        await self.set_back(node)
        return await self._answer(node)

    async def set_back(self, node: str) -> None:
        """Cancel the drain of a node: it may hold replicas and lead again.

        Raises:
            Problem: 404 `no_such_node`; or the catalog refuses the change, or has no leader.
        """
        await self._command(node, lambda record: AlterNode(node, record.version, draining=False))

    async def remove(self, request: Request, node: str) -> Response:
        """Answer DELETE /v1/admin/nodes/{node}: remove a node that is drained and stopped."""
        await self._services.refresh_view()
        await self._command(node, self._removal)
        return Response.json(documents.RemovedNode(node))

    def _removal(self, record: NodeRecord) -> RemoveNode:
        state = self._services.view.message
        assert state is not None
        held = _held(state.catalog).get(record.node, 0)
        pinned = [
            key
            for key, partition in state.catalog.partitions.items()
            if partition.pin is not None and record.node in partition.pin.nodes
        ]
        if not record.draining:
            raise Problem("node_in_use", f"node {record.node!r} is not drained: drain it first")
        if held:
            raise Problem("node_in_use", f"node {record.node!r} still holds {held} replicas")
        if pinned:
            raise Problem(
                "node_in_use", f"{len(pinned)} partitions are pinned to node {record.node!r}: {pinned[0]}"
            )
        return RemoveNode(record.node, record.version)

    async def _command(self, node: str, decide: Callable[[NodeRecord], PlacementChange]) -> None:
        await self._record(node)

        def change() -> PlacementChange:
            record = self._services.view.nodes().get(node)
            if record is None:
                raise _no_such_node(node)
            return decide(record)

        await self._placement.change(change, absent=lambda: _no_such_node(node))


def _held(state: CatalogState) -> dict[str, int]:
    """Return the number of partitions with a replica on each node, by node; leaving replicas count."""
    counts: dict[str, int] = {}
    for partition in state.partitions.values():
        for name in holders(partition):
            counts[name] = counts.get(name, 0) + 1
    return counts


def _no_such_node(node: str) -> Problem:
    return Problem("no_such_node", f"no node {node!r} in this cluster", field="node", value=node)
