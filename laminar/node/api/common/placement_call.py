"""Ask the catalog for changes of the wanted placement, and translate its refusals to problems.

A change names the version of the record on which it was decided, and the catalog refuses it if the record has
another version by now. The version comes from this shard's view, which may be old, and each step of the
planner increases it. So a change without a version from the client is decided again on a newer view.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from laminar.http.api.problems import Problem
from laminar.node.api.common.services import ShardServices
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import ConfirmRequest, PlacementRequest
from laminar.node.transport.transport import TransportError
from membership.requests import PlacementChange, Result

ATTEMPTS = 5
VIEW_WAIT_S = 5.0
NEWEST_WAIT_S = 3.0


class PlacementCall:
    """Sends changes of the wanted placement to the catalog, for the handlers of one shard."""

    def __init__(self, services: ShardServices) -> None:
        self._services = services

    async def change(self, decide: Callable[[], PlacementChange], *, absent: Callable[[], Problem]) -> Result:
        """Perform the change that `decide` derives from the view; on a version conflict decide and ask again.

        `absent` returns the problem for a node, topic or partition that is gone.

        Raises:
            Problem: the catalog refuses the change, or has no leader; also each problem that `decide` raises.
        """
        for _ in range(ATTEMPTS):
            result = await self.once(decide(), absent=absent)
            if result.outcome != "conflict":
                return result
            await self._services.refresh_view()
        raise Problem(
            "in_progress",
            f"other changes came first, {ATTEMPTS} times; send the request again: {result.detail}",
            outcome="not_applied",
        )

    async def once(
        self,
        change: PlacementChange,
        *,
        absent: Callable[[], Problem],
        allow_fewer_replicas: bool = False,
    ) -> Result:
        """Perform one change, and wait until this shard's view shows it. A version conflict is returned.

        Raises:
            Problem: the catalog refuses the change, or has no leader.
        """
        try:
            answer = await self._services.ask_catalog(PlacementRequest(change, allow_fewer_replicas))
        except TransportError as error:
            raise Problem("no_leader", f"the catalog: {error}", outcome="unknown") from error
        result = _result_of(answer)
        if result.outcome == "absent":
            raise absent()
        if result.outcome in ("invalid", "failed"):
            raise Problem("invalid", result.detail)
        if result.outcome != "conflict":
            await self.until_seen(result.version)
        return result

    async def newest_view(self) -> list[str] | None:
        """Wait until the view is as new as the catalog, and return the nodes that vote in the catalog.

        It makes an operator's last change visible here if another shard performed it. Returns None, and
        leaves the view as it is, if no leader of the catalog is known, or it does not answer within
        `NEWEST_WAIT_S`.
        """
        message = self._services.view.message
        if message is None or not message.catalog_leader:
            return None
        try:
            async with asyncio.timeout(NEWEST_WAIT_S):
                answer = await self._services.ask_catalog(ConfirmRequest([]))
        except (TransportError, TimeoutError):
            return None
        if answer.error:
            return None
        await self.until_seen(answer.version)
        return answer.voters

    async def until_seen(self, version: int) -> None:
        """Wait until this shard's view has reached catalog `version`, `VIEW_WAIT_S` at most."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + VIEW_WAIT_S
        while self._services.view.version < version and loop.time() < deadline:
            await self._services.view_change(deadline - loop.time())


def _result_of(answer: CatalogAnswer) -> Result:
    """Return the catalog's result.

    Raises:
        Problem: the catalog did not decide, or refused the change with an error code.
    """
    if answer.error == "too_few_nodes":
        raise Problem(
            "too_few_nodes",
            f"{answer.value} replicas need {answer.value} nodes, and {answer.limit} may hold replicas",
            field="replicas",
            value=answer.value,
            limit=answer.limit,
            hint="Add nodes, or send `allow_fewer_replicas`: the rest is placed when nodes join.",
        )
    if answer.error in ("not_enabled", "node_in_use"):
        raise Problem(answer.error, answer.detail)
    if answer.error:
        raise Problem(
            "no_leader", answer.detail or "the catalog has no leader at the moment", outcome="unknown"
        )
    assert answer.result is not None
    return answer.result
