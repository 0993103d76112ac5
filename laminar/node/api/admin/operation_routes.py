"""Routes of operations (changes that are under way): list, describe, cancel.

Module `operations` derives them.
"""

from __future__ import annotations

from laminar.http.api.documents import administration as documents
from laminar.http.api.parameters import MAX_PAGE
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.admin.nodes import NodeRoutes
from laminar.node.api.admin.operations import UnderWay
from laminar.node.api.admin.partitions import PlacementRoutes
from laminar.node.api.common.placement_call import PlacementCall
from laminar.node.api.common.query import integer, next_link
from laminar.node.api.common.services import ShardServices


class OperationRoutes:
    """The handlers of the operations' routes."""

    def __init__(
        self,
        services: ShardServices,
        nodes: NodeRoutes,
        partitions: PlacementRoutes,
        placement: PlacementCall,
        under_way: UnderWay,
    ) -> None:
        self._services = services
        self._placement = placement
        self._nodes = nodes
        self._partitions = partitions
        self._under_way = under_way

    async def operations(self, request: Request) -> Response:
        """Answer GET /v1/admin/operations with a page of the changes of placement that are under way."""
        prefix = request.query.get("prefix", "")
        limit = integer(request, "limit", 100, minimum=1, maximum=MAX_PAGE)
        after = request.query.get("after", "")
        await self._placement.newest_view()
        wanted = [each for each in await self._under_way.get() if each.id.startswith(prefix)]
        found = [each for each in wanted if each.id > after]
        answer = documents.OperationPage(found[:limit], len(wanted))
        headers = []
        if len(found) > limit:
            answer.next = found[limit - 1].id
            headers.append(next_link("/v1/admin/operations", prefix=prefix, limit=limit, after=answer.next))
        return Response.json(answer, headers=headers)

    async def operation(self, request: Request, operation: str) -> Response:
        """Answer GET /v1/admin/operations/{operation} with one change that is under way."""
        await self._placement.newest_view()
        return Response.json(await self._found(operation))

    async def _found(self, operation: str) -> documents.Operation:
        """Return the operation of this id.

        Raises:
            Problem: 404 `no_such_operation`.
        """
        for each in await self._under_way.get():
            if each.id == operation:
                return each
        raise Problem(
            "no_such_operation",
            f"no operation {operation!r} is under way",
            field="operation",
            value=operation,
        )

    async def cancel(self, request: Request, operation: str) -> Response:
        """Answer DELETE /v1/admin/operations/{operation}: undo the request for a drain or a pin."""
        await self._services.refresh_view()
        found = await self._found(operation)
        match found.kind:
            case "drain":
                await self._nodes.set_back(found.what)
            case "pin":
                topic, _, number = found.what.rpartition("/")
                await self._partitions.set_back(topic, number)
            case _:
                raise Problem(
                    "not_cancellable",
                    f"{operation}: {found.cancel}",
                    field="operation",
                    value=operation,
                )
        return Response.json(documents.CancelledOperation(operation))
