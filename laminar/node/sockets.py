"""Every listening socket of a node, opened once by the supervisor and kept until it ends.

All shards listen on one shared port (`SO_REUSEPORT`), and a classic-BPF program on it, which needs no
privilege, chooses the shard: `(source port >> 1) mod shards`, read from the packet itself. So a client that
knows the rule picks its shard by the port it binds, and others are spread evenly. Not `port mod shards`:
Linux's `connect` hands out even ports only. The program's answer is a place in the kernel's list of that
port's sockets, which is the order in which they began to listen; closing one moves the last into its slot.
Hence they are opened in shard order, and kept while children come and go.

Each shard has a port of its own too, and each process one for its peers. What is spoken on them is not
known here.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import socket
import struct
from dataclasses import dataclass

import msgspec

from laminar.node.boot import Addresses, ChildSockets, Role, role_number

log = logging.getLogger("laminar.sockets")

PEER_PORT_STEP = 100
BACKLOG = 1024
_SO_ATTACH_REUSEPORT_CBPF = 51  # linux/socket.h; Python's socket module does not name it
_SKF_NET_OFF = 0x1_0000_0000 - 0x100000  # linux/filter.h: loads relative to the network header, as u32
_IPV6_HEADER_SIZE = 40


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """The ports of a node; kept in its data folder when the system chose them. 0: not chosen yet."""

    shared: int
    own: tuple[int, ...]
    peers: tuple[int, ...]
    gossip: int


def plan_ports(port: int, shards: int, kept: Ports | None) -> Ports:
    """Which ports to bind: fixed ones by the rule; for `port` 0 those kept from the last start, 0 where
    none is.
    """
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
    """What `open_sockets` opened. Only the supervisor holds it whole; a child keeps its own part."""

    shared: list[socket.socket]
    own: list[socket.socket]
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

    def addresses(self, host: str) -> Addresses:
        """The ports together with the host that others are told."""
        ports = self.ports
        return Addresses(
            host=host,
            http_port=ports.shared,
            shard_http_ports=ports.own,
            peer_ports=ports.peers,
            gossip_port=ports.gossip,
        )

    def for_child(self, role: Role) -> ChildSockets:
        """The sockets that a child works with."""
        peer = self.peers[role_number(role)]
        if isinstance(role, str):
            return ChildSockets(http_shared=None, http_own=None, peer=peer, gossip=self.gossip)
        return ChildSockets(http_shared=self.shared[role], http_own=self.own[role], peer=peer, gossip=None)

    def close_all_but(self, kept: ChildSockets) -> None:
        """In a child, after the fork: close what is its siblings'. The supervisor's copies stay as they
        are.
        """
        keep = {kept.http_shared, kept.http_own, kept.peer, kept.gossip}
        for sock in (*self.shared, *self.own, *self.peers, self.gossip):
            if sock not in keep:
                sock.close()

    def close(self) -> None:
        """Close everything: the node ends."""
        for sock in (*self.shared, *self.own, *self.peers, self.gossip):
            sock.close()


def open_sockets(host: str, ports: Ports) -> NodeSockets:
    """Bind and listen. `OSError` (its text names host and port) when a port that was asked for is taken.

    A kept port may have been taken since, by any outgoing connection; callers that don't insist on it use
    `open_kept_sockets`.
    """
    family, bind_host = _resolve(host)
    with contextlib.ExitStack() as opened:

        def listen(port: int, *, shared: bool = False) -> socket.socket:
            sock = opened.enter_context(_bind(family, socket.SOCK_STREAM, bind_host, port, shared=shared))
            sock.listen(BACKLOG)
            return sock

        # The shared port last: two nodes of one user may share it without an error, the others they may not.
        own = [listen(port) for port in ports.own]
        peers = [listen(port) for port in ports.peers]
        gossip = opened.enter_context(_bind(family, socket.SOCK_DGRAM, bind_host, ports.gossip))
        shared = [listen(ports.shared, shared=True)]
        while len(shared) < len(ports.own):
            shared.append(listen(_port(shared[0]), shared=True))
        choose_by_source_port(shared[0], len(shared))
        opened.pop_all()
    return NodeSockets(shared=shared, own=own, peers=peers, gossip=gossip)


def open_kept_sockets(host: str, shards: int, kept: Ports | None) -> NodeSockets:
    """For `port` 0: the kept ports if they are all free, else any."""
    try:
        return open_sockets(host, plan_ports(0, shards, kept))
    except OSError as error:
        if kept is None or error.errno != errno.EADDRINUSE:
            raise
        log.warning("a port of the last start is taken (%s): choosing new ones", error)
        return open_sockets(host, plan_ports(0, shards, None))


def choose_by_source_port(sock: socket.socket, shards: int) -> None:
    """Have the kernel give a connection to the listening socket number `(source port >> 1) mod shards` of
    the group.
    """
    program = reuseport_program(shards)
    filters = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, and a pointer to them.
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(filters))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, header)


def reuseport_program(shards: int) -> bytes:
    """The classic-BPF program, as `struct sock_filter`s of 8 bytes.

    It sees the packet from the TCP header's end on, so everything is read relative to the network header.
    """
    load_byte, load_half_at_x = 0x30, 0x48  # BPF_LD|BPF_B|BPF_ABS, BPF_LD|BPF_H|BPF_IND
    set_x, copy_to_x = 0x01, 0x07  # BPF_LDX|BPF_IMM, BPF_MISC|BPF_TAX
    and_, shift_left, shift_right, modulo = 0x54, 0x64, 0x74, 0x94
    if_equal, go_on, answer = 0x15, 0x05, 0x16
    code = [
        (load_byte, 0, 0, _SKF_NET_OFF),
        (shift_right, 0, 0, 4),
        (if_equal, 5, 0, 6),  # version 6: to the line that sets X
        (load_byte, 0, 0, _SKF_NET_OFF),
        (and_, 0, 0, 0x0F),  # IPv4 header length in words: with options it is more than 5
        (shift_left, 0, 0, 2),
        (copy_to_x, 0, 0, 0),
        (go_on, 0, 0, 1),
        (set_x, 0, 0, _IPV6_HEADER_SIZE),
        (load_half_at_x, 0, 0, _SKF_NET_OFF),  # the TCP source port
        (shift_right, 0, 0, 1),
        (modulo, 0, 0, shards),
        (answer, 0, 0, 0),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in code)


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
        raise OSError(error.errno, f"can't bind {host} port {port}: {error.strerror}") from error
    return sock


def _port(sock: socket.socket) -> int:
    return int(sock.getsockname()[1])
