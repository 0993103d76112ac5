"""A wire for datagrams that loses some, doubles some, and lets some come late and out of order.

One `BadWire` stands before one node. Answers that name a leader are made anew to name the wire before that
one, so a client that knows the wires never leaves them.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from laminar.wire.datagram import MAX_DATAGRAM_BYTES, DatagramCodec, Forged, Leader

LOST, DOUBLED, LATE = 0.15, 0.15, 0.2
LATEST_S = 0.3


class _End(asyncio.DatagramProtocol):
    """One socket of the wire."""

    def __init__(self, received: Any) -> None:
        self.received = received
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        self.received(data, addr)

    def error_received(self, exc: Exception) -> None:
        """The node is down: as good as lost."""


class BadWire:
    """Before the node at `node`; `url` is what a client is given instead."""

    def __init__(self, node: tuple[str, int], *, codec: DatagramCodec, seed: int) -> None:
        self.node = node
        self.address = ("", 0)
        self.wires: Mapping[tuple[str, int], tuple[str, int]] = {}
        self.counts: Counter[str] = Counter()
        self._codec = codec
        self._rng = random.Random(seed)
        self._ends: dict[Any, _End] = {}
        self._opening: dict[Any, asyncio.Task[_End]] = {}
        self._door: _End | None = None

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    async def open(self) -> None:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        sock.bind(("127.0.0.1", 0))
        sock.setblocking(False)
        self.address = sock.getsockname()
        _, self._door = await loop.create_datagram_endpoint(lambda: _End(self._asked), sock=sock)

    def close(self) -> None:
        for task in self._opening.values():
            task.cancel()
        for end in [*self._ends.values(), self._door]:
            if end is not None:
                end.transport.close()

    def _asked(self, data: bytes, client: Any) -> None:
        end = self._ends.get(client)
        if end is not None:
            self._carry(end, data)
        elif client not in self._opening:  # what comes before it is open is lost
            loop = asyncio.get_running_loop()
            self._opening[client] = loop.create_task(self._open_end(client, data))

    async def _open_end(self, client: Any, data: bytes) -> _End:
        loop = asyncio.get_running_loop()
        _, end = await loop.create_datagram_endpoint(
            lambda: _End(lambda answer, _: self._answered(answer, client)), remote_addr=self.node
        )
        self._ends[client] = end
        self._carry(end, data)
        return end

    def _answered(self, data: bytes, client: Any) -> None:
        try:
            answer = self._codec.decode_answer(data)
        except Forged:
            return
        if isinstance(answer.body, Leader):
            host, port = self.wires[answer.body.host, answer.body.port]
            answer = replace(answer, body=Leader(host, port))
            data = self._codec.encode_answer(answer, limit_bytes=MAX_DATAGRAM_BYTES)
        assert self._door is not None
        self._carry(self._door, data, client)

    def _carry(self, end: _End, data: bytes, *to: Any) -> None:
        """Send it, or not, or twice, or late."""
        chance = self._rng.random()
        copies = 1
        if chance < LOST:
            self.counts["lost"] += 1
            return
        if chance < LOST + DOUBLED:
            self.counts["doubled"] += 1
            copies = 2
        for _ in range(copies):
            if self._rng.random() < LATE:
                self.counts["late"] += 1
                delay_s = self._rng.random() * LATEST_S
                asyncio.get_running_loop().call_later(delay_s, self._send, end, data, *to)
            else:
                self._send(end, data, *to)

    def _send(self, end: _End, data: bytes, *to: Any) -> None:
        if not end.transport.is_closing():
            end.transport.sendto(data, *to)
            self.counts["carried"] += 1


async def open_wires(nodes: list[tuple[str, int]], *, codec: DatagramCodec, seed: int) -> list[BadWire]:
    """One before each node, that know of each other."""
    wires = [BadWire(node, codec=codec, seed=seed + number) for number, node in enumerate(nodes)]
    for wire in wires:
        await wire.open()
    known = {wire.node: wire.address for wire in wires}
    for wire in wires:
        wire.wires = known
    return wires
