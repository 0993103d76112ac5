"""The connections of one transport: made, accepted, greeted, watched for silence, lost.

It knows who is at the other end of each link and says when a peer is there (`on_up`) and when it is gone
(`on_lost`: once for a peer, however many links it had; one lost link takes the others along, for they lead
to the same process). What frames mean after the greeting is `laminar.node.transport.transport`'s, to which
they are handed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import struct
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from laminar.node.host.log_rate_limit import LimitedLog
from laminar.node.transport.dialer import Address, Line, TcpAddress, UnixAddress
from laminar.node.transport.handshake import Acceptor, Channel, HandshakeError, Hello, Initiator, decode_hello
from laminar.node.transport.link import SHARED_BUFFER_BYTES, FrameKind, Link
from laminar.node.transport.peer_user import user_at_other_end

log = logging.getLogger("laminar.transport")

_PEER_CREDENTIALS = struct.Struct("3i")
_PING = struct.Struct("<d")


class ProtocolError(Exception):
    """A handler found that the peer broke the protocol: its connection ends, and that is counted."""


class Peer(NamedTuple):
    """One life of a process of the cluster; the nonce changes when it starts again.

    `chain` is what it showed of its data folder's past when it greeted.
    """

    node: str
    role: int
    nonce: bytes
    chain: bytes = b""


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
    greeted: bool = False
    """Who connected was sent our greeting, with our proof."""
    peer: Peer | None = None
    silent_pings: int = 0
    round_trip_s: float = 0.0


class ConnectionsOwner(Protocol):
    """Who the connections belong to."""

    node: str

    def hello(self, channel: Channel) -> Hello:
        """Our greeting, with a fresh challenge."""

    def take_frame(self, link: Link, peer: Peer, dialled: bool, kind: int, payload: memoryview) -> None:
        """A frame came after the greeting; `ProtocolError` ends the connection. Pings don't come here."""

    def outdated(self, text: str) -> None:
        """A peer has shown that the cluster goes on without this node."""

    def peer_up(self, peer: Peer) -> None: ...
    def peer_lost(self, whom: Peer | Address) -> None: ...
    def link_gone(self, link: Link) -> None:
        """No answer will come over this link any more."""


class Connections:
    """Every link of a transport, in and out, and the lines that connect on demand."""

    def __init__(
        self,
        owner: ConnectionsOwner,
        *,
        secret: bytes | None,
        limits: Limits,
        rng: random.Random,
        loop: asyncio.AbstractEventLoop,
        counters: Counter[str],
    ) -> None:
        self._owner = owner
        self._secret = secret
        self._limits = limits
        self._rng = rng
        self._loop = loop
        self._counters = counters
        self._log = LimitedLog(log, now_s=loop.time)
        self._shared = memoryview(bytearray(SHARED_BUFFER_BYTES))
        self._lines: dict[Channel, dict[Address, Line]] = {channel: {} for channel in Channel}
        self._conversations: dict[Link, _Conversation] = {}
        self._peers: dict[Peer, set[Link]] = {}
        self._none_left = asyncio.Event()
        self._strangers = 0
        self._bulk_paused = False
        self._closed = False
        self._next_tick = self._loop.time() + self._limits.ping_interval_ms / 1000
        self._ticker = self._loop.call_at(self._next_tick, self._tick)

    @property
    def links(self) -> list[Link]:
        """Every link, established or not."""
        return list(self._conversations)

    @property
    def peers(self) -> list[Peer]:
        """Every peer with at least one established link."""
        return list(self._peers)

    @property
    def strangers(self) -> int:
        """Accepted connections whose greeting is not over."""
        return self._strangers

    def line(self, address: Address, channel: Channel) -> Line:
        """The way to an address; made at its first use."""
        lines = self._lines[channel]
        line = lines.get(address)
        if line is None:
            line = lines[address] = Line(
                address, channel, loop=self._loop, rng=self._rng, make_link=self._dial, connect=self._connect
            )
        return line

    def accept(self) -> Link:
        """A protocol for a connection that a server is about to accept."""
        limit = self._limits.call_queue_bytes
        link = Link(self, self._loop, self._shared, channel=None, queue_limit_bytes=limit)
        greeting = Acceptor(self._owner.hello(Channel.CALL), self._secret)
        self._conversations[link] = _Conversation(greeting, None, self._loop.create_future())
        return link

    def pause_bulk(self, paused: bool) -> None:
        """Stop, or go on, reading from every accepted BULK connection, also from those to come."""
        self._bulk_paused = paused
        for link, conversation in self._conversations.items():
            if link.channel is Channel.BULK and link.established and conversation.line is None:
                if paused:
                    link.pause_reading()
                else:
                    link.resume_reading()

    def round_trips_s(self) -> dict[Peer, float]:
        """The last ping's round trip by peer, where we have pinged one."""
        return {
            conversation.peer: conversation.round_trip_s
            for conversation in self._conversations.values()
            if conversation.peer is not None and conversation.round_trip_s
        }

    async def close(self, *, timeout: float) -> None:
        """Send what is queued, at most `timeout` seconds, and end every connection. No news of it."""
        self._closed = True
        self._ticker.cancel()
        for lines in self._lines.values():
            for line in lines.values():
                if line.connecting is not None:
                    line.connecting.cancel()
        for link in self.links:
            link.close("this process is closing")
            if link.transport is None:
                self._forget(link)
        if self._conversations:
            try:
                await asyncio.wait_for(self._none_left.wait(), timeout)
            except TimeoutError:
                log.info("%d connections did not take what was queued for them", len(self._conversations))
        for link in self.links:
            link.abort("this process is closing")
            self._forget(link)

    # ---- connections

    def _dial(self, line: Line) -> Link:
        limit = {
            Channel.CONTROL: self._limits.control_queue_bytes,
            Channel.BULK: self._limits.bulk_queue_bytes,
            Channel.CALL: self._limits.call_queue_bytes,
        }[line.channel]
        link = Link(self, self._loop, self._shared, channel=line.channel, queue_limit_bytes=limit)
        greeting = Initiator(self._owner.hello(line.channel), self._secret)
        self._conversations[link] = _Conversation(greeting, line, self._loop.create_future())
        return link

    async def _connect(self, line: Line, link: Link) -> None:
        """Connect `link` and wait for the end of the greeting; a failure is dealt with here."""
        opened = self._conversations[link].opened
        address = line.address
        try:
            async with asyncio.timeout(self._limits.connect_timeout_ms / 1000):
                if isinstance(address, TcpAddress):
                    await self._loop.create_connection(lambda: link, address.host, address.port)
                else:
                    await self._connect_unix(link, address)
                await opened
        except TimeoutError:
            # Silence is no news: the process may be starting, or busy. The election timeout is there for it.
            self._fail_to_connect(link, f"no greeting from {address} in time")
        except OSError as error:
            self._fail_to_connect(link, f"{address}: {error}")
            if isinstance(error, ConnectionError):
                self._owner.peer_lost(address)

    async def _connect_unix(self, link: Link, address: UnixAddress) -> None:
        # uvloop takes a path as a C string, which an abstract name's first byte would end: our own socket.
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            await self._loop.sock_connect(sock, "\0" + address.name)
            await self._loop.create_unix_connection(lambda: link, sock=sock)
        except BaseException:
            sock.close()
            raise

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
        elif not self._is_ours(link.transport):
            self._refuse(link, HandshakeError("user", "the process at the other end is another user's"))
        elif self._strangers >= self._limits.strangers:
            self._refuse(link, HandshakeError("strangers", f"{self._strangers} connections have not greeted"))
        else:
            self._strangers += 1
            wait_s = self._limits.connect_timeout_ms / 1000
            late = HandshakeError("late", "no greeting in time")
            conversation.timer = self._loop.call_later(wait_s, self._refuse, link, late)

    def _is_ours(self, transport: asyncio.Transport) -> bool:
        """Whether who connected may be a node of ours. With a secret it has to show that; without one all
        nodes are on this machine, and a process of another user's is none.
        """
        sock = transport.get_extra_info("socket")
        if self._secret is not None or sock.family == socket.AF_UNIX:
            return True
        return user_at_other_end(sock) in (os.getuid(), None)

    def link_frame(self, link: Link, kind: int, payload: memoryview) -> None:
        """(Called by a link.) A whole frame came."""
        conversation = self._conversations.get(link)
        if conversation is None or link.closing:
            return
        try:
            if conversation.peer is None:
                self._greet(link, conversation, kind, payload)
            elif kind == FrameKind.PING and conversation.line is None:
                link.send(FrameKind.PONG, (payload,), len(payload))
            elif kind == FrameKind.PONG and conversation.line is not None and len(payload) == _PING.size:
                conversation.round_trip_s = self._loop.time() - _PING.unpack(payload)[0]
            else:
                self._owner.take_frame(link, conversation.peer, conversation.line is not None, kind, payload)
        except HandshakeError as error:
            self._refuse(link, error)
        except ProtocolError as error:
            self._counters["protocol_errors"] += 1
            link.abort(f"protocol error: {error}")
            self._log.warning("protocol", "connection with %s ended: %s", conversation.peer, error)

    def _greet(self, link: Link, conversation: _Conversation, kind: int, payload: memoryview) -> None:
        greeting = conversation.greeting
        if isinstance(greeting, Initiator) and kind == FrameKind.REPLY:
            proof, theirs = greeting.take_reply(payload)
            link.send_at_once(FrameKind.PROOF, proof)
            self._establish(link, conversation, theirs)
        elif isinstance(greeting, Initiator) and kind == FrameKind.REFUSED:
            raise HandshakeError("refused", f"refused by the peer: {bytes(payload).decode(errors='replace')}")
        elif isinstance(greeting, Acceptor) and kind == FrameKind.HELLO:
            self._refuse_own_name(link, payload)
            link.send_at_once(FrameKind.REPLY, greeting.take_hello(payload))
            conversation.greeted = True
        elif isinstance(greeting, Acceptor) and kind == FrameKind.PROOF:
            self._establish(link, conversation, greeting.take_proof(payload))
        else:
            raise HandshakeError("malformed", f"frame of kind {kind} within the greeting")

    def _refuse_own_name(self, link: Link, payload: memoryview) -> None:
        """The processes of this node come by the Unix socket: who uses its name over TCP is no part of it."""
        assert link.transport is not None
        theirs = decode_hello(payload)
        over_tcp = link.transport.get_extra_info("socket").family != socket.AF_UNIX
        if over_tcp and theirs.node == self._owner.node and theirs.channel != Channel.CALL:
            raise HandshakeError("node", f"a process of another machine or user calls itself {theirs.node!r}")

    def _establish(self, link: Link, conversation: _Conversation, theirs: Hello) -> None:
        peer = Peer(theirs.node, theirs.role, theirs.nonce, theirs.chain)
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
        self._owner.peer_up(peer)

    def _bury_former_lives(self, peer: Peer) -> None:
        """A process that greets with a new nonce has died since: its old connections can't be alive."""
        for other in list(self._peers):
            if other.node == peer.node and other.role == peer.role and other.nonce != peer.nonce:
                self._lose(other, "the peer has started again")

    def _refuse(self, link: Link, error: HandshakeError) -> None:
        self._counters[f"refused_{error.reason}"] += 1
        if error.outdated:
            self._owner.outdated(str(error))
        self._conversations[link].greeted = False
        line = self._conversations[link].line
        if line is None:
            self._log.warning(error.reason, "connection refused: %s", error)
            if error.reason in ("cluster", "version") and not link.closing:
                link.send_at_once(FrameKind.REFUSED, str(error).encode()[:1024])
            link.close(str(error))
        else:
            self._log.warning(error.reason, "connection to %s: %s", line.place, error)
            if error.reason == "secret":
                line.rest()
            link.abort(str(error))

    def link_lost(self, link: Link, error: Exception | None) -> None:
        """(Called by a link.) The connection ended, by whomever."""
        if error is not None:
            link.close_reason = link.close_reason or str(error)
        conversation = self._conversations.get(link)
        peer = conversation.peer if conversation else None
        if conversation is not None and conversation.greeted and peer is None and self._secret is not None:
            self._counters["refused_secret"] += 1
            self._log.warning(
                "secret",
                "a process that connected left when it saw our proof: it may have another secret than ours",
            )
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
            who = "controller" if peer.role == 0 else f"shard {peer.role - 1}"
            log.info("lost the %s of node %s: %s", who, peer.node, reason)
            self._owner.peer_lost(peer)

    def _forget(self, link: Link) -> None:
        conversation = self._conversations.pop(link, None)
        if conversation is None:
            return
        if conversation.line is not None:
            conversation.line.ended(link, failed=conversation.peer is None)
        self._end_greeting(conversation)
        self._owner.link_gone(link)
        if not self._conversations and self._closed:
            self._none_left.set()

    def _end_greeting(self, conversation: _Conversation) -> None:
        if conversation.timer is not None:
            conversation.timer.cancel()
            conversation.timer = None
            self._strangers -= 1
        if not conversation.opened.done():
            conversation.opened.set_result(None)

    # ---- time

    def _tick(self) -> None:
        """Ping over the control connections we made, and give up peers that have been silent on theirs or
        ours.
        """
        now = self._loop.time()
        interval_s = self._limits.ping_interval_ms / 1000
        # After a long turn of this loop the peers' bytes still lie in the sockets: silence is ours, not
        # theirs.
        late = now - self._next_tick > interval_s / 2
        self._next_tick = now + interval_s
        self._ticker = self._loop.call_at(self._next_tick, self._tick)
        for link, conversation in list(self._conversations.items()):
            if link.channel is not Channel.CONTROL or conversation.peer is None or link.closing:
                continue
            conversation.silent_pings = 0 if link.heard or late else conversation.silent_pings + 1
            link.heard = False
            if conversation.silent_pings >= self._limits.silent_pings:
                self._counters["silent"] += 1
                self._lose(conversation.peer, f"silent for {conversation.silent_pings} pings")
            elif conversation.line is not None:
                link.send(FrameKind.PING, (_PING.pack(now),), _PING.size)


def _same_user(transport: asyncio.Transport) -> bool:
    """Whether a Unix socket's other end is a process of our user; TCP peers show the secret instead."""
    sock = transport.get_extra_info("socket")
    if sock.family != socket.AF_UNIX:
        return True
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _pid, uid, _gid = _PEER_CREDENTIALS.unpack(packed)
    return bool(uid == os.getuid())
