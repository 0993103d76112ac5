"""The interface of the application that answers a shard's HTTP requests, so that a shard knows no routes."""

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
        """The methods that other processes may call over the node transport, by name."""

    @property
    def max_body_bytes(self) -> int:
        """Most bytes that a request's body may have."""
        raise NotImplementedError

    def answered(self, head: RequestHead, status: int, seconds: float) -> None:
        """Record the status of an answer and how long it took, for logs and metrics."""

    async def start(self) -> None:
        """Begin to serve requests that do not come over HTTP. Called when the shard's replicas are open."""

    def close(self) -> None:
        """Stop at once all services that `start` began."""
