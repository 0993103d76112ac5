"""Routes of balancing by load: describe the next move and its reasons, or carry out one round now."""

from __future__ import annotations

from msgspec.structs import asdict

from laminar.http.api.documents import administration as documents
from laminar.http.api.problems import Outcome, Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.services import ShardServices
from laminar.node.catalog.messages.requests import BalanceRequest
from laminar.node.transport.transport import TransportError


class BalanceRoutes:
    """The handlers of the routes of balancing.

    They ask the catalog's leader, which knows the load of all nodes.
    """

    def __init__(self, services: ShardServices) -> None:
        self._services = services

    async def describe(self, request: Request) -> Response:
        """Answer GET /v1/admin/balance with what a round would do now."""
        return await self._answer(act=False)

    async def act(self, request: Request) -> Response:
        """Answer POST /v1/admin/balance: carry out one round of balancing."""
        return await self._answer(act=True)

    async def _answer(self, *, act: bool) -> Response:
        """Return what a round of balancing would do, or with `act` did, as the catalog's leader answers.

        Raises:
            Problem: 503 `no_leader`; with `act` the round may have been carried out all the same.
        """
        outcome: Outcome | None = "unknown" if act else None
        try:
            answer = await self._services.ask_catalog(BalanceRequest(act))
        except TransportError as error:
            raise Problem("no_leader", f"the catalog: {error}", outcome=outcome) from error
        found = answer.balance
        if found is None:
            detail = answer.detail or "the catalog has no leader at the moment"
            raise Problem("no_leader", detail, outcome=outcome)
        return Response.json(
            documents.Balance(
                threshold=found.threshold,
                hours=found.hours,
                move=found.move,
                partitions=found.partitions,
                because=found.because,
                done=found.done,
                nodes=[
                    documents.NodeBalance(
                        node=each.node,
                        weight=each.weight,
                        score=each.score,
                        measure=each.measure,
                        load=None if each.load is None else documents.NodeLoad(**asdict(each.load)),
                    )
                    for each in found.nodes
                ],
            )
        )
