"""What the transport's tests share: ends that serve on a port, and a wire through us that changes bytes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from laminar.node.transport.transport import Address, Channel, Limits, Peer, TcpAddress, Transport

CLUSTER = b"c" * 16
# How long tests wait for what should come at once.
PATIENCE_S = 60.0
QUICK = Limits(ping_interval_ms=40, silent_pings=3, connect_timeout_ms=30_000)
# Nothing is sent but what a test sends, and silence tells nothing.
NO_PINGS = Limits(ping_interval_ms=3_600_000)


class End:
    """A transport that serves on a TCP port, and what it was told."""

    def __init__(self, transport: Transport, address: TcpAddress) -> None:
        self.transport = transport
        self.address = address
        self.frames: asyncio.Queue[tuple[Peer, Channel, memoryview]] = asyncio.Queue()
        self.lost: asyncio.Queue[Peer | Address] = asyncio.Queue()
        self.up: asyncio.Queue[Peer] = asyncio.Queue()
        transport.on_frame = lambda peer, channel, payload: self.frames.put_nowait((peer, channel, payload))
        transport.on_lost = self.lost.put_nowait
        transport.on_up = self.up.put_nowait

    @property
    def peer(self) -> Peer:
        """What others call this end."""
        return Peer(self.transport.node, self.transport.role, self.transport.nonce)

    def count(self, name: str) -> int:
        """One of the statistics."""
        return self.transport.statistics().get(name, 0)


T = TypeVar("T")

Make = Callable[..., Awaitable[End]]


async def soon(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that nothing announces."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what is waited for is a counter, not an event
            await asyncio.sleep(0.005)


async def get(queue: asyncio.Queue[T]) -> T:
    """The next item, in time."""
    return await asyncio.wait_for(queue.get(), PATIENCE_S)


@contextmanager
def refusing() -> Iterator[tuple[socket.socket, TcpAddress]]:
    """A port that refuses connections, as nothing listens there, and that nobody else gets meanwhile.

    Yields its socket, which may listen later, and its address.
    """
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held, TcpAddress("127.0.0.1", held.getsockname()[1])


class Proxy:
    """A TCP connection through us: `change(bytes)` says what travels on, in which pieces."""

    def __init__(self, target: TcpAddress, change: Callable[[bytes], list[bytes]]) -> None:
        self._target = target
        self._change = change
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self) -> TcpAddress:
        """Where to connect to."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return TcpAddress("127.0.0.1", self._server.sockets[0].getsockname()[1])

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._target.host, self._target.port)
        self._writers += [writer, far_writer]
        await asyncio.gather(
            self._pump(reader, far_writer, self._change), self._pump(far_reader, writer, lambda data: [data])
        )

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        change: Callable[[bytes], list[bytes]],
    ) -> None:
        try:
            while data := await reader.read(65536):
                for piece in change(data):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except ConnectionError:
            pass
        writer.close()

    async def stop(self) -> None:
        """End every connection."""
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.sleep(0.02)
