"""What a shard learns from the catalog: the views that its controller sends, and answers to its requests.

A view is a copy of the catalog, with the nodes that are alive. The controller sends a whole view first, then
what changes in it. Requests go to the catalog's leader through the same controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from laminar.http.api.problems import Problem
from laminar.node.catalog.messages.answers import CatalogAnswer, decode_answer
from laminar.node.catalog.messages.requests import CatalogRequest, ConfirmRequest, encode_request
from laminar.node.runtime.boot import CONTROLLER, Boot
from laminar.node.runtime.cluster_view import GAP, View, ViewMessage, ViewUpdate
from laminar.node.runtime.process import Method
from laminar.node.transport.transport import Peer, Transport, TransportError, UnixAddress
from membership.catalog_delta import CatalogDelta, VersionGap

CATALOG_TIMEOUT_S = 25.0
VIEW_WAIT_S = 2.0

_view_decoder = msgspec.msgpack.Decoder(ViewMessage)
_update_decoder = msgspec.msgpack.Decoder(ViewUpdate)


class ViewWaits:
    """Those that wait for the next view."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def announce(self) -> None:
        """End the waits: there is a new view."""
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    async def next(self, timeout_s: float) -> bool:
        """Wait for the next view; return whether one came in time."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            if future in self._waiting:
                self._waiting.remove(future)
        return True


class CatalogLink:
    """The views and answers that one shard gets from the catalog."""

    def __init__(
        self,
        boot: Boot,
        view: View,
        *,
        transport: Transport,
        take: Callable[[ViewMessage, CatalogDelta | None], None],
    ) -> None:
        """Create the link. `take(view, delta)` uses a view from now on, and calls `announce` then.

        The delta says what has changed since the last view; it is None if anything may have.
        """
        self._controller = UnixAddress(boot.unix_name(CONTROLLER))
        self._view = view
        self._transport = transport
        self._take = take
        self._waits = ViewWaits()
        self.methods: dict[str, Method] = {"view": self._on_view, "view_update": self._on_view_update}

    # -- views ---------------------------------------------------------------------------

    async def _on_view(self, peer: Peer, payload: bytes) -> bytes:
        self._take(_view_decoder.decode(payload), None)
        return b""

    async def _on_view_update(self, peer: Peer, payload: bytes) -> bytes:
        if self._view.message is None:
            return GAP
        update = _update_decoder.decode(payload)
        try:
            message = update.applied_to(self._view.message)
        except VersionGap:
            return GAP
        self._take(message, update.catalog)
        return b""

    async def fetch_view(self) -> bool:
        """Ask the controller for its view, and take it; return whether it has one."""
        try:
            payload = await self._transport.call(self._controller, "view", b"", timeout=2.0)
        except TransportError:
            return False
        if payload:
            self._take(_view_decoder.decode(payload), None)
        return bool(payload)

    def announce(self) -> None:
        """End the waits for a view: the shard uses a new one."""
        self._waits.announce()

    async def view_change(self, timeout_s: float) -> bool:
        """Wait for the controller's next view; return whether one came in time."""
        return await self._waits.next(timeout_s)

    async def refresh_view(self) -> None:
        """Wait until the view is at least as new as the catalog was at the call.

        Raises:
            Problem: `no_leader` while the catalog has no leader, or no new view reaches this node.
        """
        try:
            answer = await self.ask(ConfirmRequest([]))
        except TransportError as error:
            raise Problem("no_leader", f"the catalog cannot be asked: {error}") from error
        if answer.error:
            raise Problem("no_leader", "the catalog has no leader at the moment")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + VIEW_WAIT_S
        while self._view.version < answer.version and loop.time() < deadline:
            await self.view_change(deadline - loop.time())
        if self._view.version < answer.version:
            raise Problem(
                "no_leader", "this node's copy of the catalog is not up to date yet", outcome="not_applied"
            )

    # -- requests ------------------------------------------------------------------------

    async def ask(self, request: CatalogRequest) -> CatalogAnswer:
        """Ask the catalog's leader through this node's controller.

        Raises:
            TransportError: if no answer came.
        """
        payload = await self._transport.call(
            self._controller, "catalog", encode_request(request), timeout=CATALOG_TIMEOUT_S
        )
        return decode_answer(payload)
