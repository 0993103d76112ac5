"""What answers the HTTP requests of a shard: an interface, so that a shard knows no routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from laminar.http.protocol.messages import Application
from laminar.http.protocol.request_head import RequestHead
from laminar.node.runtime.process import Method


class ShardApplication(Application, Protocol):
    """An HTTP application that also serves calls of other shards, and may take datagrams."""

    @property
    def methods(self) -> Mapping[str, Method]:
        """What other processes may call over the node transport, by name."""

    @property
    def max_body_bytes(self) -> int:
        """Most bytes that a request's body may have."""
        raise NotImplementedError

    def answered(self, head: RequestHead, status: int, seconds: float) -> None:
        """Note the status of an answer, and how long it took."""

    async def start(self) -> None:
        """Begin to serve what does not come over HTTP. Called when the shard's replicas are open."""

    def close(self) -> None:
        """End at once what `start` began to serve."""
