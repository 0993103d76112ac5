"""What TLS costs by itself: the CPU time of a bare protocol with it, beside the same without it.

Client and server are both in this process, so its CPU time is that of both ends: sealing, opening, and what
the loop does for that. A node can do with no less, in this process model: uvloop, and OpenSSL behind buffers
in memory.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

BUFFER_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Bare:
    """Microseconds of CPU for one exchange, both ends together: without TLS, and with it."""

    plain_us: float
    tls_us: float

    @property
    def added_us(self) -> float:
        """What TLS adds."""
        return self.tls_us - self.plain_us


class _End(asyncio.BufferedProtocol):
    """One end of a connection: it calls `whole` each time that a message of `size` bytes has come."""

    def __init__(self, size: int) -> None:
        self.transport: asyncio.Transport
        self._size = size
        self._received = 0
        self._buffer = memoryview(bytearray(BUFFER_BYTES))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        if self._received >= self._size:
            self._received -= self._size
            self.whole()

    def whole(self) -> None:
        """Take a message."""
        raise NotImplementedError


class _Server(_End):
    def __init__(self, size: int, answer: bytes) -> None:
        super().__init__(size)
        self._answer = answer

    def whole(self) -> None:
        self.transport.write(self._answer)


class _Client(_End):
    def __init__(self, size: int, request: bytes, left: Iterator[int]) -> None:
        super().__init__(size)
        self.done = asyncio.get_running_loop().create_future()
        self.request = request
        self._left = left

    def whole(self) -> None:
        if next(self._left, None) is not None:
            self.transport.write(self.request)
        elif not self.done.done():
            self.done.set_result(None)


async def exchange(
    server: ssl.SSLContext,
    client: ssl.SSLContext,
    *,
    request: bytes,
    answer: bytes,
    connections: int,
    count: int,
    rounds: int,
) -> Bare:
    """Return what `count` requests and answers cost, by turns without and with TLS; the least of the rounds.

    The certificate of `server` must be for 127.0.0.1.
    """
    least = [float("inf")] * 2
    for _ in range(rounds):
        for which, (here, there) in enumerate(((None, None), (server, client))):
            us = await _once(here, there, request, answer, connections, count)
            least[which] = min(least[which], us)
    return Bare(*least)


async def _once(
    here: ssl.SSLContext | None,
    there: ssl.SSLContext | None,
    request: bytes,
    answer: bytes,
    connections: int,
    count: int,
) -> float:
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(lambda: _Server(len(request), answer), "127.0.0.1", 0, ssl=here)
    port = listener.sockets[0].getsockname()[1]
    left = iter(range(count))
    clients = []
    for _ in range(connections):
        made = loop.create_connection(
            lambda: _Client(len(answer), request, left), "127.0.0.1", port, ssl=there
        )
        clients.append((await made)[1])
    began_s = time.process_time()
    for each in clients:
        each.whole()
    await asyncio.gather(*(each.done for each in clients))
    took_s = time.process_time() - began_s
    for each in clients:
        each.transport.abort()
    listener.close()
    await asyncio.sleep(0.01)
    return took_s / count * 1e6
