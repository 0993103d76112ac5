"""Wait until the shards of all live nodes have seen a change of the catalog."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

import msgspec

from laminar.http.api.problems import Problem
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.services import HostServices
from laminar.node.secret.keys import KEYS_SINCE
from laminar.node.transport.transport import Address, Peer

LONGEST_WAIT_S: Final = 1.0
METHOD: Final = "view_seen"


class SeenViews:
    """The views (copies of the catalog) of the shards of all nodes that are alive."""

    def __init__(self, services: HostServices, exchange: Exchange) -> None:
        self._services = services
        self._exchange = exchange

    async def wait(self, version: int) -> None:
        """Wait until all shards have seen this version of the catalog, for a second at most.

        A shard that does not answer in time uses its old view until it receives the newer one.
        """
        if self._services.view.code_version < KEYS_SINCE:  # some node does not support the call
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_WAIT_S):
                await asyncio.gather(*(self._ask(address, version) for address in self._others()))

    async def on_view_seen(self, peer: Peer, payload: bytes) -> bool:
        """Answer another shard True once this shard's copy of the catalog has a version.

        False after a second.
        """
        version = msgspec.msgpack.decode(payload, type=int)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LONGEST_WAIT_S
        while self._services.view.version < version and loop.time() < deadline:
            await self._services.view_change(deadline - loop.time())
        return self._services.view.version >= version

    def _others(self) -> list[Address]:
        services = self._services
        found = []
        for name, record in services.view.nodes().items():
            for shard in range(record.shards):
                address = services.view.address(name, shard + 1)
                is_own = name == services.node and shard == services.number
                if address is not None and not is_own and services.view.alive(name):
                    found.append(address)
        return found

    async def _ask(self, address: Address, version: int) -> None:
        with suppress(Problem):
            await self._exchange.ask(address, METHOD, version, kind=bool, timeout_s=LONGEST_WAIT_S)
