"""Routes of the balance by load: what it would do and why, and one round now."""

from __future__ import annotations

from msgspec.structs import asdict

from laminar.http.api.documents import administration as documents
from laminar.http.api.problems import Outcome, Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.services import ShardServices
from laminar.node.catalog.service import BalanceRequest
from laminar.node.transport.transport import TransportError


class BalanceRoutes:
    """The handlers of the balance's routes. The catalog's leader answers, which has all loads."""

    def __init__(self, services: ShardServices) -> None:
        self._services = services

    async def describe(self, request: Request) -> Response:
        """Answer GET /v1/admin/balance."""
        return await self._answer(act=False)

    async def act(self, request: Request) -> Response:
        """Answer POST /v1/admin/balance."""
        return await self._answer(act=True)

    async def _answer(self, *, act: bool) -> Response:
        """Return the leader's answer.

        Raises:
            Problem: 503 `no_leader`; with `act` its outcome is unknown.
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
