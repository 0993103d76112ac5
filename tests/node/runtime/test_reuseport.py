"""Which socket of the shared port gets a datagram or an ordinary connection, as the kernel does it."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import socket
import struct
from pathlib import Path

import pytest

from laminar.node.runtime.listeners import NodeSockets, open_kept_sockets
from laminar.node.runtime.reuseport import partition_program
from router import owner_shard
from tests.node.hosts import HOSTS, have
from tests.node.runtime.test_listeners import accept_next

GOLDEN = json.loads((Path(__file__).parents[2] / "router" / "golden.json").read_text())
# Ordinary connections for each number of shards; `make steer-long` has 10,000.
CONNECTIONS = int(os.environ.get("CONNECTIONS", "1000"))
# The 1 - 1e-6 quantiles of chi-squared, by degrees of freedom.
HIGHEST = {1: 23.93, 2: 27.63, 3: 30.66, 7: 40.52}


def datagram(partition_hash: int) -> bytes:
    return b"LMU1" + struct.pack(">I", partition_hash) + b"behind"


def landed(node: NodeSockets, host: str, hashes: list[int]) -> list[int]:
    """The shard whose socket got the datagram of each hash; a hundred are under way at a time."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found: dict[int, int] = {}
    with socket.socket(family, socket.SOCK_DGRAM) as client:
        client.connect((host, node.ports.shared))
        for first in range(0, len(hashes), 100):
            part = set(hashes[first : first + 100]) - found.keys()
            for each in part:
                client.send(datagram(each))
            while part:
                readable, _, _ = select.select(node.datagrams, [], [], 60.0)
                assert readable, f"{len(part)} datagrams of 100 came nowhere"
                for sock in readable:
                    each = struct.unpack_from(">I", sock.recv(100), 4)[0]
                    found[each] = node.datagrams.index(sock)
                    part.remove(each)
    return [found[each] for each in hashes]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8, 64])
def test_a_datagram_lands_on_the_rendezvous_owner_of_its_partition(
    host: str, shards: int, opened: list[NodeSockets]
) -> None:
    """Kernel and `router.owner_shard` agree on every one of 2,000 hashes, and every shard gets some."""
    if not have(host):
        pytest.skip(f"no {host} here")
    node = open_kept_sockets(host, shards, None)
    opened.append(node)
    drawn = random.Random(shards)
    hashes = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, *(drawn.getrandbits(32) for _ in range(2_000))]

    assert [owner_shard(each, shards) for each in hashes] == landed(node, host, hashes)
    assert set(range(shards)) == {owner_shard(each, shards) for each in hashes}


def test_the_program_is_held_to_the_golden_vectors_of_the_router(opened: list[NodeSockets]) -> None:
    """The file that holds `router`, and the XDP program, to the same owners."""
    for shards in sorted({shards for _, shards, _ in GOLDEN["owner_shard"]}):
        expected = {each: owner for each, number, owner in GOLDEN["owner_shard"] if number == shards}
        node = open_kept_sockets("127.0.0.1", shards, None)
        opened.append(node)

        assert list(expected.values()) == landed(node, "127.0.0.1", list(expected))


@pytest.mark.parametrize("size", range(8))
def test_a_datagram_too_short_for_a_hash_goes_to_the_first_shard(
    size: int, opened: list[NodeSockets]
) -> None:
    """One place where it is counted and dropped."""
    node = open_kept_sockets("127.0.0.1", 3, None)
    opened.append(node)

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.sendto(datagram(2**32 - 1)[:size], ("127.0.0.1", node.ports.shared))

    readable, _, _ = select.select(node.datagrams, [], [], 60.0)
    assert [node.datagrams[0]] == readable


def test_the_program_of_the_most_shards_fits_the_oldest_kernels_limits() -> None:
    """4,096 lines, and 20 KiB of what they are translated to (`net.core.optmem_max` before 6.7)."""
    lines = len(partition_program(64)) // 8

    assert lines <= 4096
    # A line becomes one of eBPF's, of eight bytes too; a load from the packet and the answer become a few.
    assert lines * 8 + 1024 <= 20_480


def test_datagrams_wait_for_the_successor_of_a_killed_shard(opened: list[NodeSockets]) -> None:
    """The supervisor keeps the sockets: none is refused, and each lands where it did before."""
    node = open_kept_sockets("127.0.0.1", 3, None)
    opened.append(node)
    hashes = [random.Random(7).getrandbits(32) for _ in range(50)]

    pid = os.fork()
    if pid == 0:  # a shard: has its part only, and is killed
        try:
            node.close_all_but(node.for_child(1))
            signal.pause()
        finally:
            os._exit(1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)

    assert [owner_shard(each, 3) for each in hashes] == landed(node, "127.0.0.1", hashes)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("shards", [2, 3, 4, 8])
def test_ordinary_connections_are_spread_evenly(host: str, shards: int, opened: list[NodeSockets]) -> None:
    """Clients that know nothing of steering; chi-squared would be as high by chance once in 10^6 runs."""
    if not have(host):
        pytest.skip(f"no {host} here")
    node = open_kept_sockets(host, shards, None)
    opened.append(node)
    node.listen_on_shared_port()
    accepted = [0] * shards

    for _ in range(CONNECTIONS // 100):
        clients = [socket.create_connection((host, node.ports.shared)) for _ in range(100)]
        for _ in clients:
            number, connection = accept_next(node.shared)
            connection.close()
            accepted[number] += 1
        for client in clients:
            client.close()

    expected = CONNECTIONS / shards
    chi_squared = sum((count - expected) ** 2 / expected for count in accepted)
    print(f"{CONNECTIONS} connections to {host}, {shards} shards: {accepted}, chi-squared {chi_squared:.2f}")
    assert CONNECTIONS == sum(accepted)
    assert chi_squared < HIGHEST[shards - 1], accepted
