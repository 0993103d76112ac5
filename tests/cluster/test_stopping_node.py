"""A node that is being stopped (SIGTERM): its leaders are elsewhere, and no client waits for it meanwhile.

A request that is never finished keeps its drain going, so that the tests look at a node that is still there.
It may drain for ten minutes, and waits half a minute for the rest of a request.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import laminar
from laminar.testing.cluster import LocalCluster, get_json
from tests.cluster.conftest import until_all_vote
from tests.cluster.patience import PATIENCE_S, until

TOPIC = "stopping"


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[LocalCluster]:
    """Three nodes of two shards."""
    settings = {"drain_ms": 600_000}
    with LocalCluster(real_disk / "cluster", nodes=3, shards=2, settings=settings) as own:
        until_all_vote(own)
        yield own


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def leader(url: str, *, besides: str = "") -> dict[str, Any]:
    """Return who leads the partition, as the node at `url` tells it, once that is another than `besides`."""

    def found() -> dict[str, Any] | None:
        known = get_json(f"{url}/v1/topics/{TOPIC}/partitions")
        led: dict[str, Any] | None = known["partitions"][0]["leader"] if known else None
        return None if led is None or led["node"] == besides else led

    return until(found, f"the partition is led, and not by {besides!r}") or {}


async def test_a_stopping_node_takes_no_connection_and_its_clients_ask_the_others_at_once(
    cluster: LocalCluster,
) -> None:
    """Else a connection was taken by the kernel and reset at the end of the process, with what was sent on
    it; and the client tried the same node three times, with pauses.
    """
    async with laminar.aio.connect(cluster.urls, timeout=60) as client:
        topic = await client.create_topic(TOPIC, partitions=1, replicas=3)
        async with topic.producer() as producer:
            await producer.send(b"before")
            led = await asyncio.to_thread(leader, cluster.urls[0])
            member = next(node for node in cluster.members if node.name == led["node"])
            others = [node.url for node in cluster.members if node is not member]
            doors = [address_of(member.url), address_of(led["url"])]
            with socket.create_connection(doors[1]) as unfinished:
                path = f"/v1/topics/{TOPIC}/partitions/0/records"
                head = (
                    f"POST {path} HTTP/1.1\r\nHost: {doors[1][0]}:{doors[1][1]}\r\nContent-Length: 9\r\n\r\n"
                )
                unfinished.sendall(head.encode() + b"half")
                unfinished.setblocking(False)
                assert member.process is not None
                member.process.terminate()
                for url in others:
                    await asyncio.to_thread(leader, url, besides=member.name)
                await asyncio.to_thread(until_closed, doors, unfinished)

                before = client.statistics()["retries"]
                await producer.send(b"meanwhile")
                assert client.statistics()["retries"] == before
                assert is_pending(unfinished), "the drain has ended"
            assert 0 == await asyncio.to_thread(member.process.wait, PATIENCE_S)


def until_closed(doors: list[tuple[str, int]], unfinished: socket.socket) -> None:
    """Wait until the kernel takes no connection there; `unfinished` must be open still."""
    while any(map(is_open, doors)):
        assert is_pending(unfinished), "connections are taken until the end of the drain"
        time.sleep(0.02)
    assert is_pending(unfinished), "connections are taken until the end of the drain"


def is_pending(connection: socket.socket) -> bool:
    """Whether a connection has got nothing yet, not even its end."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return True
    return False


def is_open(door: tuple[str, int]) -> bool:
    """Whether the kernel takes a connection there."""
    try:
        socket.create_connection(door, timeout=PATIENCE_S).close()
    except ConnectionRefusedError:
        return False
    return True
