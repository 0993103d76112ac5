"""The UDP sockets of appends by datagram: one for each address family, opened when it is first needed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from laminar.client.net.session import Session

Address = tuple[str, int]


class DatagramSockets:
    """The sockets of one client; `received` is called with each datagram that arrives."""

    def __init__(self, session: Session, received: Callable[[bytes], None]) -> None:
        self._session = session
        self._received = received
        self._endpoints: dict[int, asyncio.DatagramTransport] = {}
        self._resolved: dict[Address, tuple[int, Any]] = {}

    async def send(self, address: Address, datagram: bytes) -> str | None:
        """Send a datagram to `address`; return None, or a text that says why sending failed."""
        try:
            found = self._resolved.get(address)
            if found is None:
                found = self._resolved[address] = await self._resolve(address)
            family, target = found
            transport = self._endpoints.get(family)
            if transport is None:
                transport = await self._open(family)
            transport.sendto(datagram, target)
        except OSError as error:
            return f"{address[0]}:{address[1]}: {error}"
        return None

    def close(self) -> None:
        """Close the sockets. Idempotent."""
        for transport in self._endpoints.values():
            transport.close()
        self._endpoints.clear()

    async def _resolve(self, address: Address) -> tuple[int, Any]:
        infos = await self._session.loop.getaddrinfo(*address, type=socket.SOCK_DGRAM)
        family, _, _, _, target = infos[0]
        return int(family), target

    async def _open(self, family: int) -> asyncio.DatagramTransport:
        transport, _ = await self._session.loop.create_datagram_endpoint(
            lambda: _Receiver(self._received), sock=_any_port(family)
        )
        known = self._endpoints.setdefault(family, transport)
        if known is not transport:
            transport.close()  # another queue opened one meanwhile
        return known


class _Receiver(asyncio.DatagramProtocol):
    """The receiving side of the client's UDP socket: it passes datagrams and ignores errors."""

    def __init__(self, received: Callable[[bytes], None]) -> None:
        self._received = received

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Pass a received datagram to the owner of the socket."""
        self._received(data)

    def error_received(self, exc: Exception) -> None:
        """Ignore that a copy could not be delivered: the batch is sent again, as if the copy was lost."""


def _any_port(family: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_DGRAM)
    sock.setblocking(False)
    try:
        sock.bind(("", 0))
    except OSError:
        sock.close()
        raise
    return sock
