"""Operators are answered from a view as new as the catalog: another shard may have just changed it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import replace

from laminar.http.protocol.messages import Request, Response
from laminar.http.protocol.request_head import RequestHead
from laminar.node.api.admin.led_partitions import LedPartitions
from laminar.node.api.admin.nodes import NodeRoutes
from laminar.node.api.admin.operation_routes import OperationRoutes
from laminar.node.api.admin.operations import UnderWay
from laminar.node.api.admin.partitions import PlacementRoutes
from laminar.node.api.common.placement_call import PlacementCall
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import CatalogRequest, ConfirmRequest
from laminar.node.transport.transport import TransportError
from membership.placement_rules import change_placement
from membership.requests import AlterNode, ChangePlacement
from tests.node.services import Services, exchange


class Catalog(Services):
    """A shard whose view is older than the catalog, in which node `a` drains now and weighs 3."""

    def __init__(self, *, reachable: bool = True) -> None:
        super().__init__(elsewhere=["a"])
        assert self.view.message is not None
        record = self.view.message.catalog.nodes["a"]
        change = ChangePlacement(AlterNode("a", record.version, set_weight=3.0, draining=True))
        newest, result = change_placement(self.view.message.catalog, change)
        assert result.ok, result
        self.newest = replace(newest, version=self.view.version + 1)
        self.view.message.catalog_leader = "a"
        self.reachable = reachable

    async def ask_catalog(self, request: CatalogRequest) -> CatalogAnswer:
        """See `ShardServices`."""
        assert isinstance(request, ConfirmRequest)
        if not self.reachable:
            raise TransportError("lost")
        return CatalogAnswer(version=self.newest.version, voters=["a"])

    async def view_change(self, timeout_s: float) -> bool:
        """See `ShardServices`."""
        assert self.view.message is not None
        self.view.message.catalog = self.newest
        return True

    def routes(self) -> tuple[NodeRoutes, OperationRoutes]:
        placement, others = PlacementCall(self), exchange(led=led_by_nobody)
        nodes = NodeRoutes(self, LedPartitions(self, others), placement)
        places = PlacementRoutes(self, TopicLookup(self.view), placement)
        return nodes, OperationRoutes(self, nodes, places, placement, UnderWay(self))


async def led_by_nobody(node: str, payload: bytes) -> list[str]:
    return []


def request(path: str) -> Request:
    return Request(RequestHead("GET", path, {}), b"", None)  # type: ignore[arg-type]


def body(response: Response) -> Any:
    assert isinstance(response.body, bytes)
    return msgspec.json.decode(response.body)


async def test_a_node_and_the_operations_are_answered_as_the_catalog_has_them_now() -> None:
    nodes, _ = Catalog().routes()
    one = body(await nodes.node(request("/v1/admin/nodes/a"), "a"))
    nodes, _ = Catalog().routes()
    (listed,) = body(await nodes.nodes(request("/v1/admin/nodes")))["nodes"]
    _, operations = Catalog().routes()
    (drain,) = body(await operations.operations(request("/v1/admin/operations")))["operations"]
    _, operations = Catalog().routes()
    same = body(await operations.operation(request("/v1/admin/operations/drain:a"), "drain:a"))

    assert (3.0, True) == (one["weight"], one["draining"])
    assert one == listed
    assert "drain:a" == drain["id"]
    assert drain == same


async def test_without_a_leader_of_the_catalog_the_view_is_answered_as_it_is() -> None:
    nodes, operations = Catalog(reachable=False).routes()

    found = body(await nodes.node(request("/v1/admin/nodes/a"), "a"))

    assert (1.0, False, None) == (found["weight"], found["draining"], found["catalog_voter"])
    assert [] == body(await operations.operations(request("/v1/admin/operations")))["operations"]
