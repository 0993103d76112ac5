"""Ask all nodes a question, with one call to each: one shard of the node asks its other shards."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Generic, TypeVar

from laminar.http.api.problems import Problem
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.services import HostServices
from laminar.node.runtime.boot import CONTROLLER, Role
from laminar.node.transport.transport import TransportError

T = TypeVar("T")

SIBLING_WAIT_S: Final = 1.0
NODE_WAIT_S: Final = 2.0
"""How long a node may take; longer than its shards may, so that it answers although one shard is silent."""
MOST_ASKED: Final = 3
"""The most shards of a node that are tried, one after the other, until one answers."""


class NodeCall(Generic[T]):
    """A question to all nodes of the cluster, this one included: asks each, and gathers the answers."""

    def __init__(
        self,
        services: HostServices,
        exchange: Exchange,
        *,
        method: str,
        own: Callable[[], Awaitable[T]],
        kind: Any,
        payload: bytes = b"",
        wait_s: float = NODE_WAIT_S,
    ) -> None:
        """Create a question: `own` returns this node's answer; other nodes answer a call of `method`.

        Their answers are decoded as `kind`. `payload` is sent with the call, which may take `wait_s`.
        """
        self._services = services
        self._exchange = exchange
        self._method = method
        self._own = own
        self._kind = kind
        self._payload = payload
        self._wait_s = wait_s

    async def of_all(self, names: Iterable[str]) -> dict[str, T | None]:
        """Return the answers of nodes, by name; None for a node that did not answer."""
        nodes = list(names)
        return dict(zip(nodes, await asyncio.gather(*map(self._of, nodes)), strict=True))

    async def _of(self, node: str) -> T | None:
        """Return the answer of a node; None if it is not alive, or no shard of it answers."""
        services = self._services
        if node == services.node:
            return await self._own()
        record = services.view.nodes().get(node)
        if record is None or not services.view.alive(node):
            return None
        until_s = time.monotonic() + self._wait_s
        for shard in range(min(record.shards, MOST_ASKED)):
            address, left_s = services.view.address(node, shard + 1), until_s - time.monotonic()
            if address is None or left_s <= 0:
                break
            try:
                answer: T = await self._exchange.ask(
                    address, self._method, self._payload, kind=self._kind, timeout_s=left_s
                )
            except Problem:
                continue
            return answer
        return None


async def of_siblings(
    services: HostServices, method: str, *, payload: bytes = b""
) -> dict[Role, bytes | None]:
    """Return the answers of this node's other shards, by role; None for a shard that did not answer."""
    siblings = [role for role in services.siblings if role != CONTROLLER]
    answers = await asyncio.gather(
        *(services.ask_sibling(role, method, payload=payload, timeout_s=SIBLING_WAIT_S) for role in siblings),
        return_exceptions=True,
    )
    found: dict[Role, bytes | None] = {}
    for role, answer in zip(siblings, answers, strict=True):
        if isinstance(answer, BaseException) and not isinstance(answer, TransportError):
            raise answer
        found[role] = None if isinstance(answer, BaseException) else answer
    return found
