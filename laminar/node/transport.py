"""Messages between the processes of a cluster: framed TCP between nodes, abstract Unix sockets within one.

A `Transport` belongs to one event loop. It sends frames (which may be dropped: Raft sends again), carries calls and
their answers, and reports *news*: a connection that ended, a connect that was refused. News are what makes failover
quick, so they come at once, and once per life of a peer: after `on_lost(peer)` nothing more is said of that peer until
a connection with it stands again (`on_up`).

Connections have a direction: frames and calls go from who connected to who accepted, answers come back. There is one
per address and channel: CONTROL is small, bounded and never paused; BULK obeys flow control on both sides; so an
acknowledgement never waits behind appends that the other side is too busy to take. Control connections ping, because
a peer that lost its power closes nothing.

What frames mean, and who lives at which address, is not known here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from laminar.node.calls import Calls, CallTimeout, PeerLost, RemoteError, TransportError
from laminar.node.handshake import (
    CHALLENGE_SIZE,
    PROTOCOL_VERSION,
    Acceptor,
    Channel,
    HandshakeError,
    Hello,
    Initiator,
)
from laminar.node.line import Address, Line, TcpAddress, UnixAddress
from laminar.node.link import MAX_FRAME_BYTES, SHARED_BUFFER_BYTES, Buffer, FrameKind, Link

__all__ = [
    "MAX_FRAME_BYTES",
    "Address",
    "Buffer",
    "CallTimeout",
    "Channel",
    "Limits",
    "Peer",
    "PeerLost",
    "ProtocolError",
    "RemoteError",
    "TcpAddress",
    "Transport",
    "TransportError",
    "UnixAddress",
]

log = logging.getLogger(__name__)

_PEER_CREDENTIALS = struct.Struct("3i")
_PING = struct.Struct("<d")


class ProtocolError(Exception):
    """A handler found that the peer broke the protocol: its connection ends, and that is counted."""


class Peer(NamedTuple):
    """One life of a process of the cluster; the nonce changes when it starts again."""

    node: str
    role: int
    nonce: bytes


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and times of a transport."""

    control_queue_bytes: int = 8 << 20
    bulk_queue_bytes: int = 64 << 20
    call_queue_bytes: int = 128 << 20
    connect_timeout_ms: int = 3000
    """From the first packet to the end of the greeting."""
    ping_interval_ms: int = 1000
    silent_pings: int = 5
    """Pings in a row without a byte from the peer, after which it counts as gone."""
    strangers: int = 256
    """Accepted connections whose greeting is not over; more are dropped."""


@dataclass(slots=True)
class _Conversation:
    """What is known of one link: how it came to be, how far the greeting is, and who is at the other end."""

    greeting: Initiator | Acceptor | None
    line: Line | None
    """The line of a connection we made; None for an accepted one."""
    opened: asyncio.Future[None]
    """Done when the greeting is over or the link is gone."""
    timer: asyncio.TimerHandle | None = None
    peer: Peer | None = None
    silent_pings: int = 0
    round_trip_s: float = 0.0


class Transport:
    """See the module's head. Set the four callbacks before serving or sending.

    `cluster_id` is asked at each greeting, so a joining node may learn its cluster while it runs.
    """

    def __init__(
        self,
        *,
        cluster_id: Callable[[], bytes | None],
        node: str,
        role: int,
        nonce: bytes,
        secret: bytes | None,
        limits: Limits | None = None,
        rng: random.Random | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.node = node
        self.role = role
        self.nonce = nonce
        self.limits = limits or Limits()
        self.on_frame: Callable[[Peer, Channel, memoryview], None] = lambda peer, channel, payload: None
        self.on_call: Callable[[Peer, str, bytes], Awaitable[bytes]] = _refuse_call
        self.on_lost: Callable[[Peer | Address], None] = lambda whom: None
        self.on_up: Callable[[Peer], None] = lambda peer: None
        self._cluster_id = cluster_id
        self._secret = secret
        self._rng = rng or random.Random()
        self._loop = loop or asyncio.get_running_loop()
        self._shared = memoryview(bytearray(SHARED_BUFFER_BYTES))
        self._calls = Calls(self._loop)
        self._counters: Counter[str] = Counter()
        self._servers: list[asyncio.Server] = []
        self._lines: dict[Channel, dict[Address, Line]] = {channel: {} for channel in Channel}
        self._conversations: dict[Link, _Conversation] = {}
        self._peers: dict[Peer, set[Link]] = {}
        self._strangers = 0
        self._bulk_paused = False
        self._closed = False
        self._next_tick = self._loop.time() + self.limits.ping_interval_ms / 1000
        self._ticker = self._loop.call_at(self._next_tick, self._tick)

    def __repr__(self) -> str:
        return f"<Transport {self.node}/{self.role} peers={len(self._peers)} links={len(self._conversations)}>"

    # ---- serving

    async def serve_tcp(self, sock: socket.socket) -> None:
        """Accept connections on a bound (perhaps already listening) TCP socket, which stays the caller's."""
        # A loop closes its server's socket; a duplicate leaves the supervisor's order of sockets untouched.
        duplicate = sock.dup()
        duplicate.setblocking(False)
        self._servers.append(await self._loop.create_server(self._accept, sock=duplicate, backlog=1024))

    async def serve_unix(self, name: str) -> None:
        """Accept connections on the abstract Unix socket `name`, from processes of our own user only."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind("\0" + name)
            sock.setblocking(False)
            self._servers.append(await self._loop.create_unix_server(self._accept, sock=sock, backlog=1024))
        except BaseException:
            sock.close()
            raise

    def _accept(self) -> Link:
        link = Link(
            self, self._loop, self._shared, channel=None, queue_limit_bytes=self.limits.call_queue_bytes
        )
        greeting = Acceptor(self._hello(Channel.CALL), self._secret)
        self._conversations[link] = _Conversation(greeting, None, self._loop.create_future())
        return link

    # ---- sending

    def send(self, address: Address, channel: Channel, parts: Sequence[Buffer]) -> bool:
        """Offer one frame, made of `parts` (kept, not copied; don't change them). Connects if need be.

        False: dropped, because the queue is full or the address failed a moment ago. True promises nothing either.
        """
        size = 0
        for part in parts:
            size += len(part)
        link = self._line(address, channel).open_link()
        if link is None or not link.has_room(size):
            self._counters["frames_dropped"] += 1
            return False
        link.send(FrameKind.DATA, parts, size)
        return True

    async def call(self, address: Address, method: str, payload: bytes, *, timeout: float) -> bytes:
        """Ask the process at `address` and wait for its answer, at most `timeout` seconds, connecting included.

        Raises `RemoteError`, `CallTimeout` or `PeerLost`; all are `TransportError`.
        """
        if self._closed:
            raise PeerLost("this transport is closed", sent=False)
        link = self._line(address, Channel.CALL).open_link()
        if link is None:
            raise PeerLost(f"{address} could not be reached a moment ago", sent=False)
        if not link.has_room(len(payload) + len(method) + 64):
            raise PeerLost(f"too many bytes of calls wait for {address}", sent=False)
        return await self._calls.call(link, method, payload, timeout=timeout)

    def pause_bulk(self) -> None:
        """Stop reading from every BULK connection: the receive budget is used up. CONTROL goes on."""
        self._bulk_paused = True
        for link in self._bulk_incoming():
            link.pause_reading()

    def resume_bulk(self) -> None:
        """Read BULK connections again."""
        self._bulk_paused = False
        for link in self._bulk_incoming():
            link.resume_reading()

    def _bulk_incoming(self) -> list[Link]:
        return [
            link
            for link, conversation in self._conversations.items()
            if link.channel is Channel.BULK and link.established and conversation.line is None
        ]

    def queued_bytes(self, address: Address, channel: Channel) -> int:
        """Bytes that wait to leave for `address`; 0 without a connection."""
        line = self._lines[channel].get(address)
        return 0 if line is None or line.link is None else line.link.queued_bytes

    def _line(self, address: Address, channel: Channel) -> Line:
        lines = self._lines[channel]
        line = lines.get(address)
        if line is None:
            assert not self._closed, "send on a closed transport"
            line = lines[address] = Line(
                address, channel, loop=self._loop, rng=self._rng, make_link=self._dial, connect=self._connect
            )
        return line

    # ---- connections

    def _hello(self, channel: Channel) -> Hello:
        return Hello(
            version=PROTOCOL_VERSION,
            cluster=self._cluster_id() or b"",
            node=self.node,
            role=self.role,
            nonce=self.nonce,
            channel=channel,
            challenge=os.urandom(CHALLENGE_SIZE),
        )

    def _dial(self, line: Line) -> Link:
        limit = {
            Channel.CONTROL: self.limits.control_queue_bytes,
            Channel.BULK: self.limits.bulk_queue_bytes,
            Channel.CALL: self.limits.call_queue_bytes,
        }[line.channel]
        link = Link(self, self._loop, self._shared, channel=line.channel, queue_limit_bytes=limit)
        greeting = Initiator(self._hello(line.channel), self._secret)
        self._conversations[link] = _Conversation(greeting, line, self._loop.create_future())
        return link

    async def _connect(self, line: Line, link: Link) -> None:
        """Connect `link` and wait for the end of the greeting; a failure is dealt with here."""
        opened = self._conversations[link].opened
        address = line.address
        try:
            async with asyncio.timeout(self.limits.connect_timeout_ms / 1000):
                if isinstance(address, TcpAddress):
                    await self._loop.create_connection(lambda: link, address.host, address.port)
                else:
                    await self._loop.create_unix_connection(lambda: link, "\0" + address.name)
                await opened
        except TimeoutError:
            # Silence is no news: the process may be starting, or busy. The election timeout is there for it.
            self._fail_to_connect(link, f"no greeting from {address} in time")
        except OSError as error:
            self._fail_to_connect(link, f"{address}: {error}")
            if isinstance(error, ConnectionError):
                self.on_lost(address)

    def _fail_to_connect(self, link: Link, reason: str) -> None:
        self._counters["connects_failed"] += 1
        link.abort(reason)
        self._forget(link)

    def link_made(self, link: Link) -> None:
        """(Called by a link.) The connection stands: greet, or wait a while to be greeted."""
        conversation = self._conversations[link]
        assert link.transport is not None
        if not _same_user(link.transport):
            self._refuse(link, HandshakeError("user", "the process at the other end is another user's"))
        elif isinstance(conversation.greeting, Initiator):
            link.send_at_once(FrameKind.HELLO, conversation.greeting.hello)
        elif self._strangers >= self.limits.strangers:
            self._refuse(link, HandshakeError("strangers", f"{self._strangers} connections have not greeted"))
        else:
            self._strangers += 1
            wait_s = self.limits.connect_timeout_ms / 1000
            late = HandshakeError("late", "no greeting in time")
            conversation.timer = self._loop.call_later(wait_s, self._refuse, link, late)

    def link_frame(self, link: Link, kind: int, payload: memoryview) -> None:
        """(Called by a link.) A whole frame came."""
        conversation = self._conversations.get(link)
        if conversation is None or link.closing:
            return
        try:
            if conversation.peer is None:
                self._greet(link, conversation, kind, payload)
            elif kind == FrameKind.DATA and conversation.line is None:
                assert link.channel is not None
                self._counters["frames_received"] += 1
                self.on_frame(conversation.peer, link.channel, payload)
            else:
                self._take(link, conversation, conversation.peer, kind, payload)
        except HandshakeError as error:
            self._refuse(link, error)
        except ProtocolError as error:
            self._counters["protocol_errors"] += 1
            link.abort(f"protocol error: {error}")

    def _take(
        self, link: Link, conversation: _Conversation, peer: Peer, kind: int, payload: memoryview
    ) -> None:
        """Everything but data on a link whose greeting is over."""
        dialled = conversation.line is not None
        try:
            if kind == FrameKind.CALL and not dialled and link.channel is Channel.CALL:
                on_call = self.on_call
                self._calls.take_call(link, payload, lambda method, body: on_call(peer, method, body))
            elif kind in (FrameKind.ANSWER, FrameKind.FAILURE) and dialled:
                self._calls.take_answer(kind, payload)
            elif kind == FrameKind.PING and not dialled:
                link.send(FrameKind.PONG, (payload,), len(payload))
            elif kind == FrameKind.PONG and dialled:
                conversation.round_trip_s = self._loop.time() - _PING.unpack(payload)[0]
            else:
                raise ProtocolError(f"frame of kind {kind} out of place")
        except (struct.error, UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise ProtocolError(f"frame of kind {kind} can't be read: {error}") from error

    def _greet(self, link: Link, conversation: _Conversation, kind: int, payload: memoryview) -> None:
        greeting = conversation.greeting
        if isinstance(greeting, Initiator) and kind == FrameKind.REPLY:
            proof, theirs = greeting.take_reply(payload)
            link.send_at_once(FrameKind.PROOF, proof)
            self._establish(link, conversation, theirs)
        elif isinstance(greeting, Initiator) and kind == FrameKind.REFUSED:
            raise HandshakeError("refused", f"refused by the peer: {bytes(payload).decode(errors='replace')}")
        elif isinstance(greeting, Acceptor) and kind == FrameKind.HELLO:
            link.send_at_once(FrameKind.REPLY, greeting.take_hello(payload))
        elif isinstance(greeting, Acceptor) and kind == FrameKind.PROOF:
            self._establish(link, conversation, greeting.take_proof(payload))
        else:
            raise HandshakeError("malformed", f"frame of kind {kind} within the greeting")

    def _establish(self, link: Link, conversation: _Conversation, theirs: Hello) -> None:
        peer = Peer(theirs.node, theirs.role, theirs.nonce)
        conversation.peer = peer
        conversation.greeting = None
        self._end_greeting(conversation)
        self._counters["connections_made" if conversation.line else "connections_accepted"] += 1
        if conversation.line is not None:
            conversation.line.established()
        if theirs.cluster:
            self._bury_former_lives(peer)
        self._peers.setdefault(peer, set()).add(link)
        link.establish(Channel(theirs.channel))
        if self._bulk_paused and link.channel is Channel.BULK and conversation.line is None:
            link.pause_reading()
        self.on_up(peer)

    def _bury_former_lives(self, peer: Peer) -> None:
        """A process that greets with a new nonce has died since: its old connections can't be alive."""
        for other in list(self._peers):
            if other.node == peer.node and other.role == peer.role and other.nonce != peer.nonce:
                self._lose(other, "the peer has started again")

    def _refuse(self, link: Link, error: HandshakeError) -> None:
        self._counters[f"refused_{error.reason}"] += 1
        if self._conversations[link].line is None:
            log.warning("connection refused: %s", error)
            if error.reason in ("cluster", "version") and not link.closing:
                link.send_at_once(FrameKind.REFUSED, str(error).encode()[:1024])
            link.close(str(error))
        else:
            log.warning("connection to %s: %s", self._conversations[link].line, error)
            link.abort(str(error))

    def link_lost(self, link: Link, error: Exception | None) -> None:
        """(Called by a link.) The connection ended, by whomever."""
        if error is not None:
            link.close_reason = link.close_reason or str(error)
        conversation = self._conversations.get(link)
        peer = conversation.peer if conversation else None
        self._forget(link)
        if peer is not None and link in self._peers.get(peer, ()):
            self._lose(peer, link.close_reason)

    def _lose(self, peer: Peer, reason: str) -> None:
        """Give up every connection with `peer`, and say so once."""
        self._counters["peers_lost"] += 1
        links = self._peers.pop(peer)
        for link in links:
            link.abort(reason)
        if not self._closed:
            log.info("lost node %s role %d: %s", peer.node, peer.role, reason)
            self.on_lost(peer)

    def _forget(self, link: Link) -> None:
        conversation = self._conversations.pop(link, None)
        if conversation is None:
            return
        if conversation.line is not None:
            conversation.line.ended(link, failed=conversation.peer is None)
        self._end_greeting(conversation)
        self._calls.link_lost(link)

    def _end_greeting(self, conversation: _Conversation) -> None:
        if conversation.timer is not None:
            conversation.timer.cancel()
            conversation.timer = None
            self._strangers -= 1
        if not conversation.opened.done():
            conversation.opened.set_result(None)

    # ---- time

    def _tick(self) -> None:
        """Ping over the control connections we made, and give up peers that have been silent on theirs or ours."""
        now = self._loop.time()
        interval_s = self.limits.ping_interval_ms / 1000
        # After a long turn of this loop the peers' bytes still lie in the sockets: silence is ours, not theirs.
        late = now - self._next_tick > interval_s / 2
        self._next_tick = now + interval_s
        self._ticker = self._loop.call_at(self._next_tick, self._tick)
        for link, conversation in list(self._conversations.items()):
            if link.channel is not Channel.CONTROL or conversation.peer is None or link.closing:
                continue
            conversation.silent_pings = 0 if link.heard or late else conversation.silent_pings + 1
            link.heard = False
            if conversation.silent_pings >= self.limits.silent_pings:
                self._counters["silent"] += 1
                self._lose(conversation.peer, f"silent for {conversation.silent_pings} pings")
            elif conversation.line is not None:
                link.send(FrameKind.PING, (_PING.pack(now),), _PING.size)

    # ---- the end, and figures

    async def close(self, *, timeout: float = 1.0) -> None:
        """Stop accepting, send what is queued (at most `timeout` seconds), end all connections. No news of it."""
        self._closed = True
        self._ticker.cancel()
        for server in self._servers:
            server.close()
        await self._calls.close()
        connecting = [line.connecting for lines in self._lines.values() for line in lines.values()]
        for task in connecting:
            if task is not None:
                task.cancel()
        for link in list(self._conversations):
            link.close("this process is closing")
        deadline = self._loop.time() + timeout
        while self._conversations and self._loop.time() < deadline:
            await asyncio.sleep(0.005)
        for link in list(self._conversations):
            link.abort("this process is closing")
            self._forget(link)

    def statistics(self) -> dict[str, int]:
        """Counters since the start, and what stands and waits now."""
        links = list(self._conversations)
        established = [link for link in links if link.established]
        return {
            **self._counters,
            "peers": len(self._peers),
            "strangers": self._strangers,
            "connections_control": sum(link.channel is Channel.CONTROL for link in established),
            "connections_bulk": sum(link.channel is Channel.BULK for link in established),
            "connections_call": sum(link.channel is Channel.CALL for link in established),
            "queued_bytes": sum(link.queued_bytes for link in links),
            "calls_waiting": self._calls.waiting,
            "calls_working": self._calls.working,
            "calls_answered": self._calls.answered,
            "calls_failed": self._calls.failed,
        }


async def _refuse_call(peer: Peer, method: str, payload: bytes) -> bytes:
    raise RemoteError("unknown_method", f"{method}: this process answers no calls")


def _same_user(transport: asyncio.Transport) -> bool:
    """Whether a Unix socket's other end is a process of our user; TCP peers show the secret instead."""
    sock = transport.get_extra_info("socket")
    if sock.family != socket.AF_UNIX:
        return True
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _pid, uid, _gid = _PEER_CREDENTIALS.unpack(packed)
    return bool(uid == os.getuid())
