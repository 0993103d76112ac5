"""A leader that stands still (SIGSTOP) keeps its connections and answers nobody: writes go on without it.

It stays stopped until all went on. Nothing but the election (1.5 to 3 s), and meanwhile a client's patience
(1 s), is to be waited for; the bound leaves room for a busy machine, and is below a request's time limits.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time

import httpx

import laminar
from laminar.batch import build
from laminar.testing.cluster import LocalCluster, processes_of_group
from tests.cluster.load import Load, converged, leaders, violations

TOPIC = "stopped"
PARTITIONS = 6
BOUND_S = 8.0


def signalled(cluster: LocalCluster, number: int, signal_number: signal.Signals) -> None:
    """Send a signal to all processes of a node."""
    process = cluster.members[number].process
    assert process is not None
    for pid in processes_of_group(process.pid):
        os.kill(pid, signal_number)


def leading(cluster: LocalCluster) -> tuple[int, int]:
    """The number of a node that leads, and a partition that it leads."""
    partition, name = next(iter(leaders(cluster.urls[0], TOPIC).items()))
    return next(node.number for node in cluster.members if node.name == name), partition


async def test_a_producer_goes_on_while_its_leader_is_stopped(cluster: LocalCluster) -> None:
    """Of every key, and nothing is lost, doubled or reordered when the old leader wakes."""
    async with laminar.aio.connect(cluster.urls) as client:
        await client.create_topic(TOPIC, partitions=PARTITIONS, replicas=3)
    load = Load(cluster.urls, TOPIC)
    load.start()
    await load.more(1_000)
    for _ in range(2):
        number, _partition = leading(cluster)
        signalled(cluster, number, signal.SIGSTOP)
        begun = time.monotonic()
        # Two rounds over all keys, each round awaited: so a write to every partition began after the stop.
        await load.more(400)
        waited_s = time.monotonic() - begun
        signalled(cluster, number, signal.SIGCONT)
        assert waited_s < BOUND_S
        await load.more(1_000)
    await load.finish()

    assert [] == await violations(cluster.urls, TOPIC, load)
    assert [] == await converged(cluster, TOPIC, PARTITIONS)


async def test_a_batch_of_a_producer_is_passed_on_to_who_leads_after_a_stopped_leader(
    cluster: LocalCluster,
) -> None:
    """The node that passes it on has sent it to the stopped one, and does not wait for that one alone."""
    async with laminar.aio.connect(cluster.urls) as client, httpx.AsyncClient(trust_env=False) as http:
        await client.create_topic(TOPIC, partitions=PARTITIONS, replicas=3)
        number, partition = leading(cluster)
        other = cluster.urls[(number + 1) % 3]
        frames = [
            bytes(build([b"%d" % sequence], producer_id=b"p" * 16, producer_epoch=0, sequence=sequence))
            for sequence in range(2)
        ]

        async def append(frame: bytes) -> httpx.Response:
            path = f"{other}/v1/topics/{TOPIC}/partitions/{partition}/records"
            headers = {"Content-Type": "application/vnd.laminar.batch"}
            return await http.post(path, content=frame, headers=headers, timeout=20)

        assert 0 == (await append(frames[0])).json()["placed"][0]["offset"]
        signalled(cluster, number, signal.SIGSTOP)
        begun = time.monotonic()
        answer = await append(frames[1])
        waited_s = time.monotonic() - begun
        signalled(cluster, number, signal.SIGCONT)

        assert 1 == answer.json()["placed"][0]["offset"], answer.text
        assert waited_s < BOUND_S
        values = [record.value async for record in client.topic(TOPIC).read(partitions=[partition])]
        assert [b"0", b"1"] == values
        again = await asyncio.gather(*(append(frame) for frame in frames))
        assert [0, 1] == [each.json()["placed"][0]["offset"] for each in again]
