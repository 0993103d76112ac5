"""What a node's shards know of the cluster comes from here: pushed by the controller whenever it changes.

The controller says what the view is (`Controller.view_message`); here is who has it already. A shard that is
starting asks by itself, and gets nothing before the catalog names this node.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from laminar.node.runtime.boot import Role
from laminar.node.transport.transport import Peer, TransportError, UnixAddress

if TYPE_CHECKING:
    from laminar.node.catalog.controller import Controller

PUSH_TIMEOUT_S = 2.0
RETRY_S = 0.2


class ViewFeed:
    """See the module. `ready` is set once, when the catalog names this node."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._number = 0
        self._news = asyncio.Condition()
        self.ready = False

    def changed(self) -> None:
        """Take the view anew, and let every shard have it."""
        self._number += 1
        self._controller.view.message = self._controller.view_message()
        self._controller.driver.addresses_changed()

        async def notify() -> None:
            async with self._news:
                self._news.notify_all()

        self._controller.spawn(notify())

    async def answer(self, peer: Peer, payload: bytes) -> bytes:
        """To a shard that asks; empty while there is nothing to say."""
        return msgspec.msgpack.encode(self._controller.view_message()) if self.ready else b""

    async def push(self, role: Role) -> None:
        """Bring one shard up to date, now and whenever something changes."""
        address = UnixAddress(self._controller.boot.unix_name(role))
        pushed = -1
        while True:
            async with self._news:
                while not self.ready or self._number == pushed:
                    await self._news.wait()
                number = self._number
            try:
                payload = msgspec.msgpack.encode(self._controller.view_message())
                await self._controller.transport.call(address, "view", payload, timeout=PUSH_TIMEOUT_S)
                pushed = number
            except TransportError:
                await asyncio.sleep(RETRY_S)  # the shard is starting; it asks by itself too
