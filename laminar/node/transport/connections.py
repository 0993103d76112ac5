"""The connections of one transport: dialled, accepted, authenticated, watched for silence, lost.

It knows the peer at the other end of each link and reports when a peer is connected (`on_up`) and when it is
gone (`on_lost`: once for a peer, whatever the number of its links; when one link is lost the others are
closed too, as they lead to the same process). What frames mean after the handshake is the business of
`laminar.node.transport.transport`, which gets them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import socket
import ssl
import struct
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from laminar.node.host.certificates import Certificates, is_of_certificate, node_names, reason_of
from laminar.node.host.log_rate_limit import LimitedLog
from laminar.node.secret.keyring import Keyring
from laminar.node.transport.dialer import Address, Dialer, TcpAddress, UnixAddress
from laminar.node.transport.frame_check import FrameMac
from laminar.node.transport.handshake import (
    Acceptor,
    Channel,
    FrameKeys,
    HandshakeError,
    Hello,
    Initiator,
    decode_hello,
)
from laminar.node.transport.link import SHARED_BUFFER_BYTES, FrameKind, Link
from laminar.node.transport.peer_user import user_at_other_end

log = logging.getLogger("laminar.transport")

_PEER_CREDENTIALS = struct.Struct("3i")
_PING = struct.Struct("<d")


class ProtocolError(Exception):
    """The peer broke the protocol: raised by a handler; the connection is closed and the error counted."""


class Peer(NamedTuple):
    """One incarnation of a process of the cluster; the nonce changes when the process starts again.

    `history` (the boot history of its data folder) and `store_id` (the folder's id) are what it sent in the
    handshake; an older program sends no id.
    """

    node: str
    role: int
    nonce: bytes
    history: bytes = b""
    store_id: bytes = b""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a transport: bytes in its queues, times, numbers of connections."""

    control_queue_bytes: int = 8 << 20
    bulk_queue_bytes: int = 64 << 20
    call_queue_bytes: int = 128 << 20
    connect_timeout_ms: int = 3000
    """From the first packet to the end of the handshake."""
    ping_interval_ms: int = 1000
    silent_pings: int = 5
    """Pings in a row without a byte from the peer, after which it counts as gone."""
    unauthenticated: int = 256
    """Accepted connections whose handshake is not finished; more are dropped. With TLS, as many again
    whose handshake of TLS is not finished.
    """


@dataclass(slots=True)
class _LinkState:
    """The state of one link: who opened it, how far the handshake is, and the peer at the other end."""

    handshake: Initiator | Acceptor | None
    dialer: Dialer | None
    """The dialer of a connection we made; None for an accepted one."""
    opened: asyncio.Future[None]
    """Done when the handshake is finished or the link is gone."""
    timer: asyncio.TimerHandle | None = None
    certified: frozenset[str] | None = None
    """The nodes that the peer's certificate names; None without TLS."""
    refused: bool = False
    """Whether we refused the peer."""
    greeted: bool = False
    """Whether our reply, with our proof, was sent to the process that connected."""
    peer: Peer | None = None
    silent_pings: int = 0
    round_trip_s: float = 0.0


class ConnectionsOwner(Protocol):
    """The transport as its connections use it: it gives the hello to send, and receives frames and events."""

    node: str
    on_up: Callable[[Peer], None]
    """Called when a connection with a peer is established."""
    on_lost: Callable[[Peer | Address], None]
    """Called once when a peer is gone, and when a connect is refused."""
    on_outdated: Callable[[str], None]
    """Called when a peer has shown that the cluster goes on without this node."""

    def hello(self, channel: Channel) -> Hello:
        """Return our handshake message, with a fresh challenge."""

    def enabled(self) -> int:
        """Return the code version that the cluster has enabled, as far as is known here."""

    def take_frame(self, link: Link, peer: Peer, dialled: bool, kind: int, payload: memoryview) -> None:
        """Process a frame that came after the handshake, other than a ping.

        Raises:
            ProtocolError: it breaks the protocol; the connection ends.
        """

    def link_gone(self, link: Link) -> None:
        """Fail the calls that wait for answers over this link, which has ended."""


class Connections:
    """All connections (links) of a transport, and the dialers that open them when frames are to be sent."""

    def __init__(
        self,
        owner: ConnectionsOwner,
        *,
        secrets: Keyring,
        certificates: Certificates | None,
        limits: Limits,
        rng: random.Random,
        loop: asyncio.AbstractEventLoop,
        counters: Counter[str],
    ) -> None:
        self._owner = owner
        self._certificates = certificates
        self._secrets = secrets
        self._limits = limits
        self._rng = rng
        self._loop = loop
        self._counters = counters
        self._log = LimitedLog(log, now_s=loop.time)
        self._shared = memoryview(bytearray(SHARED_BUFFER_BYTES))
        self._dialers: dict[Channel, dict[Address, Dialer]] = {channel: {} for channel in Channel}
        self._states: dict[Link, _LinkState] = {}
        self._peers: dict[Peer, set[Link]] = {}
        self._none_left = asyncio.Event()
        self._unauthenticated = 0
        self._bulk_paused = False
        self._closed = False
        self._next_tick = self._loop.time() + self._limits.ping_interval_ms / 1000
        self._ticker = self._loop.call_at(self._next_tick, self._tick)

    @property
    def links(self) -> list[Link]:
        """Every link, established or not."""
        return list(self._states)

    @property
    def peers(self) -> list[Peer]:
        """Every peer with at least one established link."""
        return list(self._peers)

    @property
    def unauthenticated(self) -> int:
        """Number of accepted connections whose handshake is not finished."""
        return self._unauthenticated

    def dialer(self, address: Address, channel: Channel) -> Dialer:
        """Return the dialer of an address and channel; it is created by the first call."""
        dialers = self._dialers[channel]
        dialer = dialers.get(address)
        if dialer is None:
            dialer = dialers[address] = Dialer(
                address, channel, loop=self._loop, rng=self._rng, make_link=self._dial, connect=self._connect
            )
        return dialer

    def accept(self) -> Link:
        """Return a protocol for a connection that a server is about to accept."""
        limit = self._limits.call_queue_bytes
        link = Link(self, self._loop, self._shared, channel=None, queue_limit_bytes=limit)
        handshake = Acceptor(
            self._owner.hello(Channel.CALL), self._secrets.current, enabled=self._owner.enabled()
        )
        self._states[link] = _LinkState(handshake, None, self._loop.create_future())
        return link

    def tls_failed(self, link: Link, error: BaseException) -> None:
        """Forget an accepted connection whose handshake of TLS failed."""
        reason = "certificate" if is_of_certificate(error) else "tls"
        self._counters[f"refused_{reason}"] += 1
        self._log.warning(reason, "connection refused: TLS: %s", reason_of(error))
        self._forget(link)

    def pause_bulk(self, paused: bool) -> None:
        """Stop or resume reading from every accepted BULK connection, also from those to come."""
        self._bulk_paused = paused
        for link, state in self._states.items():
            if link.channel is Channel.BULK and link.established and state.dialer is None:
                if paused:
                    link.pause_reading()
                else:
                    link.resume_reading()

    def round_trips_s(self) -> dict[Peer, float]:
        """Return, by peer, the round trip of the last ping in seconds; only peers that answered one."""
        return {
            state.peer: state.round_trip_s
            for state in self._states.values()
            if state.peer is not None and state.round_trip_s
        }

    async def close(self, *, timeout: float) -> None:
        """Send what is queued, at most `timeout` seconds, and close every connection, without `on_lost`."""
        self._closed = True
        self._ticker.cancel()
        for dialers in self._dialers.values():
            for dialer in dialers.values():
                if dialer.connecting is not None:
                    dialer.connecting.cancel()
        for link in self.links:
            link.close("this process is closing")
            if link.transport is None:
                self._forget(link)
        if self._states:
            try:
                await asyncio.wait_for(self._none_left.wait(), timeout)
            except TimeoutError:
                log.info("%d connections did not take what was queued for them", len(self._states))
        for link in self.links:
            link.abort("this process is closing")
            self._forget(link)

    # ---- connections

    def _dial(self, dialer: Dialer) -> Link:
        limit = {
            Channel.CONTROL: self._limits.control_queue_bytes,
            Channel.BULK: self._limits.bulk_queue_bytes,
            Channel.CALL: self._limits.call_queue_bytes,
        }[dialer.channel]
        link = Link(self, self._loop, self._shared, channel=dialer.channel, queue_limit_bytes=limit)
        handshake = Initiator(
            self._owner.hello(dialer.channel), self._secrets.current, enabled=self._owner.enabled()
        )
        self._states[link] = _LinkState(handshake, dialer, self._loop.create_future())
        return link

    async def _connect(self, dialer: Dialer, link: Link) -> None:
        """Connect `link` and wait for the end of the handshake; a failure is handled here."""
        opened = self._states[link].opened
        address = dialer.address
        try:
            async with asyncio.timeout(self._limits.connect_timeout_ms / 1000):
                if isinstance(address, TcpAddress):
                    await self._connect_tcp(link, address)
                else:
                    await self._connect_unix(link, address)
                await opened
        except TimeoutError:
            # Silence is not reported as a loss: the process may be starting, or busy. If it is dead, the
            # election timeout covers that.
            self._fail_to_connect(link, f"no handshake from {address} in time")
        except OSError as error:
            if isinstance(error, ssl.SSLError):
                reason = "certificate" if is_of_certificate(error) else "tls"
                self._counters[f"refused_{reason}"] += 1
                self._log.warning(reason, "connection to %s: TLS: %s", dialer.place, reason_of(error))
            self._fail_to_connect(link, f"{address}: {error}")
            if isinstance(error, ConnectionError):
                self._owner.on_lost(address)

    async def _connect_tcp(self, link: Link, address: TcpAddress) -> None:
        if self._certificates is None:
            await self._loop.create_connection(lambda: link, address.host, address.port)
            return
        timeout_s = self._limits.connect_timeout_ms / 1000
        await self._loop.create_connection(
            lambda: link,
            address.host,
            address.port,
            ssl=self._certificates.current.connect,
            server_hostname=address.host,
            ssl_handshake_timeout=timeout_s,
            ssl_shutdown_timeout=timeout_s,
        )

    async def _connect_unix(self, link: Link, address: UnixAddress) -> None:
        # uvloop takes a path as a C string, which the zero byte before an abstract name would end. So we
        # connect a socket ourselves, and hand it over.
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
        """Start the handshake, or wait for the peer to start it. Called by a link."""
        state = self._states[link]
        assert link.transport is not None
        if link.transport.get_extra_info("sslcontext") is not None:
            state.certified = node_names(link.transport.get_extra_info("peercert"))
        if not _same_user(link.transport):
            self._refuse(link, HandshakeError("user", "the process at the other end is another user's"))
        elif state.certified is not None and not state.certified:
            self._refuse(
                link, HandshakeError("certificate", "the certificate at the other end names no node")
            )
        elif isinstance(state.handshake, Initiator):
            link.send_at_once(FrameKind.HELLO, state.handshake.hello)
        elif not self._is_ours(link.transport):
            self._refuse(link, HandshakeError("user", "the process at the other end is another user's"))
        elif self._unauthenticated >= self._limits.unauthenticated:
            self._refuse(
                link,
                HandshakeError("unauthenticated", f"{self._unauthenticated} connections have not greeted"),
            )
        else:
            self._unauthenticated += 1
            wait_s = self._limits.connect_timeout_ms / 1000
            late = HandshakeError("late", "no handshake in time")
            state.timer = self._loop.call_later(wait_s, self._refuse, link, late)

    def _is_ours(self, transport: asyncio.Transport) -> bool:
        """Return whether the process that connected may be one of our cluster.

        With a secret it has to prove that later, in the handshake. Without one, all nodes of the cluster are
        on this machine and of our user, so a process of another user is refused; if the kernel does not tell
        the user, the process is accepted.
        """
        sock = transport.get_extra_info("socket")
        if self._secrets or sock.family == socket.AF_UNIX:
            return True
        return user_at_other_end(sock) in (os.getuid(), None)

    def link_frame(self, link: Link, kind: int, payload: memoryview) -> None:
        """Process a whole frame. Called by a link."""
        state = self._states.get(link)
        if state is None or link.closing:
            return
        try:
            if state.peer is None:
                self._take_handshake_frame(link, state, kind, payload)
            elif kind == FrameKind.PING and state.dialer is None:
                link.send(FrameKind.PONG, (payload,), len(payload))
            elif kind == FrameKind.PONG and state.dialer is not None and len(payload) == _PING.size:
                state.round_trip_s = self._loop.time() - _PING.unpack(payload)[0]
            else:
                self._owner.take_frame(link, state.peer, state.dialer is not None, kind, payload)
        except HandshakeError as error:
            self._refuse(link, error)
        except ProtocolError as error:
            self._counters["protocol_errors"] += 1
            link.abort(f"protocol error: {error}")
            self._log.warning("protocol", "connection with %s ended: %s", state.peer, error)

    def _take_handshake_frame(self, link: Link, state: _LinkState, kind: int, payload: memoryview) -> None:
        handshake = state.handshake
        if isinstance(handshake, Initiator) and kind == FrameKind.REPLY:
            proof, theirs = handshake.take_reply(payload)
            _check_certificate(state, theirs)
            link.send_at_once(FrameKind.PROOF, proof)
            self._establish(link, state, theirs, handshake.frame_keys)
        elif isinstance(handshake, Initiator) and kind == FrameKind.REFUSED:
            raise HandshakeError("refused", f"refused by the peer: {bytes(payload).decode(errors='replace')}")
        elif isinstance(handshake, Acceptor) and kind == FrameKind.HELLO:
            theirs = decode_hello(payload)
            _check_certificate(state, theirs)
            self._refuse_own_name(link, theirs)
            link.send_at_once(FrameKind.REPLY, handshake.take_hello(theirs, sent=payload))
            state.greeted = True
        elif isinstance(handshake, Acceptor) and kind == FrameKind.PROOF:
            theirs = handshake.take_proof(payload)
            self._establish(link, state, theirs, handshake.frame_keys)
        else:
            raise HandshakeError("malformed", f"frame of kind {kind} within the handshake")

    def _refuse_own_name(self, link: Link, theirs: Hello) -> None:
        """Refuse a process that uses this node's name over TCP: its own processes use the Unix socket."""
        assert link.transport is not None
        over_tcp = link.transport.get_extra_info("socket").family != socket.AF_UNIX
        if over_tcp and theirs.node == self._owner.node and theirs.channel != Channel.CALL:
            raise HandshakeError("node", f"a process of another machine or user calls itself {theirs.node!r}")

    def _establish(self, link: Link, state: _LinkState, theirs: Hello, keys: FrameKeys | None) -> None:
        peer = self._of_same_life(
            Peer(theirs.node, theirs.role, theirs.nonce, theirs.history, theirs.store_id)
        )
        state.peer = peer
        state.handshake = None
        self._end_handshake(state)
        self._counters["connections_made" if state.dialer else "connections_accepted"] += 1
        if state.dialer is not None:
            state.dialer.established()
        if theirs.cluster:
            self._drop_stale_incarnations(peer)
        self._peers.setdefault(peer, set()).add(link)
        link.establish(Channel(theirs.channel), **self._checks(link, state, keys))
        if self._bulk_paused and link.channel is Channel.BULK and state.dialer is None:
            link.pause_reading()
        self._owner.on_up(peer)

    def _of_same_life(self, peer: Peer) -> Peer:
        """Return the `Peer` object that its other links have, if there are any, else `peer`.

        One object for all links spares `peer_admission` comparing the boot history for each frame.
        """
        for link in self._peers.get(peer, ()):
            state = self._states.get(link)
            if state is not None and state.peer is not None:
                return state.peer
        return peer

    def _checks(self, link: Link, state: _LinkState, keys: FrameKeys | None) -> dict[str, FrameMac]:
        """Return the MACs of a connection's frames, for `Link.establish`; none if checksums suffice.

        They do under TLS, which has its own MACs, and within one node, where the kernel carries the frames.
        """
        assert link.transport is not None
        over_tcp = link.transport.get_extra_info("socket").family != socket.AF_UNIX
        if keys is None or state.certified is not None or not over_tcp:
            return {}
        self._counters["connections_sealed"] += 1
        if state.dialer is not None:
            return {"sent": FrameMac(keys.from_initiator), "received": FrameMac(keys.from_acceptor)}
        return {"sent": FrameMac(keys.from_acceptor), "received": FrameMac(keys.from_initiator)}

    def _drop_stale_incarnations(self, peer: Peer) -> None:
        """Close the connections of earlier incarnations: a process with a new nonce has died since."""
        for other in list(self._peers):
            if other.node == peer.node and other.role == peer.role and other.nonce != peer.nonce:
                self._lose(other, "the peer has started again")

    def _refuse(self, link: Link, error: HandshakeError) -> None:
        self._counters[f"refused_{error.reason}"] += 1
        if error.outdated:
            self._owner.on_outdated(str(error))
        self._states[link].greeted = False
        self._states[link].refused = True
        dialer = self._states[link].dialer
        if dialer is None:
            self._log.warning(error.reason, "connection refused: %s", error)
            if error.reason in ("cluster", "version") and not link.closing:
                link.send_at_once(FrameKind.REFUSED, str(error).encode()[:1024])
            link.close(str(error))
        else:
            self._log.warning(error.reason, "connection to %s: %s", dialer.place, error)
            if error.reason == "secret":
                dialer.back_off()
            link.abort(str(error))

    def link_lost(self, link: Link, error: Exception | None) -> None:
        """Clean up after a connection that ended on either side. Called by a link."""
        if error is not None:
            link.close_reason = link.close_reason or str(error)
        state = self._states.get(link)
        peer = state.peer if state else None
        if state is not None and peer is None and state.dialer and state.certified and not state.refused:
            # With TLS 1.3 the peer verifies our certificate after our side of the handshake is over.
            self._counters["refused_by_peer"] += 1
            self._log.warning(
                "peer", "%s ended the connection: it may refuse our certificate", state.dialer.place
            )
        if state is not None and state.greeted and peer is None and self._secrets:
            self._counters["refused_secret"] += 1
            self._log.warning(
                "secret",
                "a process that connected left when it saw our proof: it may have another secret than ours",
            )
        if link.forged:
            self._counters["frames_forged"] += 1
            self._log.warning("forged", "a connection with %s ends: %s", peer, link.close_reason)
        self._forget(link)
        if peer is not None and link in self._peers.get(peer, ()):
            self._lose(peer, link.close_reason)

    def _lose(self, peer: Peer, reason: str) -> None:
        """Close every connection with `peer`, and report that once."""
        self._counters["peers_lost"] += 1
        links = self._peers.pop(peer)
        for link in links:
            link.abort(reason)
        if not self._closed:
            who = "controller" if peer.role == 0 else f"shard {peer.role - 1}"
            log.info("lost the %s of node %s: %s", who, peer.node, reason)
            self._owner.on_lost(peer)

    def _forget(self, link: Link) -> None:
        state = self._states.pop(link, None)
        if state is None:
            return
        self._end_handshake(state)
        if state.dialer is not None:
            state.dialer.ended(link, failed=state.peer is None)
            if state.dialer.channel is Channel.CALL:  # and not the channel that the peer has named
                self._owner.link_gone(link)
        if not self._states and self._closed:
            self._none_left.set()

    def _end_handshake(self, state: _LinkState) -> None:
        if state.timer is not None:
            state.timer.cancel()
            state.timer = None
            self._unauthenticated -= 1
        if not state.opened.done():
            state.opened.set_result(None)

    # ---- time

    def _tick(self) -> None:
        """Ping over the control connections we made, and close those of peers that are silent."""
        now = self._loop.time()
        interval_s = self._limits.ping_interval_ms / 1000
        # After a long turn of this loop the peers' bytes still lie in the sockets: then a link on which
        # nothing was received does not count as silent.
        late = now - self._next_tick > interval_s / 2
        self._next_tick = now + interval_s
        self._ticker = self._loop.call_at(self._next_tick, self._tick)
        for link, state in list(self._states.items()):
            if link.channel is not Channel.CONTROL or state.peer is None or link.closing:
                continue
            state.silent_pings = 0 if link.received or late else state.silent_pings + 1
            link.received = False
            if state.silent_pings >= self._limits.silent_pings:
                self._counters["silent"] += 1
                self._lose(state.peer, f"silent for {state.silent_pings} pings")
            elif state.dialer is not None:
                link.send(FrameKind.PING, (_PING.pack(now),), _PING.size)


def _check_certificate(state: _LinkState, theirs: Hello) -> None:
    """Refuse a peer whose certificate does not name the node that it says it is."""
    if state.certified is not None and theirs.node not in state.certified:
        names = ", ".join(sorted(state.certified)) or "no node"
        raise HandshakeError("certificate", f"node {theirs.node!r} showed a certificate that names {names}")


def _same_user(transport: asyncio.Transport) -> bool:
    """Return whether a Unix socket's other end is our user's process; True for TCP, see `_is_ours`."""
    sock = transport.get_extra_info("socket")
    if sock.family != socket.AF_UNIX:
        return True
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    _pid, uid, _gid = _PEER_CREDENTIALS.unpack(packed)
    return bool(uid == os.getuid())
