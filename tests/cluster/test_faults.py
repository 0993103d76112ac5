"""Real nodes under SIGKILL: nothing acknowledged is lost, doubled or reordered."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import closing

import httpx
import pytest

import laminar
from laminar.testing.cluster import STOP_TIMEOUT_S, LocalCluster
from tests.cluster.load import Load, converged, leaders, placement, violations
from tests.cluster.patience import PATIENCE_S, asked, told, until

TOPIC = "faults"
PARTITIONS = 6


async def create(cluster: LocalCluster, **settings: str | int) -> None:
    async with laminar.aio.connect(cluster.urls, timeout=PATIENCE_S) as client:
        await client.create_topic(TOPIC, partitions=PARTITIONS, replicas=3, settings=settings)


def leading_beside_the_first(cluster: LocalCluster) -> int:
    """The number of a node, but the first, that leads partitions; 0 if none does at the moment."""
    led = {*leaders(cluster.urls[0], TOPIC).values()}
    return max(member.number for member in cluster.members if member.number == 0 or member.name in led)


async def test_kill_of_a_leader_under_load_loses_doubles_and_reorders_nothing(cluster: LocalCluster) -> None:
    """Twice: a node that leads is killed while records are in flight, and comes back while they go on."""
    await create(cluster)
    load = Load(cluster.urls, TOPIC)
    load.start()
    await load.more(1_000)
    for _ in range(2):
        number = await asyncio.to_thread(until, lambda: leading_beside_the_first(cluster))
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
    before = await asyncio.to_thread(told, f"{cluster.urls[0]}/v1/topics/{TOPIC}/partitions")
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
    after = await asyncio.to_thread(told, f"{cluster.urls[0]}/v1/topics/{TOPIC}/partitions")
    assert placement(before) == placement(after)


def shards_of_nodes(cluster: LocalCluster) -> set[int]:
    """How many shards the nodes have, as the first one knows it."""
    return {len(node["shards"]) for node in told(f"{cluster.urls[0]}/v1/cluster")["nodes"]}


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
        # The first node hears of the others' restarts by gossip.
        await asyncio.to_thread(until, lambda wanted={shards}: shards_of_nodes(cluster) == wanted)  # type: ignore[misc]

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

    # Later than `drain_ms` and a grace it would kill its processes, and its exit code would be another one.
    assert 0 == process.wait(STOP_TIMEOUT_S)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_follower_never_shows_what_is_not_committed(shared_cluster: LocalCluster) -> None:
    """Every replica answers reads, each only with what a majority has; none is behind what the client saw."""
    topic = f"{shared_cluster.urls[0]}/v1/topics/committed-only"
    local = {"Laminar-Local": "1"}
    with httpx.Client(timeout=PATIENCE_S, trust_env=False) as http:
        assert asked(http, "PUT", topic, json={"partitions": 1}).is_success
        for number in range(20):
            sent = asked(http, "POST", f"{topic}/partitions/0/records", content=b"%d" % number)
            assert (201, number) == (sent.status_code, sent.json()["placed"][0]["offset"])
            for replica in told(f"{topic}/partitions/0")["replicas"]:
                place = f"{replica['url']}/v1/topics/committed-only/partitions/0/records"
                query = {"offset": number, "min_offset": number + 1, "wait_ms": 5000}
                found = asked(http, "GET", place, params=query, headers=local).json()
                assert [str(number)] == [record["value"] for record in found["records"]], replica
