"""Transports for a test, closed when it ends."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import AsyncIterator

import pytest

from laminar.node.host.certificates import Certificates
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.transport import Limits, TcpAddress, Transport
from tests.node.transport.ends import CLUSTER, End, Make


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Make ends; all are closed when the test ends."""
    ends: list[End] = []

    async def make_one(
        node: str,
        *,
        role: int = 1,
        secrets: Keyring | None = None,
        cluster: bytes | None = CLUSTER,
        limits: Limits | None = None,
        nonce: bytes | None = None,
        listen: socket.socket | None = None,
        code_version: int = 1,
        enabled: int = 0,
        certificates: Certificates | None = None,
    ) -> End:
        transport = Transport(
            cluster_id=lambda: cluster,
            node=node,
            role=role,
            nonce=nonce or os.urandom(16),
            secrets=Keyring(["s" * 16]) if secrets is None else secrets,
            certificates=certificates,
            limits=limits,
            code_version=code_version,
            enabled=lambda: enabled,
            rng=random.Random(1),
        )
        with listen or socket.create_server(("127.0.0.1", 0)) as sock:
            await transport.serve_tcp(sock)
            end = End(transport, TcpAddress("127.0.0.1", sock.getsockname()[1]))
        ends.append(end)
        return end

    yield make_one
    for end in ends:
        await end.transport.close(timeout=0.2)
