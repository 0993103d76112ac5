"""Connections to the shared port of real nodes: on which shard's socket they are, as the answers say."""

from __future__ import annotations

import asyncio
import http.client
import random
from urllib.parse import urlsplit

import pytest

import laminar
from laminar.http.client.source_port import connect_to_shard
from laminar.testing.cluster import LocalCluster
from router import shard_of_source_port
from tests.cluster.patience import told


def said(answer: http.client.HTTPResponse) -> dict[str, int]:
    """`Laminar-Socket` of an answer, taken apart."""
    answer.read()
    members = (answer.headers["Laminar-Socket"] or "").split("; ")
    return {name: int(number) for name, number in (member.split("=") for member in members)}


def ask(connection: http.client.HTTPConnection) -> dict[str, int]:
    connection.request("GET", "/livez", headers={"Laminar-Socket": "1"})
    return said(connection.getresponse())


def test_an_answer_tells_the_shard_whose_socket_the_connection_is_on(shared_cluster: LocalCluster) -> None:
    """By its source port for the shared port; on a shard's own port, that shard; and a CPU that is there."""
    node = told(f"{shared_cluster.urls[0]}/v1/cluster")["nodes"][0]
    parts = urlsplit(node["url"])
    assert parts.hostname is not None

    for _ in range(50):
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)
        found = ask(connection)
        assert shard_of_source_port(connection.sock.getsockname()[1], 2) == found["shard"]
        assert found["cpu"] >= 0
        connection.close()
    for each in node["shards"]:
        own = urlsplit(each["url"])
        connection = http.client.HTTPConnection(str(own.hostname), own.port, timeout=60)
        assert each["shard"] == ask(connection)["shard"]
        connection.close()


def test_who_does_not_ask_is_not_told(shared_cluster: LocalCluster) -> None:
    parts = urlsplit(shared_cluster.urls[0])
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    connection.request("GET", "/livez")
    answer = connection.getresponse()
    answer.read()
    connection.close()

    assert "Laminar-Socket" not in answer.headers


@pytest.mark.parametrize("shard", [0, 1])
async def test_a_bound_source_port_reaches_the_shard_that_is_wanted(
    shared_cluster: LocalCluster, shard: int
) -> None:
    """Forty connections, one after another."""
    parts = urlsplit(shared_cluster.urls[0])
    host, port = str(parts.hostname), parts.port
    assert port is not None

    for _ in range(40):
        sock = await connect_to_shard(host, port, shard=shard, shards=2, rng=random.Random())
        sock.setblocking(True)
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.sock = sock
        assert shard == ask(connection)["shard"]
        connection.close()


async def test_a_client_of_the_shared_port_uses_no_other_and_reaches_the_owners(
    shared_cluster: LocalCluster,
) -> None:
    """What is appended and read goes to the owner's socket, and nothing has to be passed on or redirected."""
    shared = {urlsplit(url).port for url in shared_cluster.urls}
    async with laminar.aio.connect(shared_cluster.urls, shared_port=True, timeout=60) as client:
        topic = await client.create_topic("narrow", partitions=6, exist_ok=True)
        for partition in range(6):
            for number in range(3):
                await topic.append(b"%d" % number, partition=partition)
        read = [record async for record in topic.read()]
        owners = 0
        for connection in client.session.pool._all:
            if connection._transport is None:
                continue
            assert connection._transport.get_extra_info("peername")[1] in shared
            owners += 1
        async with asyncio.timeout(60):
            while not all(
                place.leader for place in (await client.session.topic_map("narrow")).places.values()
            ):
                client.session.forget_topic("narrow")
        shards = [
            each for node in told(f"{shared_cluster.urls[0]}/v1/cluster")["nodes"] for each in node["shards"]
        ]
        for place in (await client.session.topic_map("narrow")).places.values():
            assert place.leader is not None
            answer = await client.session.pool.ask(
                place.leader,
                client.session.head(place.leader, "GET", "/livez", {"Laminar-Socket": "1"}),
                timeout_s=60,
            )
            socket = answer.headers["laminar-socket"]
            assert f"shard={answer.json()['shard']};" in socket
            assert urlsplit(place.leader).port == next(
                urlsplit(each["url"]).port
                for each in shards
                if socket.startswith(f"shard={each['shard']};")
                and urlsplit(each["url"]).hostname == urlsplit(place.leader).hostname
            )

    assert 18 == len(read)
    assert owners >= 2
