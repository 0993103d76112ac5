"""Every socket that a node listens on, bound once by the supervisor and kept until it ends.

All shards listen on one shared port (`SO_REUSEPORT`), and a program on it, which needs no privilege
(`laminar.node.runtime.reuseport`), chooses the shard: for TCP `(source port >> 1) mod shards`, read from the
packet itself. So a client that knows the rule picks its shard by the port it binds, and others are spread
evenly. It is not `port mod shards`, because Linux's `connect` gives out even ports only. UDP on the same port
goes to the shard that owns the datagram's partition. The program's answer is a position in the kernel's list
of that port's sockets. They are listed in the order in which they began to listen (UDP: were bound), and when
one is closed, the last takes its position. Hence they begin to listen in shard order, and are kept while
children come and go. If the program's answer is no position in the list, the kernel itself chooses a socket.

Each shard also has a port of its own, and each process a port for its peers. What is spoken on these ports is
not known here.

Ports of peers listen from the start, as Raft needs them. Those of HTTP are held: bound, so that no other
program can have them, but refusing connections until the node can answer (`laminar.node.shard.http_ports`).
The kernel would accept connections for a node that recovers its logs, and their requests would wait for it; a
client that is refused asks another node at once.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
from collections.abc import Collection
from dataclasses import dataclass

import msgspec

from laminar.node.runtime.boot import Addresses, ChildSockets, Role, role_number
from laminar.node.runtime.reuseport import choose_by_partition, choose_by_source_port

log = logging.getLogger("laminar.sockets")

PEER_PORT_STEP = 100
BACKLOG = 1024
DATAGRAM_BUFFER_BYTES = 4 << 20
"""The requested size; the kernel gives no more than `net.core.rmem_max`."""
_TRIES = 8


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """The ports of a node, stored in its data folder if the system chose them; 0 is a port not chosen yet."""

    shared: int
    own: tuple[int, ...]
    peers: tuple[int, ...]
    gossip: int


def plan_ports(port: int, shards: int, kept: Ports | None) -> Ports:
    """Return the ports to bind: counted from `port`, or for 0 the `kept` ones, with 0 for all others."""
    assert shards >= 1, f"{shards} shards"
    if port:
        return Ports(
            shared=port,
            own=tuple(port + 1 + shard for shard in range(shards)),
            peers=tuple(port + PEER_PORT_STEP + role for role in range(shards + 1)),
            gossip=port + PEER_PORT_STEP,
        )
    kept = kept or Ports(shared=0, own=(), peers=(), gossip=0)
    own = kept.own[:shards]
    peers = kept.peers[: shards + 1]
    return Ports(
        shared=kept.shared,
        own=own + (0,) * (shards - len(own)),
        peers=peers + (0,) * (shards + 1 - len(peers)),
        gossip=kept.gossip,
    )


@dataclass(slots=True)
class NodeSockets:
    """The sockets that `open_sockets` opened. Only the supervisor holds all; a child keeps its own."""

    shared: list[socket.socket]
    """TCP on the shared port, a socket for each shard. Held until `listen_on_shared_port`."""
    datagrams: list[socket.socket]
    """UDP on the shared port's number, a socket for each shard."""
    own: list[socket.socket]
    """A port for each shard. Held until the shard calls `begin_to_listen`."""
    peers: list[socket.socket]
    gossip: socket.socket

    @property
    def ports(self) -> Ports:
        """The ports that were bound."""
        return Ports(
            shared=_port(self.shared[0]),
            own=tuple(_port(sock) for sock in self.own),
            peers=tuple(_port(sock) for sock in self.peers),
            gossip=_port(self.gossip),
        )

    def addresses(self, host: str, *, gossip: str = "") -> Addresses:
        """Return the node's addresses: its ports, and `host`, the name for other nodes and clients.

        `gossip` is the numeric address that gossip is sent to; if it is empty, it is determined here.

        Raises:
            OSError: no address is known at which others reach the gossip socket; its text says why.
        """
        ports = self.ports
        return Addresses(
            host=host,
            gossip_host=gossip or gossip_host(self.gossip, host),
            http_port=ports.shared,
            shard_http_ports=ports.own,
            peer_ports=ports.peers,
            gossip_port=ports.gossip,
        )

    def listen_on_shared_port(self, *, given_up: Collection[Role] = ()) -> None:
        """Begin to listen on the shared port's sockets, in shard order, without those of shards `given_up`.

        Raises:
            OSError: another program has taken the port.
        """
        for sock in self.shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # all, before the first listens
        for shard, sock in enumerate(self.shared):
            if shard not in given_up:
                begin_to_listen(sock)

    def stop_listening(self, role: Role) -> None:
        """Refuse connections to a child that is not started again; its ports stay bound.

        On the shared port the other shards get them. If its socket went on listening, the kernel
        would accept connections that are never answered.
        """
        kept = self.for_child(role)
        for sock in (kept.http_shared, kept.http_own, kept.peer):
            if sock is not None and listens(sock):
                sock.shutdown(socket.SHUT_RD)

    def for_child(self, role: Role) -> ChildSockets:
        """Return the sockets that a child needs."""
        peer = self.peers[role_number(role)]
        if isinstance(role, str):
            return ChildSockets(http_shared=None, http_own=None, peer=peer, gossip=self.gossip)
        return ChildSockets(
            http_shared=self.shared[role],
            http_own=self.own[role],
            peer=peer,
            gossip=None,
            datagrams=self.datagrams[role],
        )

    def close_all_but(self, kept: ChildSockets) -> None:
        """In a child after the fork, close the sockets that are for other children.

        The supervisor's copies are not affected.
        """
        keep = {kept.http_shared, kept.http_own, kept.peer, kept.gossip, kept.datagrams}
        for sock in self._all():
            if sock not in keep:
                sock.close()

    def close(self) -> None:
        """Close every socket, because the node ends."""
        for sock in self._all():
            sock.close()

    def _all(self) -> list[socket.socket]:
        return [*self.shared, *self.datagrams, *self.own, *self.peers, self.gossip]


def open_sockets(host: str, ports: Ports) -> NodeSockets:
    """Bind the sockets of a node; listen on those for peers, and hold those for HTTP.

    A port of the last start may have been taken since, by any outgoing connection; a caller that can do with
    other ports uses `open_kept_sockets`.

    Raises:
        OSError: a requested port is taken; its text names host and port.
    """
    family, bind_host = _resolve(host)
    with contextlib.ExitStack() as opened:

        def hold(port: int, *, shared: bool = False) -> socket.socket:
            if port == 0:
                # Bound by its number, as `shutdown` gives back a port that `bind` has chosen. As long as
                # neither listens, both sockets may have it.
                with _bind(family, socket.SOCK_STREAM, bind_host, 0) as chosen:
                    return hold(_port(chosen), shared=shared)
            sock = opened.enter_context(_bind(family, socket.SOCK_STREAM, bind_host, port, shared=shared))
            _hold(sock)
            return sock

        def listen(port: int) -> socket.socket:
            sock = opened.enter_context(_bind(family, socket.SOCK_STREAM, bind_host, port))
            sock.listen(BACKLOG)
            return sock

        # The shared port last: by SO_REUSEPORT two nodes of one user could both bind it without an error, so
        # the other ports have to show first that the second node is one too many.
        own = [hold(port) for port in ports.own]
        peers = [listen(port) for port in ports.peers]
        gossip = opened.enter_context(_bind(family, socket.SOCK_DGRAM, bind_host, ports.gossip))
        shared = [hold(ports.shared, shared=True)]
        port = _port(shared[0])
        while len(shared) < len(ports.own):
            shared.append(hold(port, shared=True))
        # Before it listens, so that the program chooses for the first connection too.
        choose_by_source_port(shared[0], len(shared))
        datagrams: list[socket.socket] = []
        while len(datagrams) < len(shared):
            sock = opened.enter_context(_bind(family, socket.SOCK_DGRAM, bind_host, port, shared=True))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, DATAGRAM_BUFFER_BYTES)
            datagrams.append(sock)
        choose_by_partition(datagrams[0], len(datagrams))
        opened.pop_all()
    return NodeSockets(shared=shared, datagrams=datagrams, own=own, peers=peers, gossip=gossip)


def _hold(sock: socket.socket) -> None:
    """Keep a bound port from all other programs although it does not listen.

    Of programs that set SO_REUSEADDR, the kernel lets several bind a port as long as none listens, and the
    first that listens wins. So the option must be set for our `bind`, because connections of the last start
    may linger, and cleared before another program binds. The kernel heeds the change only on a port that has
    listened once.
    """
    try:
        sock.listen(0)
        sock.shutdown(socket.SHUT_RD)  # ends the listening only: the port stays bound
    except OSError as error:
        raise _cannot_bind(sock.getsockname(), error) from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)


def begin_to_listen(sock: socket.socket) -> None:
    """Listen on a held socket.

    Raises:
        OSError: another program has taken the port.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _cannot_bind(sock.getsockname(), error) from error


def listens(sock: socket.socket) -> bool:
    """Return whether a socket listens."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def open_kept_sockets(host: str, shards: int, kept: Ports | None) -> NodeSockets:
    """Open the sockets for `port` 0: on the kept ports if they are all free, else on any."""
    if kept is None:
        return _open_any(host, shards)
    try:
        return open_sockets(host, plan_ports(0, shards, kept))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        log.warning("a port of the last start is taken (%s): choosing new ones", error)
        return _open_any(host, shards)


def _open_any(host: str, shards: int) -> NodeSockets:
    """Open the sockets on any free ports.

    The system chooses the shared port among those free for TCP. If the same number is taken for UDP, all is
    tried again with other ports, up to `_TRIES` times in all.
    """
    for _ in range(_TRIES - 1):
        try:
            return open_sockets(host, plan_ports(0, shards, None))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    return open_sockets(host, plan_ports(0, shards, None))


def gossip_host(sock: socket.socket, host: str) -> str:
    """Return the numeric address at which the other nodes reach a gossip socket.

    `host` is the node's host as other nodes are given it. If it is numeric it is returned; if it is a name,
    the address that the socket is bound to, because the name may still lead to an earlier address of this
    node. The name is looked up only if the socket is bound to all addresses.

    Raises:
        OSError: the name has no address, or one of the loopback.
    """
    bound = str(sock.getsockname()[0])
    if _is_numeric(host) or not ipaddress.ip_address(bound).is_unspecified:
        return host if _is_numeric(host) else bound
    advice = "set gossip_host, or let host be one address of this machine"
    try:
        found = socket.getaddrinfo(host, None, family=sock.family, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise OSError(f"advertise_host {host} has no address: {error}; {advice}") from error
    address = str(found[0][4][0])
    if ipaddress.ip_address(address).is_loopback:
        raise OSError(f"advertise_host {host} is {address} here, where no other machine finds it: {advice}")
    return address


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, _, _, _, address = found[0]
    return family, str(address[0])


def _bind(
    family: socket.AddressFamily, kind: socket.SocketKind, host: str, port: int, *, shared: bool = False
) -> socket.socket:
    sock = socket.socket(family, kind)
    try:
        if kind is socket.SOCK_STREAM:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise _cannot_bind((host, port), error) from error
    return sock


def _cannot_bind(address: tuple[str, int], error: OSError) -> OSError:
    return OSError(error.errno, f"can't bind {address[0]} port {address[1]}: {error.strerror}")


def _port(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])
