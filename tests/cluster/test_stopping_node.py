"""A node that is being stopped (SIGTERM): its leaders are elsewhere, and no client waits for it meanwhile.

A request that is never finished keeps its drain going, so that the tests look at a node that is still there.
"""

from __future__ import annotations

import asyncio
import socket
import time
from urllib.parse import urlsplit

import laminar
from laminar.testing.cluster import LocalCluster, get_json
from tests.cluster.load import leaders

TOPIC = "stopping"


def address_of(url: str) -> tuple[str, int]:
    """Host and port of a URL."""
    parts = urlsplit(url)
    assert parts.hostname is not None and parts.port is not None
    return parts.hostname, parts.port


def leader_url(url: str) -> str:
    """The URL of the shard that leads the partition, as one node tells it; it must be known."""
    told = get_json(f"{url}/v1/topics/{TOPIC}/partitions")
    return str(told["partitions"][0]["leader"]["url"])


async def test_a_stopping_node_takes_no_connection_and_its_clients_ask_the_others_at_once(
    cluster: LocalCluster,
) -> None:
    """Else a connection was taken by the kernel and reset at the end of the process, with what was sent on
    it; and the client tried the same node three times, with pauses.
    """
    async with laminar.aio.connect(cluster.urls) as client:
        topic = await client.create_topic(TOPIC, partitions=1, replicas=3)
        async with topic.producer() as producer:
            await producer.send(b"before")
            name = leaders(cluster.urls[0], TOPIC)[0]
            member = next(node for node in cluster.members if node.name == name)
            others = [node.url for node in cluster.members if node is not member]
            doors = [address_of(member.url), address_of(leader_url(others[0]))]
            with socket.create_connection(doors[1]) as unfinished:
                path = f"/v1/topics/{TOPIC}/partitions/0/records"
                head = (
                    f"POST {path} HTTP/1.1\r\nHost: {doors[1][0]}:{doors[1][1]}\r\nContent-Length: 9\r\n\r\n"
                )
                unfinished.sendall(head.encode() + b"half")
                unfinished.setblocking(False)
                assert member.process is not None
                member.process.terminate()
                await asyncio.to_thread(until_led_elsewhere, others[0], name)
                await asyncio.to_thread(until_closed, doors, unfinished)

                before = client.statistics()["retries"]
                await producer.send(b"meanwhile")
                assert client.statistics()["retries"] == before
                assert is_pending(unfinished), "the drain has ended"
            assert 0 == await asyncio.to_thread(member.process.wait, 30)


def until_led_elsewhere(url: str, name: str) -> None:
    """Wait until another node than `name` leads the partition, as the node at `url` tells it."""
    deadline = time.monotonic() + 120
    while leaders(url, TOPIC).get(0) in (None, name):
        assert time.monotonic() < deadline, f"{name} leads on"
        time.sleep(0.02)


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
        socket.create_connection(door, timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True
