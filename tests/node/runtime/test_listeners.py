"""The node's listening sockets: which port is whose, and which shard's socket gets a connection."""

from __future__ import annotations

import os
import select
import signal
import socket

import pytest

from laminar.node.runtime.boot import CONTROLLER
from laminar.node.runtime.listeners import (
    NodeSockets,
    Ports,
    begin_to_listen,
    open_kept_sockets,
    open_sockets,
    plan_ports,
)
from tests.node.hosts import HOSTS, have

# How long tests wait for what should come at once.
PATIENCE_S = 60.0


def accept_from(listeners: list[socket.socket], *, timeout: float = PATIENCE_S) -> tuple[int, socket.socket]:
    """The number of the listening socket that has a connection, and the connection."""
    readable, _, _ = select.select(listeners, [], [], timeout)
    assert len(readable) == 1, f"{len(readable)} of {len(listeners)} sockets have a connection"
    connection, _ = readable[0].accept()
    return listeners.index(readable[0]), connection


def accept_next(listeners: list[socket.socket]) -> tuple[int, socket.socket]:
    """One of the connections that wait: its listener's number, and the connection.

    A client may be told that it is connected a moment before the kernel has put it into the queue.
    """
    readable, _, _ = select.select(listeners, [], [], PATIENCE_S)
    assert readable, "a connection is lost"
    return listeners.index(readable[0]), readable[0].accept()[0]


def is_ended(client: socket.socket) -> bool:
    """Whether the other side, which sends nothing, has ended a connection."""
    return bool(select.select([client], [], [], 0)[0])


def connect(host: str, port: int, *, options: bytes = b"") -> socket.socket:
    """A connection; `options` are IPv4 header options on each of its packets."""
    client = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if options:
        client.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, options)
    try:
        client.connect((host, port))
    except OSError:
        client.close()
        raise
    return client


def own_host() -> str:
    """An address of this process: no other test's connections take a port of it that is free for a moment."""
    return f"127.{128 + (os.getpid() >> 16 & 0x3F)}.{os.getpid() >> 8 & 0xFF}.{max(1, os.getpid() & 0xFF)}"


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("shards", [1, 2, 3, 8])
def test_a_connection_lands_on_the_shard_that_its_source_port_names(
    host: str, shards: int, opened: list[NodeSockets]
) -> None:
    """(source port >> 1) mod shards, for every one of 150 connections, and every shard gets some."""
    if not have(host):
        pytest.skip(f"no {host} here")
    node = open_kept_sockets(host, shards, None)
    opened.append(node)
    node.listen_on_shared_port()
    seen = set()

    for _ in range(150):
        with connect(host, node.ports.shared) as client:
            expected = (client.getsockname()[1] >> 1) % shards
            shard, connection = accept_from(node.shared)
            connection.close()
            assert expected == shard
            seen.add(shard)

    assert set(range(shards)) == seen


def test_ip_options_do_not_mislead_the_choice(opened: list[NodeSockets]) -> None:
    """With options the TCP header stands elsewhere; the program reads the header's length."""
    node = open_kept_sockets("127.0.0.1", 3, None)
    opened.append(node)
    node.listen_on_shared_port()

    for _ in range(30):
        with connect("127.0.0.1", node.ports.shared, options=b"\x01" * 8) as client:
            shard, connection = accept_from(node.shared)
            connection.close()
            assert (client.getsockname()[1] >> 1) % 3 == shard


def test_a_client_chooses_its_shard_by_the_port_it_binds(opened: list[NodeSockets]) -> None:
    """The rule is public: a client that binds a fitting source port reaches the shard it wants."""
    node = open_kept_sockets("127.0.0.1", 4, None)
    opened.append(node)
    node.listen_on_shared_port()
    wanted = 2

    client = socket.socket()
    for port in range(20_000 + 2 * wanted, 30_000, 8):
        try:
            client.bind(("127.0.0.1", port))
            break
        except OSError:
            continue
    with client:
        client.connect(("127.0.0.1", node.ports.shared))
        shard, connection = accept_from(node.shared)
        connection.close()

    assert wanted == shard


def test_pitfall_51_steering_stays_right_when_an_accepting_child_dies_and_another_takes_its_place(
    opened: list[NodeSockets],
) -> None:
    """The supervisor keeps the sockets, so their order in the kernel outlives every child; waiting
    connections too.
    """
    node = open_kept_sockets("127.0.0.1", 3, None)
    opened.append(node)
    node.listen_on_shared_port()

    for _ in range(5):
        pid = os.fork()
        if pid == 0:  # a shard: has its part only, accepts one connection, and waits to be killed
            try:
                node.close_all_but(node.for_child(0))
                select.select([node.shared[0]], [], [])
                node.shared[0].accept()
                signal.pause()
            finally:
                os._exit(1)
        clients = [connect("127.0.0.1", node.ports.shared) for _ in range(20)]
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        clients += [connect("127.0.0.1", node.ports.shared) for _ in range(20)]
        # All but the one that the child took, if it came to that: its end closed that one.
        taken = [client for client in clients if is_ended(client)]
        assert len(taken) <= 1
        for _ in range(40 - len(taken)):
            number, connection = accept_next(node.shared)
            assert (connection.getpeername()[1] >> 1) % 3 == number
            connection.close()
        assert [] == select.select(node.shared, [], [], 0)[0]
        for client in clients:
            client.close()


@pytest.mark.parametrize("host", HOSTS)
def test_ports_for_http_refuse_connections_until_the_node_listens(
    host: str, opened: list[NodeSockets]
) -> None:
    """What the kernel accepts for a node that cannot answer would wait. Those for peers listen at once."""
    if not have(host):
        pytest.skip(f"no {host} here")
    node = open_kept_sockets(host, 2, None)
    opened.append(node)
    ports = node.ports

    for port in (ports.shared, *ports.own):
        with pytest.raises(ConnectionRefusedError):
            connect(host, port)
    for port in ports.peers:
        connect(host, port).close()

    begin_to_listen(node.own[1])
    connect(host, ports.own[1]).close()
    for port in (ports.shared, ports.own[0]):
        with pytest.raises(ConnectionRefusedError):
            connect(host, port)


def test_no_other_program_can_have_a_port_that_does_not_listen_yet(opened: list[NodeSockets]) -> None:
    """SO_REUSEADDR alone would let it: the kernel checks only ports that listen."""
    node = open_kept_sockets("127.0.0.1", 2, None)
    opened.append(node)

    for port in (node.ports.shared, *node.ports.own):
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))  # sets SO_REUSEADDR


def test_a_port_with_connections_of_the_last_start_is_held_and_listens_again(
    opened: list[NodeSockets],
) -> None:
    """They linger in TIME_WAIT, as the node closed them."""
    host = own_host()
    first = open_kept_sockets(host, 1, None)
    kept = first.ports
    first.listen_on_shared_port()
    begin_to_listen(first.own[0])
    for listener, port in ((first.shared[0], kept.shared), (first.own[0], kept.own[0])):
        with connect(host, port):
            select.select([listener], [], [], PATIENCE_S)
            listener.accept()[0].close()
    first.close()

    second = open_sockets(host, plan_ports(0, 1, kept))
    opened.append(second)
    second.listen_on_shared_port()
    begin_to_listen(second.own[0])
    for port in (kept.shared, kept.own[0]):
        connect(host, port).close()


def test_fixed_ports_follow_the_published_plan() -> None:
    """Shared, shards' own, peers by role, gossip: all found from one number."""
    expected = Ports(shared=7070, own=(7071, 7072), peers=(7170, 7171, 7172), gossip=7170)

    assert expected == plan_ports(7070, 2, None)
    assert expected == plan_ports(7070, 2, Ports(shared=1, own=(2,), peers=(3, 4), gossip=5))


def test_ports_chosen_by_the_system_are_the_same_at_the_next_start() -> None:
    """Port 0 with kept ports binds these; with more shards it keeps those it has."""
    host = own_host()
    first = open_kept_sockets(host, 2, None)
    kept = first.ports
    first.close()

    second = open_kept_sockets(host, 2, kept)
    assert kept == second.ports
    second.close()

    third = open_kept_sockets(host, 3, kept)
    assert (kept.shared, *kept.own) == (third.ports.shared, *third.ports.own[:2])
    third.close()


def test_a_kept_port_that_was_taken_meanwhile_is_replaced(opened: list[NodeSockets]) -> None:
    """Any outgoing connection may take a port the system once chose: the node must still start."""
    host = own_host()
    first = open_kept_sockets(host, 1, None)
    kept = first.ports
    first.close()

    with socket.create_server((host, kept.own[0])):
        second = open_kept_sockets(host, 1, kept)
        opened.append(second)
        assert kept.own != second.ports.own


def test_two_nodes_on_the_same_port_are_an_error_that_names_the_port(opened: list[NodeSockets]) -> None:
    """SO_REUSEPORT alone would let the second one steal half of the first one's clients in silence."""
    host = own_host()
    opened.append(open_sockets(host, plan_ports(7070, 2, None)))

    with pytest.raises(OSError, match="port 7071"):
        open_sockets(host, plan_ports(7070, 2, None))


def test_each_child_gets_its_own_sockets_and_no_others(opened: list[NodeSockets]) -> None:
    """The controller has gossip and no HTTP; a shard has its two HTTP sockets."""
    node = open_kept_sockets("127.0.0.1", 2, None)
    opened.append(node)

    controller, shard = node.for_child(CONTROLLER), node.for_child(1)

    assert (None, None, node.peers[0], node.gossip) == (
        controller.http_shared,
        controller.http_own,
        controller.peer,
        controller.gossip,
    )
    assert (node.shared[1], node.own[1], node.peers[2], None) == (
        shard.http_shared,
        shard.http_own,
        shard.peer,
        shard.gossip,
    )


def test_gossip_is_sent_to_an_address_also_where_the_node_has_a_name(opened: list[NodeSockets]) -> None:
    """A name may still lead to where the node was before: the address that is bound is what is certain."""
    node = open_kept_sockets("127.0.0.1", 1, None)
    opened.append(node)

    assert ("n1.example", "127.0.0.1") == _hosts(node, "n1.example")
    assert ("10.9.8.7", "10.9.8.7") == _hosts(node, "10.9.8.7")


def test_a_name_of_a_node_on_all_addresses_is_looked_up_and_must_be_of_use_to_others(
    opened: list[NodeSockets], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's /etc/hosts has the machine's own name at 127.0.1.1."""
    node = open_kept_sockets("0.0.0.0", 1, None)
    opened.append(node)

    with pytest.raises(OSError, match=r"advertise_host localhost is 127\.0\.0\.1 here"):
        node.addresses("localhost")
    with pytest.raises(OSError, match=r"advertise_host nowhere\.invalid has no address"):
        node.addresses("nowhere.invalid")
    assert "10.9.8.7" == node.addresses("nowhere.invalid", gossip="10.9.8.7").gossip_host
    found = [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", ("10.1.2.3", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *words, **named: found)
    assert ("n1.example", "10.1.2.3") == _hosts(node, "n1.example")


def _hosts(node: NodeSockets, host: str) -> tuple[str, str]:
    addresses = node.addresses(host)
    return addresses.host, addresses.gossip_host
