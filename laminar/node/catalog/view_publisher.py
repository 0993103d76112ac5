"""Publish the controller's view of the cluster to the node's shards, whenever it changes.

The controller makes the view (`make`); this module knows which view each shard has received, and pushes what
changed since. A shard that has another view says so in its answer, and gets the whole view. A starting shard
also asks for the view. No shard gets a view before the publisher is `ready`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from laminar.node.consensus.driver import Driver
from laminar.node.runtime.boot import Boot, Role
from laminar.node.runtime.cluster_view import GAP, View, ViewMessage, ViewUpdate
from laminar.node.transport.transport import Peer, Transport, TransportError, UnixAddress
from membership.tables import encoded

PUSH_TIMEOUT_S = 2.0
# A shard decodes a whole view before it answers: 33 MiB, of 100,000 topics, take it some seconds.
WHOLE_BYTES_PER_S = 1 << 20
RETRY_S = 0.2


class ViewPublisher:
    """Sends the controller's view of the cluster to the shards of its node, in full or as a difference.

    The controller sets `ready`, once, when views may be sent. `view` is the controller's own view; `make()`
    returns the content that it should have now.
    """

    def __init__(
        self,
        boot: Boot,
        *,
        view: View,
        make: Callable[[], ViewMessage],
        driver: Driver,
        transport: Transport,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._boot = boot
        self._view = view
        self._make = make
        self._driver = driver
        self._transport = transport
        self._spawn = spawn
        self._number = 0
        self._view_changed = asyncio.Condition()
        self.ready = False

    def changed(self) -> None:
        """Compute the view (catalog and live nodes) again; wake the tasks that push it to the shards."""
        self._number += 1
        self._view.message = self._make()
        self._driver.addresses_changed()

        async def notify() -> None:
            async with self._view_changed:
                self._view_changed.notify_all()

        self._spawn(notify())

    async def answer(self, peer: Peer, payload: bytes) -> bytes:
        """Answer a shard that asks for the view with the encoded view; with b"" before `ready`."""
        return encoded(self._make()) if self.ready else b""

    async def push(self, role: Role) -> None:
        """Push the view to one shard, now and whenever it changes."""
        address = UnixAddress(self._boot.unix_name(role))
        pushed = -1
        held: ViewMessage | None = None  # what the shard has, as it answered
        while True:
            async with self._view_changed:
                while not self.ready or self._number == pushed:
                    await self._view_changed.wait()
                number = self._number
            try:
                message = self._make()
                update = None if held is None else ViewUpdate.between(held, message)
                if update is None:
                    payload = encoded(message)
                    timeout_s = PUSH_TIMEOUT_S + len(payload) / WHOLE_BYTES_PER_S
                    await self._transport.call(address, "view", payload, timeout=timeout_s)
                else:
                    payload = msgspec.msgpack.encode(update)
                    answer = await self._transport.call(
                        address, "view_update", payload, timeout=PUSH_TIMEOUT_S
                    )
                    if answer == GAP:
                        held = None
                        continue
                held, pushed = message, number
            except TransportError:
                held = None
                await asyncio.sleep(RETRY_S)  # the shard is starting, and will also ask for the view itself
