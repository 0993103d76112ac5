"""A whole cluster, steered: every connection is answered by its shard's socket, on its CPU, through kills."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

import laminar
from ebpf.interfaces import network_namespace
from ebpf.layout import Rule
from ebpf.shared import FOLDER
from ebpf.status import InterfaceStatus, status
from laminar.testing import cluster as local_cluster
from laminar.testing.cluster import LocalCluster, Node
from router import shard_of_source_port
from tests.ebpf.conftest import Network

SHARDS = 2
PATIENCE_S = 60.0
CONNECTIONS = 200
APPENDS = 500
REQUEST = b"GET /livez HTTP/1.1\r\nHost: localhost\r\nLaminar-Socket: 1\r\nConnection: close\r\n\r\n"
STEERED = {"steer": "require", "pin": "on"}


def seen() -> InterfaceStatus:
    return next(each for each in status() if each.interface.loopback)


def opened(node: Node, source: int, *, port: int = 0) -> socket.socket:
    """A connection from this source port, with a request on its way. It may not be refused."""
    sock = socket.socket()
    sock.settimeout(PATIENCE_S)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((node.host, source))
    sock.connect((node.host, port or node.port))
    sock.sendall(REQUEST)
    return sock


def answered(sock: socket.socket) -> str:
    """What the answer says of the connection's socket."""
    received = b""
    with sock:
        while data := sock.recv(65536):
            received += data
    head = received.partition(b"\r\n\r\n")[0].decode()
    assert head.startswith("HTTP/1.1 200"), head
    return next(line for line in head.splitlines() if line.startswith("Laminar-Socket:")).partition(": ")[2]


def expected(source: int, cpus: list[int]) -> str:
    shard = shard_of_source_port(source, SHARDS)
    return f"shard={shard}; cpu={cpus[shard]}"


def pids_of(node: Node) -> dict[str, int]:
    found: dict[str, int] = json.loads((node.data / "node.json").read_text())["pids"]
    return found


def kill(pid: int) -> None:
    """Returns when it is dead: what was accepted by it is lost, what comes now waits for its successor."""
    process = os.pidfd_open(pid)
    signal.pidfd_send_signal(process, signal.SIGKILL)
    assert select.select([process], [], [], PATIENCE_S)[0]
    os.close(process)


async def append_small_records(urls: list[str]) -> tuple[int, int]:
    """Appends by datagram, each waited for: records that are there in the end, and datagrams that left."""
    async with laminar.aio.connect(urls, timeout=PATIENCE_S) as client:
        topic = await client.create_topic("small", partitions=8, exist_ok=True)
        async with topic.datagrams() as datagrams:
            await asyncio.gather(*(datagrams.append(b"%d" % number) for number in range(APPENDS)))
            sent = datagrams.statistics()["datagrams"]
        return sum((await topic.offsets()).values()), sent


def test_a_cluster_is_steered_through_kills(
    new_network: Callable[[], Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three nodes share a program; a shard that is killed is waited for, and found again, on its CPU."""
    # A node that is killed, as it takes longer to end, leaves the program attached.
    monkeypatch.setattr(local_cluster, "STOP_TIMEOUT_S", PATIENCE_S)
    usable = sorted(os.sched_getaffinity(0))
    cpus = [usable[shard % len(usable)] for shard in range(SHARDS)]
    with new_network().inside():
        with LocalCluster(tmp_path, nodes=3, shards=SHARDS, settings=STEERED) as cluster:
            found = seen()
            assert 3 == len(found.nodes)
            for node in cluster.members:
                told = {
                    source: answered(opened(node, source)) for source in range(20_000, 20_000 + CONNECTIONS)
                }
                assert {source: expected(source, cpus) for source in told} == told
                for shard in range(SHARDS):
                    own = answered(opened(node, 30_000 + shard, port=node.port + 1 + shard))
                    assert f"shard={shard}; cpu={cpus[shard]}" == own

            records, sent = asyncio.run(append_small_records(cluster.urls))
            counts = [item for each in seen().nodes for item in each.counts.items()]
            assert APPENDS == records
            assert sent == sum(sum(both) for (_, rule), both in counts if rule is Rule.APPEND_UDP)

            node = cluster.members[0]
            for shard in range(SHARDS):
                kill(pids_of(node)[f"shard {shard}"])
                # Others than before: a port may be held for a minute by the connection that it had.
                first = 21_000 + shard * CONNECTIONS
                waiting = {source: opened(node, source) for source in range(first, first + CONNECTIONS)}
                told = {source: answered(sock) for source, sock in waiting.items()}
                assert {source: expected(source, cpus) for source in told} == told
        assert 0 == seen().interface.xdp_program
        assert [] == list(FOLDER.glob(f"{network_namespace()}-*"))
