"""Messages between the processes of a cluster: framed TCP between nodes, abstract Unix sockets within one.

A `Transport` belongs to one event loop. It sends frames (which may be dropped: Raft sends again), carries
calls and their answers, and reports connections that ended or were refused. Failover is quick because of
these reports, so they come at once, and once per incarnation of a peer: after `on_lost(peer)` nothing more is
reported of that peer until a connection with it is established again (`on_up`).

Connections have a direction: frames and calls go from the process that connected to the one that accepted,
answers come back. There is one per address and channel: CONTROL is small, bounded and never paused; BULK
obeys flow control on both sides; so an acknowledgement never waits for appends that the other side is too
busy to take. Control connections ping, because a peer that lost its power closes nothing.

What frames mean, and which process has which address, is not known here.
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

import msgspec

from laminar.node.host.certificates import Certificates
from laminar.node.host.tls_listener import TlsListener
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.connections import Connections, Limits, Peer, ProtocolError
from laminar.node.transport.dialer import Address, TcpAddress, UnixAddress
from laminar.node.transport.frame_check import Buffer
from laminar.node.transport.handshake import CHALLENGE_SIZE, PROTOCOL_VERSION, Channel, Hello
from laminar.node.transport.link import MAX_FRAME_BYTES, FrameKind, Link
from laminar.node.transport.rpc import Calls, CallTimeout, PeerLost, RemoteError, TransportError

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

log = logging.getLogger("laminar.transport")

BACKLOG = 1024


class Transport:
    """Sends frames to other processes of the cluster, and calls their methods; receives theirs.

    Set the callbacks (`on_...`) before serving or sending.

    `cluster_id` is called at each handshake, so a joining node may learn its cluster while it runs. With
    `certificates` all TCP connections speak TLS, and each side shows a certificate that names its node.
    With `secrets` and without TLS each frame over TCP has a MAC, made with a key of its connection.
    """

    def __init__(
        self,
        *,
        cluster_id: Callable[[], bytes | None],
        node: str,
        role: int,
        nonce: bytes,
        secrets: Keyring,
        certificates: Certificates | None = None,
        history: bytes = b"",
        store_id: bytes = b"",
        epoch: Callable[[], bytes] = lambda: b"",
        code_version: int = 1,
        enabled: Callable[[], int] = lambda: 0,
        limits: Limits | None = None,
        rng: random.Random | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.node = node
        self.role = role
        self.nonce = nonce
        self.history = history
        self.store_id = store_id
        self.limits = limits or Limits()
        self.on_frame: Callable[[Peer, Channel, memoryview], None] = lambda peer, channel, payload: None
        self.on_call: Callable[[Peer, str, bytes], Awaitable[bytes]] = _refuse_call
        self.on_lost: Callable[[Peer | Address], None] = lambda whom: None
        self.on_up: Callable[[Peer], None] = lambda peer: None
        self.on_outdated: Callable[[str], None] = lambda text: None
        self._cluster_id = cluster_id
        self._epoch = epoch
        self._code_version = code_version
        self._enabled = enabled
        self._loop = loop or asyncio.get_running_loop()
        self._calls = Calls(self._loop)
        self._counters: Counter[str] = Counter()
        self._certificates = certificates
        self._servers: list[asyncio.Server | TlsListener[Link]] = []
        self._closed = False
        self._connections = Connections(
            self,
            secrets=secrets,
            certificates=certificates,
            limits=self.limits,
            rng=rng or random.Random(),
            loop=self._loop,
            counters=self._counters,
        )

    def __repr__(self) -> str:
        return f"<Transport {self.node}/{self.role} {len(self._connections.peers)} peers>"

    # ---- serving

    async def serve_tcp(self, sock: socket.socket) -> None:
        """Accept connections on a bound (perhaps already listening) TCP socket, which stays the caller's."""
        # The loop closes a server's socket together with the server. It gets a duplicate, so that the
        # caller's stays open, and the order of sockets that the supervisor made stays as it is.
        duplicate = sock.dup()
        duplicate.setblocking(False)
        accept = self._connections.accept
        if self._certificates is None:
            self._servers.append(await self._loop.create_server(accept, sock=duplicate, backlog=BACKLOG))
            return
        certificates, timeout_s = self._certificates, self.limits.connect_timeout_ms / 1000
        duplicate.listen(BACKLOG)
        listener = TlsListener(
            duplicate,
            make=accept,
            failed=self._connections.tls_failed,
            context=lambda: certificates.current.accept,
            most=self.limits.unauthenticated,
            handshake_s=timeout_s,
            shutdown_s=timeout_s,
            loop=self._loop,
        )
        self._servers.append(listener)

    async def serve_unix(self, name: str) -> None:
        """Accept connections on the abstract Unix socket `name`, from processes of our own user only."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind("\0" + name)
            sock.setblocking(False)
            accept = self._connections.accept
            self._servers.append(await self._loop.create_unix_server(accept, sock=sock, backlog=BACKLOG))
        except BaseException:
            sock.close()
            raise

    # ---- sending

    def send(
        self, address: Address, channel: Channel, parts: Sequence[Buffer], *, at_once: bool = False
    ) -> bool:
        """Queue one frame made of `parts` (kept, not copied; don't change them), connecting if need be.

        It leaves at the end of this turn of the loop, together with others, or `at_once`.
        Returns False if it is dropped, because the queue is full or the address failed a moment ago. True
        does not promise delivery.
        """
        size = 0
        for part in parts:
            size += len(part)
        link = None if self._closed else self._connections.dialer(address, channel).open_link()
        if link is not None and size > link.largest:
            self._counters["frames_too_large"] += 1
            log.error(
                "a message of %d bytes for %s is not sent: the limit is %d", size, address, link.largest
            )
            return False
        if link is None or not link.has_room(size):
            self._counters["frames_dropped"] += 1
            return False
        link.send(FrameKind.DATA, parts, size, at_once=at_once)
        return True

    async def call(self, address: Address, method: str, payload: bytes, *, timeout: float) -> bytes:
        """Call `method` of the process at `address` and return its answer.

        Waits at most `timeout` seconds, connecting included.

        Raises:
            TransportError: one of `RemoteError`, `CallTimeout` and `PeerLost`.
        """
        if self._closed:
            raise PeerLost("this transport is closed", sent=False)
        link = self._connections.dialer(address, Channel.CALL).open_link()
        if link is None:
            raise PeerLost(f"{address} could not be reached a moment ago", sent=False)
        if len(payload) + len(method) + 64 > link.largest:
            detail = f"{len(payload)} bytes for {method}, at most {link.largest}"
            raise RemoteError("too_large", detail)
        if not link.has_room(len(payload) + len(method) + 64):
            raise PeerLost(f"too many bytes of calls wait for {address}", sent=False)
        return await self._calls.call(link, method, payload, timeout=timeout)

    def pause_bulk(self) -> None:
        """Stop reading from every BULK connection (see `receive_budget`). CONTROL goes on."""
        self._connections.pause_bulk(True)

    def resume_bulk(self) -> None:
        """Resume reading from BULK connections."""
        self._connections.pause_bulk(False)

    def queued_bytes(self, address: Address, channel: Channel) -> int:
        """Return the bytes that wait to be sent to `address`; 0 without a connection."""
        link = self._connections.dialer(address, channel).link
        return 0 if link is None else link.queued_bytes

    # ---- what the connections tell

    def hello(self, channel: Channel) -> Hello:
        """Return our handshake message, with a fresh challenge. Called by the connections."""
        return Hello(
            version=PROTOCOL_VERSION,
            cluster=self._cluster_id() or b"",
            node=self.node,
            role=self.role,
            nonce=self.nonce,
            channel=channel,
            challenge=os.urandom(CHALLENGE_SIZE),
            history=self.history,
            epoch=self._epoch(),
            code_version=self._code_version,
            store_id=self.store_id,
        )

    def enabled(self) -> int:
        """Return the code version that the cluster has enabled, if known here. Called by the connections."""
        return self._enabled()

    def take_frame(self, link: Link, peer: Peer, dialled: bool, kind: int, payload: memoryview) -> None:
        """Process a frame that came after the handshake. Called by the connections."""
        if kind == FrameKind.DATA and not dialled:
            assert link.channel is not None
            self._counters["frames_received"] += 1
            self.on_frame(peer, link.channel, payload)
            return
        try:
            if kind == FrameKind.CALL and not dialled and link.channel is Channel.CALL:
                on_call = self.on_call
                self._calls.take_call(link, payload, lambda method, body: on_call(peer, method, body))
            elif kind in (FrameKind.ANSWER, FrameKind.FAILURE) and dialled:
                self._calls.take_answer(kind, payload)
            else:
                raise ProtocolError(f"frame of kind {kind} out of place")
        except (struct.error, UnicodeDecodeError, msgspec.MsgspecError) as error:
            raise ProtocolError(f"frame of kind {kind} can't be read: {error}") from error

    def link_gone(self, link: Link) -> None:
        """Fail the calls that wait for answers over this link. Called by the connections."""
        self._calls.link_lost(link)

    # ---- the end, and figures

    async def close(self, *, timeout: float = 1.0) -> None:
        """Stop accepting, send what is queued (at most `timeout` seconds), close all connections.

        `on_lost` is not called for them.
        """
        self._closed = True
        for server in self._servers:
            server.close()
        await self._calls.close()
        await self._connections.close(timeout=timeout)

    def round_trips_s(self) -> dict[Peer, float]:
        """Return the last ping's round trip in seconds, by peer."""
        return self._connections.round_trips_s()

    @property
    def calls_in_progress(self) -> int:
        """The number of other processes' calls that are not answered yet."""
        return self._calls.working

    def statistics(self) -> dict[str, int]:
        """Return counters since the start, and the present numbers of connections and queued bytes."""
        links = self._connections.links
        established = Counter(link.channel for link in links if link.established)
        return {
            **self._counters,
            "peers": len(self._connections.peers),
            "unauthenticated": self._connections.unauthenticated,
            "connections_control": established[Channel.CONTROL],
            "connections_bulk": established[Channel.BULK],
            "connections_call": established[Channel.CALL],
            "queued_bytes": sum(link.queued_bytes for link in links),
            "calls_waiting": self._calls.waiting,
            "calls_working": self._calls.working,
            "calls_answered": self._calls.answered,
            "calls_failed": self._calls.failed,
        }


async def _refuse_call(peer: Peer, method: str, payload: bytes) -> bytes:
    raise RemoteError("unknown_method", f"{method}: this process answers no calls")
