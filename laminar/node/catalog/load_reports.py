"""Load reports: a controller asks its shards for their load, and sends one report to the catalog's leader.

If a shard does not answer, the node sends no report: with a part of its load it would seem less loaded.
"""

from __future__ import annotations

import asyncio

import msgspec

from laminar.node.catalog.messages.requests import LoadRequest
from laminar.node.catalog.service import CatalogService
from laminar.node.placement.load import LoadReport, merged
from laminar.node.runtime.boot import Boot, Role
from laminar.node.transport.transport import Transport, TransportError, UnixAddress

REPORT_S = 10.0
ASK_TIMEOUT_S = 2.0

_decoder = msgspec.msgpack.Decoder(LoadReport)


class LoadReporter:
    """Collects the load of this node from its shards and sends it to the catalog's leader, for the balance.

    The controller calls `report` every `REPORT_S`.
    """

    def __init__(self, boot: Boot, *, transport: Transport, service: CatalogService) -> None:
        self._boot = boot
        self._transport = transport
        self._service = service

    async def report(self) -> None:
        """Ask all shards for their load and send the sum as one report; none if a shard does not answer."""
        roles = [role for role in self._boot.roles if role != self._boot.role]
        answers = await asyncio.gather(*map(self._ask, roles), return_exceptions=True)
        reports = []
        for answer in answers:
            if isinstance(answer, TransportError):
                return
            if isinstance(answer, BaseException):
                raise answer
            reports.append(answer)
        await self._service.ask(LoadRequest(merged(self._boot.node, reports)))

    async def _ask(self, role: Role) -> LoadReport:
        address = UnixAddress(self._boot.unix_name(role))
        return _decoder.decode(await self._transport.call(address, "load", b"", timeout=ASK_TIMEOUT_S))
