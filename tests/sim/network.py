"""The wires between simulated processes: a transport with the face of `transport.Transport`.

A frame or a call arrives late, twice, out of order, or not at all, as the world's dice say; pairs of nodes
may be cut off, in one direction or both. News of a process that died comes as a closed socket would bring it,
and not at all when its machine lost power or the wire is cut (then the pings notice, seconds later).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from laminar.batch import Buffer
from laminar.node.transport.handshake import Channel
from laminar.node.transport.transport import (
    Address,
    CallTimeout,
    Peer,
    PeerLost,
    RemoteError,
    TcpAddress,
    TransportError,
)
from tests.sim.loop import Life, SimLoop, current_life

PING_NOTICE_S = 5.0
UNREAD_FRAMES = 32


class Wires:
    """Who hears whom, and how well."""

    def __init__(self, loop: SimLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.listening: dict[Address, SimTransport] = {}
        self.cuts: set[tuple[str, str]] = set()
        # (node, channel): what this node sends over its connections of this kind is lost.
        self.stuck: set[tuple[str, Channel]] = set()
        self.loss = 0.0
        self.duplication = 0.0
        self.reorder = 0.0
        self.delay_s = 0.0005
        # Sees each frame that a transport sends: (sender, receiver, payload).
        self.tap: Callable[[SimTransport, Address, Channel, bytes], None] | None = None

    def passes(self, sender: str, receiver: str) -> bool:
        """Whether a packet from one node to another gets through."""
        return sender == receiver or (sender, receiver) not in self.cuts

    def latency_s(self) -> float:
        """One packet's way: mostly short, sometimes long."""
        chance = self.rng.random
        delay_s = self.delay_s * (0.5 + chance())
        if self.reorder and chance() < self.reorder:
            delay_s += chance() * 0.2
        return delay_s

    def post(self, sender: SimTransport, address: Address, channel: Channel, payload: bytes) -> None:
        """Send one frame on its way."""
        if self.tap is not None:
            self.tap(sender, address, channel, payload)
        copies = 1
        if not sender.owns(address):
            chance = self.rng.random
            if (sender.host, channel) in self.stuck:
                return
            if self.loss and chance() < self.loss:
                return
            if self.duplication and chance() < self.duplication:
                copies = 2
        for _ in range(copies):
            delay_s = self.latency_s()
            if not self.reorder:
                # One connection keeps its order.
                now_s, key = self.loop.time(), (address, channel)
                behind_s = sender.last_arrival_s.get(key, 0.0) - now_s
                delay_s = max(delay_s, behind_s)
                sender.last_arrival_s[key] = now_s + delay_s
            self.loop.call_in(None, delay_s, self._arrive, sender, address, channel, payload)

    def _arrive(self, sender: SimTransport, address: Address, channel: Channel, payload: bytes) -> None:
        receiver = self.listening.get(address)
        if receiver is None or not receiver.life.alive:
            if sender.life.alive and self.passes(address_host(address), sender.host):
                self._tell_lost(sender, address)
            return
        if self.cuts and not self.passes(sender.host, receiver.host):
            return
        receiver.knows(sender)
        sender.knows(receiver)
        if receiver.paused and channel is Channel.BULK:
            receiver.leave_unread(sender.peer, payload)
            return
        self.loop.run_in(receiver.life, receiver.on_frame, sender.peer, channel, memoryview(payload))

    def _tell_lost(self, whom: SimTransport, about: Address) -> None:
        """A connection was refused: once, until something passes again."""
        if about not in whom.refused:
            whom.refused.add(about)
            self.loop.call_in(whom.life, 0.0, lambda: whom.on_lost(about))

    def gone(self, transport: SimTransport, *, silently: bool) -> None:
        """A process has ended: its peers hear it by the closed connection, or by the silence."""
        for address, listener in list(self.listening.items()):
            if listener is transport:
                del self.listening[address]
        for other in list(transport.known):
            if not other.life.alive or transport not in other.heard:
                continue
            delay_s = PING_NOTICE_S if silently else 0.001 * self.rng.random()
            self.loop.call_in(other.life, delay_s, self._lost_peer, other, transport, silently)

    def _lost_peer(self, other: SimTransport, gone: SimTransport, silently: bool) -> None:
        if gone in other.heard:
            if not silently and not self.passes(gone.host, other.host):
                self.loop.call_in(other.life, PING_NOTICE_S, self._lost_peer, other, gone, True)
                return
            other.heard.discard(gone)
            other.on_lost(gone.peer)


def address_host(address: Address) -> str:
    """The host of an address."""
    return address.host if isinstance(address, TcpAddress) else ""


class SimTransport:
    """One process's end of the wires."""

    def __init__(
        self,
        wires: Wires,
        *,
        host: str,
        node: str,
        role: int,
        nonce: bytes,
        history: bytes = b"",
        store_id: bytes = b"",
    ) -> None:
        life = current_life()
        assert life is not None, "a transport without a process"
        self.wires = wires
        self.host = host
        self.node = node
        self.role = role
        self.nonce = nonce
        self.life: Life = life
        self.peer = Peer(node, role, nonce, history, store_id)
        self.on_frame: Callable[[Peer, Channel, memoryview], None] = lambda peer, channel, payload: None
        self.on_call: Callable[[Peer, str, bytes], Awaitable[bytes]] = _no_calls
        self.on_lost: Callable[[Peer | Address], None] = lambda whom: None
        self.on_up: Callable[[Peer], None] = lambda peer: None
        self.addresses: set[Address] = set()
        # Transports that a connection stands with, in the order they came.
        self.known: dict[SimTransport, None] = {}
        self.heard: set[SimTransport] = set()
        self.refused: set[Address] = set()
        self.last_arrival_s: dict[tuple[Address, Channel], float] = {}
        # What has come on BULK connections that are not read from, and how often that was.
        self.paused = False
        self.pauses = 0
        self.unread: list[tuple[Peer, bytes]] = []

    def __repr__(self) -> str:
        return f"<SimTransport {self.node}/{self.role}>"

    def owns(self, address: Address) -> bool:
        """Whether an address is of this host."""
        return not isinstance(address, TcpAddress) or address.host == self.host

    def knows(self, other: SimTransport) -> None:
        """A connection with another process stands."""
        if other not in self.heard:
            self.heard.add(other)
            self.known[other] = None
            self.refused -= other.addresses
            self.wires.loop.call_in(self.life, 0.0, lambda: self.on_up(other.peer))

    async def serve_tcp(self, sock: Any) -> None:
        """`sock` is a `TcpAddress` here."""
        self._serve(sock)

    async def serve_unix(self, name: str) -> None:
        from laminar.node.transport.transport import UnixAddress

        self._serve(UnixAddress(name))

    def _serve(self, address: Address) -> None:
        self.wires.listening[address] = self
        self.addresses.add(address)

    def send(
        self, address: Address, channel: Channel, parts: Sequence[Buffer], *, at_once: bool = False
    ) -> bool:
        self.wires.post(self, address, channel, b"".join(parts))
        return True

    async def call(self, address: Address, method: str, payload: bytes, *, timeout: float) -> bytes:
        """Raises what the real one raises."""
        wires, loop = self.wires, self.wires.loop
        answer: asyncio.Future[bytes] = loop.create_future()
        local = self.owns(address)

        def arrive() -> None:
            receiver = wires.listening.get(address)
            if receiver is None or not receiver.life.alive:
                if local or wires.passes(address_host(address), self.host):
                    loop.call_in(self.life, 0.0, fail, PeerLost(f"{address} refuses", sent=False))
                return
            if not wires.passes(self.host, receiver.host):
                return
            loop.start(receiver.life, work(receiver))

        async def work(receiver: SimTransport) -> None:
            try:
                found: bytes | TransportError = await receiver.on_call(self.peer, method, bytes(payload))
            except Exception as error:  # noqa: BLE001  # as the real one: it travels to the caller
                found = RemoteError(type(error).__name__, str(error))
            if wires.passes(receiver.host, self.host) and (local or wires.rng.random() >= wires.loss):
                loop.call_in(self.life, wires.latency_s(), settle, found)

        def settle(found: bytes | TransportError) -> None:
            if isinstance(found, TransportError):
                fail(found)
            elif not answer.done():
                answer.set_result(found)

        def fail(error: TransportError) -> None:
            if not answer.done():
                answer.set_exception(error)

        def expire() -> None:
            fail(CallTimeout(f"{method} at {address} took more than {timeout} s"))

        if local or wires.rng.random() >= wires.loss:
            loop.call_in(None, wires.latency_s(), arrive)
        late = loop.call_later(timeout, expire)
        try:
            return await answer
        finally:
            late.cancel()

    def pause_bulk(self) -> None:
        self.paused = True
        self.pauses += 1

    def leave_unread(self, peer: Peer, payload: bytes) -> None:
        """It waits in the socket, or was never sent: there the senders' queues are full."""
        if len(self.unread) < UNREAD_FRAMES:
            self.unread.append((peer, payload))

    def resume_bulk(self) -> None:
        self.paused = False
        unread, self.unread = self.unread, []
        for peer, payload in unread:
            self.wires.loop.call_in(self.life, 0.0, self._read, peer, payload)

    def _read(self, peer: Peer, payload: bytes) -> None:
        if self.paused:
            self.leave_unread(peer, payload)
        else:
            self.on_frame(peer, Channel.BULK, memoryview(payload))

    def queued_bytes(self, address: Address, channel: Channel) -> int:
        return 0

    def round_trips_s(self) -> dict[Peer, float]:
        return {}

    def statistics(self) -> dict[str, int]:
        return {}

    async def close(self, *, timeout: float = 1.0) -> None:
        for address in self.addresses:
            if self.wires.listening.get(address) is self:
                del self.wires.listening[address]


async def _no_calls(peer: Peer, method: str, payload: bytes) -> bytes:
    raise RemoteError("unknown_method", method)
