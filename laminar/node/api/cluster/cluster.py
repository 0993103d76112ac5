"""Routes about the node and the cluster: members, health, limits, and the API's own documents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from laminar import __version__
from laminar.http.api.documents import server as documents
from laminar.http.api.documents.cluster import Cluster, Node, Nodes, ShardAddress
from laminar.http.api.openapi import DOCS_POLICY, docs_page, openapi_document
from laminar.http.api.parameters import MAX_WAIT_MS, OFFSET_LIMIT
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Page, Request, Response
from laminar.node.access.principals import principal_of
from laminar.node.api.cluster.health import Watch
from laminar.node.api.common.query import integer, one_of
from laminar.node.api.common.services import HostServices
from laminar.node.runtime.boot import ChildState, role_name
from laminar.node.runtime.cluster_view import host_in_url


class ClusterRoutes:
    """The handlers of cluster, node, health and document routes."""

    def __init__(
        self, services: HostServices, watch: Watch, *, lagging: Callable[[], Awaitable[list[str]]]
    ) -> None:
        """Create the handlers; `lagging` returns a sentence for each replica of this node that may lag."""
        self._services = services
        self._lagging = lagging
        self._watch = watch

    async def cluster(self, request: Request) -> Response:
        """Answer GET /v1/cluster with the nodes, their shards and URLs.

        With `after` in the query, wait up to `wait_ms` for a newer version of the catalog; 304 if there is
        none.
        """
        view = self._services.view
        after = integer(request, "after", 0, maximum=OFFSET_LIMIT)
        wait_ms = integer(request, "wait_ms", 0, maximum=MAX_WAIT_MS)
        if "after" in request.query and not await self._changed_since(after, wait_ms / 1000):
            return Response(304)
        cluster_id = view.cluster_id
        return Response.json(
            Cluster(
                cluster_id=cluster_id.hex() if cluster_id is not None else None,
                version=view.version,
                catalog_leader=view.message.catalog_leader if view.message is not None else "",
                # Of the answering node only: whether other machines reach its HTTP ports without TLS or
                # tokens.
                insecure=self._services.settings.is_insecure,
                code_version=view.code_version,
                nodes=[self._node(name) for name in sorted(view.nodes())],
            )
        )

    async def _changed_since(self, version: int, wait_s: float) -> bool:
        """Wait up to `wait_s` for a catalog newer than `version`; return whether there is one."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while self._services.view.version <= version:
            remaining = deadline - loop.time()
            if remaining <= 0:
                return False
            await self._services.view_change(remaining)
        return True

    def _node(self, name: str) -> Node:
        view = self._services.view
        record = view.nodes()[name]
        host = host_in_url(record.host)
        return Node(
            node=name,
            url=f"{record.scheme}://{host}:{record.http_port}",
            peer=f"{host}:{record.peer_ports[0]}",
            shards=[
                ShardAddress(shard, f"{record.scheme}://{host}:{port}")
                for shard, port in enumerate(record.shard_http_ports)
            ],
            weight=record.weight,
            status=view.message.statuses.get(name, "unknown") if view.message is not None else "unknown",
            alive=view.alive(name),
            rolled_back=record.rolled_back,
            # The newest start of the data folder that the catalog knows; older copies of the folder are
            # refused.
            start=record.boot.number if record.boot is not None else 0,
            code_version=record.code_version,
        )

    async def nodes(self, request: Request) -> Response:
        """Answer GET /v1/nodes with all nodes, as every client may see them."""
        return Response.json(Nodes([self._node(name) for name in sorted(self._services.view.nodes())]))

    async def node(self, request: Request, node: str) -> Response:
        """Answer GET /v1/nodes/{node} with one node, as every client may see it."""
        if node not in self._services.view.nodes():
            raise Problem("no_such_node", f"no node {node!r} in this cluster", field="node", value=node)
        return Response.json(self._node(node))

    def livez(self, request: Request) -> Response:
        """Answer GET /livez: the answer itself shows that this process's event loop runs."""
        return Response.json(documents.Alive("alive", self._services.node, self._services.number))

    async def readyz(self, request: Request) -> Response:
        """Answer GET /readyz: 200 if the whole node serves, else 503 with the reasons.

        A failure for want of other nodes is only a warning, because other nodes could serve clients no
        better. A disk below the low-water mark is a warning too, because everything but appends is served.
        Names of topics are shown only to a principal with role admin on all names. With `replicas=current`
        the answer is 503 also while replicas of this node lag.
        """
        wanted = one_of(request, "replicas", ("any", "current"))
        reasons = []
        if not self._services.ready:
            reasons.append("this shard has no view of its cluster yet")
        if not self._services.knows_its_replicas:
            reasons.append("this shard's manifest is lost: it asks the catalog which replicas it held")
        if self._services.lost:
            reasons.append(
                f"{len(self._services.lost)} replicas are lost: their files, or what named them, are missing"
            )
        for child in self._services.board.read_all():
            if child.state == ChildState.GIVEN_UP:
                reasons.append(f"{role_name(child.role)} died too often and is not started again")
            elif child.state == ChildState.DEAD:
                reasons.append(f"{role_name(child.role)} died and is being started again")
            elif child.state == ChildState.STARTING:
                reasons.append(f"{role_name(child.role)} is starting")
        if not reasons and wanted == "current":
            reasons += await self._lagging()
        if not reasons:
            space = self._services.space
            return Response.json(
                documents.Ready(
                    "ready",
                    self._services.node,
                    await self._watch.warnings(with_names=principal_of(request).may("admin", "")),
                    documents.DiskSpace(
                        space.free_bytes, space.threshold_bytes, space.low, space.reserve_is_used
                    ),
                )
            )
        return Response.json(
            documents.NotReady("not_ready", self._services.node, reasons),
            status=503,
            headers=[("Retry-After", "1")],
        )

    def version(self, request: Request) -> Response:
        """Answer GET /v1/version with the versions of server, API and batch format."""
        return Response.json(documents.Version(__version__, "v1", 1))

    def openapi(self, request: Request) -> Response:
        """Answer GET /openapi.json."""
        return Response.json(openapi_document())

    def docs(self, request: Request) -> Response:
        """Answer GET /docs and /docs/errors: one page, on which every error code is an anchor."""
        headers = [("Content-Type", "text/html; charset=utf-8"), ("Content-Security-Policy", DOCS_POLICY)]
        return Page(200, headers, docs_page().encode())
