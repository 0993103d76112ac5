"""Real nodes under SIGKILL: nothing acknowledged is lost, doubled or reordered."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import urllib.request
from contextlib import closing

import pytest

import laminar
from laminar.testing.cluster import LocalCluster, get_json
from tests.cluster.load import Load, converged, leaders, placement, violations

TOPIC = "faults"
PARTITIONS = 6


async def create(cluster: LocalCluster, **settings: str | int) -> None:
    async with laminar.aio.connect(cluster.urls) as client:
        await client.create_topic(TOPIC, partitions=PARTITIONS, replicas=3, settings=settings)


async def test_kill_of_a_leader_under_load_loses_doubles_and_reorders_nothing(cluster: LocalCluster) -> None:
    """Twice: a node that leads is killed while records are in flight, and comes back while they go on."""
    await create(cluster)
    load = Load(cluster.urls, TOPIC)
    load.start()
    await load.more(1_000)
    for _ in range(2):
        victim = max(set(leaders(cluster.urls[0], TOPIC).values()) - {"node-1"})
        number = next(node.number for node in cluster.members if node.name == victim)
        await asyncio.to_thread(cluster.kill, number)
        await load.more(2_000)
        await asyncio.to_thread(cluster.restart, number)
        await load.more(1_000)
    await load.finish()

    assert [] == await violations(cluster.urls, TOPIC, load)
    assert [] == await converged(cluster, TOPIC, PARTITIONS)


@pytest.mark.parametrize("flush", ["commit", "interval"])
async def test_kill_of_all_nodes_at_once_under_load_loses_nothing(cluster: LocalCluster, flush: str) -> None:
    """Everything acknowledged is there after the restart, and topics and placement are what they were.

    Also with `interval`: what was written is in the page cache, which outlives every process.
    """
    await create(cluster, flush=flush)
    before = get_json(f"{cluster.urls[0]}/v1/topics/{TOPIC}/partitions")
    load = Load(cluster.urls, TOPIC)
    load.start()
    await load.more(3_000)

    await asyncio.gather(*(asyncio.to_thread(cluster.kill, number) for number in range(3)))
    for number in range(3):
        cluster.spawn(number)
    await asyncio.to_thread(cluster.wait_ready)
    await load.more(1_000)
    await load.finish()

    assert [] == await violations(cluster.urls, TOPIC, load)
    assert [] == await converged(cluster, TOPIC, PARTITIONS)
    after = get_json(f"{cluster.urls[0]}/v1/topics/{TOPIC}/partitions")
    assert placement(before) == placement(after)


async def test_pitfall_36_restart_with_fewer_and_with_more_shards_loses_nothing(
    cluster: LocalCluster,
) -> None:
    """Two shards a node, then one, then four: partitions move between shards with all they hold."""
    await create(cluster)
    load = Load(cluster.urls, TOPIC)
    for shards in (2, 1, 4):
        if shards != 2:
            await asyncio.gather(*(asyncio.to_thread(cluster.kill, number) for number in range(3)))
            cluster.shards = shards
            for number in range(3):
                cluster.spawn(number)
            await asyncio.to_thread(cluster.wait_ready)
        load = Load(cluster.urls, TOPIC, load.acknowledged, load.uncertain, load._next)
        load.start()
        await load.more(1_000)
        await load.finish()
        listed = get_json(f"{cluster.urls[0]}/v1/cluster")
        assert {shards} == {len(node["shards"]) for node in listed["nodes"]}

        assert [] == await violations(cluster.urls, TOPIC, load)
    assert [] == await converged(cluster, TOPIC, PARTITIONS)


@pytest.mark.parametrize("victim", [0, 1])
def test_pitfall_51_connections_land_right_after_a_shard_was_killed(
    shared_cluster: LocalCluster, victim: int
) -> None:
    """The supervisor keeps the sockets, so the kernel's order of them, and with it steering, survives."""
    node = shared_cluster.members[2]
    pids = shared_cluster.pids(2)  # the supervisor, the controller, shard 0, shard 1
    os.kill(pids[2 + victim], signal.SIGKILL)
    shared_cluster.wait_ready([2])

    for attempt in range(60):
        with closing(socket.create_connection((node.host, node.port))) as connection:
            port = connection.getsockname()[1]
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = connection.recv(4096)
        assert b'"shard":%d' % ((port >> 1) % 2) in answer, f"attempt {attempt} from port {port}: {answer!r}"


def test_a_node_told_to_stop_ends_in_time_with_all_its_processes(cluster: LocalCluster) -> None:
    """SIGTERM: the exit code is 0 and nobody is left."""
    process = cluster.members[1].process
    assert process is not None
    pids = cluster.pids(1)

    process.send_signal(signal.SIGTERM)

    assert 0 == process.wait(10)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_follower_never_shows_what_is_not_committed(shared_cluster: LocalCluster) -> None:
    """Every replica answers reads, each only with what a majority has; none is behind what the client saw."""
    base = shared_cluster.urls[0]
    urllib.request.urlopen(
        urllib.request.Request(f"{base}/v1/topics/committed-only", data=b'{"partitions":1}', method="PUT")
    ).close()
    for number in range(20):
        answer = urllib.request.urlopen(
            f"{base}/v1/topics/committed-only/partitions/0/records", data=b"%d" % number
        )
        answer.close()
        for replica in get_json(f"{base}/v1/topics/committed-only/partitions/0")["replicas"]:
            told = get_json(
                f"{replica['url']}/v1/topics/committed-only/partitions/0/records"
                f"?offset={number}&min_offset={number + 1}&wait_ms=5000",
                headers={"Laminar-Local": "1"},
                timeout=10.0,
            )
            assert [str(number)] == [record["value"] for record in told["records"]], replica
