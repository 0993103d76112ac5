"""Real connections and datagrams: each reaches the socket of its shard, worked on by that shard's CPU.

The sockets are a node's own (`laminar.node.runtime.listeners`), so the programs on them are there too. Which
CPU worked on a connection is what the kernel says of it (SO_INCOMING_CPU); a datagram that another CPU than
the shard's works on is thrown away by a filter on the socket, and then missing.
"""

from __future__ import annotations

import ctypes
import os
import random
import select
import shutil
import socket
import struct
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from ebpf import kernel
from ebpf.interfaces import interfaces_of
from ebpf.layout import CONTROLLER_ROW, Passed, Rule
from ebpf.loader import Membership, join
from ebpf.shared import Shared
from laminar.node.runtime.listeners import NodeSockets, begin_to_listen, open_sockets, plan_ports
from laminar.node.runtime.steering import plan_of
from router import owner_shard, partition_hash, shard_of_source_port
from tests.ebpf.conftest import Network
from tests.ebpf.packets import append

CONNECTIONS = 2_500
"""On each address: 10,000 over the tests of this file."""
DATAGRAMS = 25_000
"""On each address: 100,000 in all."""
PARTITIONS = 64
BURST = 64
PATIENCE_S = 60.0
PORT = 7070
_SO_INCOMING_CPU = 49
_SO_ATTACH_FILTER = 26
_ABORT = struct.pack("ii", 1, 0)  # SO_LINGER: a reset at the end, so that no port stays taken


@dataclass(frozen=True)
class Steered:
    """A node's sockets, steered: by shard the CPU."""

    host: str
    sockets: NodeSockets
    cpus: Sequence[int]
    membership: Membership

    @property
    def shards(self) -> int:
        return len(self.cpus)


@contextmanager
def steered(host: str, shards: int, *, modes: Sequence[int] | None = None) -> Iterator[Steered]:
    """A node without processes on this address; its shards take the CPUs in turn, the controller CPU 0."""
    usable = sorted(os.sched_getaffinity(0))
    cpus = [usable[shard % len(usable)] for shard in range(shards)]
    sockets = open_sockets(host, plan_ports(PORT, shards, None))
    sockets.listen_on_shared_port()
    for sock in sockets.own:
        begin_to_listen(sock)
    membership = join(interfaces_of(host)[0], plan_of(sockets, cpus, usable[0]), pid=os.getpid(), modes=modes)
    try:
        yield Steered(host, sockets, cpus, membership)
    finally:
        membership.leave()
        sockets.close()


def counts(node: Steered) -> dict[tuple[int, Rule], int]:
    """Packets that the program has steered, by row and rule."""
    shared = Shared.open(node.membership.folder)
    try:
        return {key: sum(both) for key, both in shared.counts(node.membership.slot).items()}
    finally:
        shared.close()


def passed(node: Steered, reason: Passed) -> int:
    """Packets on the node's interface that passed untouched for this reason."""
    shared = Shared.open(node.membership.folder)
    try:
        return shared.passed_counts()[reason]
    finally:
        shared.close()


def connect_and_look(node: Steered, listener: socket.socket, source: int, client: Network) -> tuple[int, int]:
    """One connection from this port (0: any): its source port, and the CPU that worked on its packets.

    It must arrive at this listener.
    """
    with client.inside():
        sock = socket.socket(listener.family)
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
        sock.settimeout(PATIENCE_S)
        if source:
            sock.bind(("", source))
        sock.connect((node.host, listener.getsockname()[1]))
        port = sock.getsockname()[1]
        if not source:  # any port: only now is known which shard it is for
            listener = node.sockets.shared[shard_of_source_port(port, node.shards)]
        assert select.select([listener], [], [], PATIENCE_S)[0], f"source port {port} is at another socket"
        accepted, _ = listener.accept()
        with accepted:
            sock.sendall(b"x")
            accepted.settimeout(PATIENCE_S)
            assert b"x" == accepted.recv(1)
            return port, accepted.getsockopt(socket.SOL_SOCKET, _SO_INCOMING_CPU)


def every_connection_is_at_home(node: Steered, client: Network, *, seed: int) -> None:
    """Connections from any port, from chosen ones, and to the shards' own ports."""
    rng = random.Random(seed)
    before = counts(node)
    wrong: list[tuple[int, int, int]] = []
    for number in range(CONNECTIONS):
        kind = number % 3
        if kind == 0:
            port, cpu = connect_and_look(node, node.sockets.shared[0], 0, client)
            shard = shard_of_source_port(port, node.shards)
        elif kind == 1:
            source = rng.randrange(10_000, 30_000)
            shard = shard_of_source_port(source, node.shards)
            port, cpu = connect_and_look(node, node.sockets.shared[shard], source, client)
        else:
            shard = rng.randrange(node.shards)
            port, cpu = connect_and_look(node, node.sockets.own[shard], rng.randrange(30_000, 32_000), client)
        if cpu != node.cpus[shard]:
            wrong.append((port, shard, cpu))

    assert [] == wrong
    after = counts(node)
    for shard in range(node.shards):
        for rule in (Rule.SHARED_TCP, Rule.OWN_TCP):
            assert after[shard, rule] > before.get((shard, rule), 0)


def only_on_cpu(sock: socket.socket, cpu: int) -> None:
    """Throw away every datagram for this socket that another CPU works on."""
    cpu_number = 0x1_0000_0000 - 0x1000 + 36  # SKF_AD_OFF + SKF_AD_CPU
    code = b"".join(
        struct.pack("=HBBI", *line)
        for line in ((0x20, 0, 0, cpu_number), (0x15, 0, 1, cpu), (0x06, 0, 0, 0xFFFF), (0x06, 0, 0, 0))
    )
    held = ctypes.create_string_buffer(code, len(code))
    sock.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HP", len(code) // 8, ctypes.addressof(held))
    )


def every_datagram_is_at_home(node: Steered, client: Network) -> None:
    """Appends to 64 partitions: as many as were sent arrive at each shard's socket, on its CPU, counted."""
    hashes = [partition_hash("flights", number) for number in range(PARTITIONS)]
    owners = [owner_shard(key, node.shards) for key in hashes]
    for shard, sock in enumerate(node.sockets.datagrams):
        only_on_cpu(sock, node.cpus[shard])
    before = counts(node)
    sent: Counter[int] = Counter()
    arrived: Counter[int] = Counter()
    with client.inside():
        sender = socket.socket(node.sockets.datagrams[0].family, socket.SOCK_DGRAM)
    with sender:
        sender.connect((node.host, PORT))
        for start in range(0, DATAGRAMS, BURST):
            for number in range(start, min(start + BURST, DATAGRAMS)):
                sender.send(append(hashes[number % PARTITIONS], b"rest"))
                sent[owners[number % PARTITIONS]] += 1
            while arrived.total() < sent.total():
                ready, _, _ = select.select(node.sockets.datagrams, [], [], PATIENCE_S)
                assert ready, f"sent {sent}, arrived {arrived}"
                for sock in ready:
                    sock.recv(2048)
                    arrived[node.sockets.datagrams.index(sock)] += 1

    assert sent == arrived
    after = counts(node)
    assert sent == {
        shard: after[shard, Rule.APPEND_UDP] - before.get((shard, Rule.APPEND_UDP), 0) for shard in sent
    }


def gossip_and_strangers(node: Steered, client: Network) -> None:
    """Gossip is counted for the controller, what goes to other ports for nobody; all of it arrives."""
    family = node.sockets.gossip.family
    before, strange_before = counts(node), passed(node, Passed.NOT_OURS)
    with client.inside():
        sender = socket.socket(family, socket.SOCK_DGRAM)
    stranger = socket.socket(family, socket.SOCK_DGRAM)
    with sender, stranger:
        stranger.bind((node.host, 0))
        stranger.settimeout(PATIENCE_S)
        node.sockets.gossip.settimeout(PATIENCE_S)
        for _ in range(100):
            for receiver in (node.sockets.gossip, stranger):
                sender.sendto(b"hello", (node.host, receiver.getsockname()[1]))
                assert b"hello" == receiver.recv(10)

    row = CONTROLLER_ROW, Rule.GOSSIP_UDP
    assert 100 == counts(node)[row] - before.get(row, 0)
    assert 100 == passed(node, Passed.NOT_OURS) - strange_before


def test_three_nodes_on_the_loopback(new_network: Callable[[], Network], compiled_once: None) -> None:
    """Two on IPv4 addresses and one on IPv6, with 2, 3 and 8 shards, share one generic program."""
    network = new_network()
    with network.inside(), ExitStack() as opened:
        nodes = [
            opened.enter_context(steered(host, shards))
            for host, shards in (("127.0.0.1", 2), ("127.0.0.2", 3), ("::1", 8))
        ]
        assert ["generic"] * 3 == [node.membership.mode for node in nodes]
        assert 1 == len({node.membership.folder for node in nodes})

        for node in (nodes[0], nodes[2]):
            every_connection_is_at_home(node, network, seed=node.shards)
            every_datagram_is_at_home(node, network)
        for node in nodes:
            gossip_and_strangers(node, network)


@dataclass(frozen=True)
class Wire:
    """Two networks joined by a veth pair."""

    server: Network
    client: Network


HOSTS = "10.77.0.1", "fd77::1"


@pytest.fixture
def wire(new_network: Callable[[], Network], compiled_once: None) -> Wire:
    server, client = new_network(), new_network()
    server.ip(f"link add wire0 type veth peer name wire1 netns {client.path}")
    for network, device, number in ((server, "wire0", 1), (client, "wire1", 2)):
        network.ip(f"address add 10.77.0.{number}/24 dev {device}")
        network.ip(f"address add fd77::{number}/64 dev {device} nodad")
        network.ip(f"link set {device} up")
    return Wire(server, client)


def test_natively_between_two_networks(wire: Wire) -> None:
    """In the driver of a veth, with the transmit checksums off at the peer: see `modes_of`."""
    if shutil.which("ethtool") is None:
        pytest.skip("there is no ethtool (Debian: apt-get install ethtool)")
    with wire.client.inside():
        subprocess.run(["ethtool", "-K", "wire1", "tx", "off"], check=True, capture_output=True, timeout=30)
    with wire.server.inside():
        for host, shards in zip(HOSTS, (2, 3), strict=True):
            with steered(host, shards, modes=(kernel.XDP_DRIVER_MODE,)) as node:
                assert "native" == node.membership.mode
                every_connection_is_at_home(node, wire.client, seed=shards)
                every_datagram_is_at_home(node, wire.client)
                gossip_and_strangers(node, wire.client)


def test_a_veth_is_steered_generically_unless_told_otherwise(wire: Wire) -> None:
    """Its peer leaves checksums to be filled in, as peers do: nothing is lost."""
    with wire.server.inside(), steered(HOSTS[0], 2) as node:
        assert "generic" == node.membership.mode
        for number in range(200):
            source = 20_000 + number
            shard = shard_of_source_port(source, 2)
            _, cpu = connect_and_look(node, node.sockets.shared[shard], source, wire.client)
            assert node.cpus[shard] == cpu


def test_connections_land_on_the_same_sockets_without_steering(new_network: Callable[[], Network]) -> None:
    """The program changes the CPU that does the work, never the shard."""
    network = new_network()
    with network.inside():
        sockets = open_sockets("127.0.0.1", plan_ports(PORT, 3, None))
        sockets.listen_on_shared_port()
        try:
            for number in range(200):
                with socket.socket() as sock:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                    sock.bind(("", 20_000 + number))
                    sock.connect(("127.0.0.1", PORT))
                    listener = sockets.shared[shard_of_source_port(20_000 + number, 3)]
                    assert select.select([listener], [], [], PATIENCE_S)[0]
                    listener.accept()[0].close()
        finally:
            sockets.close()
