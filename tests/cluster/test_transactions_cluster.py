"""Transactions on three real nodes, of which one is killed: each committed whole, once, and in order."""

from __future__ import annotations

import asyncio

import laminar
from laminar.testing.cluster import LocalCluster
from tests.cluster.load import converged, leaders

TOPIC = "ledger"
PARTITIONS = 6
RECORDS = 5


async def commits(urls: list[str], applied: list[int], stop: asyncio.Event) -> None:
    """Batch after batch, a few records into every partition, until told to stop."""
    async with laminar.aio.connect(urls, timeout=60.0) as client:
        while not stop.is_set():
            number = len(applied)
            async with client.transaction("books", number) as tx:
                for place in range(PARTITIONS * RECORDS):
                    tx.append(TOPIC, b"%d %d" % (number, place), partition=place % PARTITIONS)
            assert "applied" == tx.result
            applied.append(number)


async def until(task: asyncio.Task[None], applied: list[int], count: int) -> None:
    """Wait until so many batches are committed; a failure of the task shows here."""
    async with asyncio.timeout(90):
        while len(applied) < count:
            await asyncio.wait({task}, timeout=0.05)
            if task.done():
                task.result()


async def test_pitfall_41_a_kill_of_a_leader_tears_doubles_and_reorders_no_transaction(
    cluster: LocalCluster,
) -> None:
    """Twice; the node comes back while transactions go on. Then a newer driver takes over where it ended."""
    async with laminar.aio.connect(cluster.urls) as client:
        await client.create_topic(TOPIC, partitions=PARTITIONS, replicas=3)
    applied: list[int] = []
    stop = asyncio.Event()
    task = asyncio.create_task(commits(cluster.urls, applied, stop))
    await until(task, applied, 5)
    for _ in range(2):
        victim = max(set(leaders(cluster.urls[0], TOPIC).values()) - {"node-1"})
        number = next(node.number for node in cluster.members if node.name == victim)
        await asyncio.to_thread(cluster.kill, number)
        await until(task, applied, len(applied) + 10)
        await asyncio.to_thread(cluster.restart, number)
        await until(task, applied, len(applied) + 5)
    stop.set()
    await task

    async with laminar.aio.connect(cluster.urls, timeout=60.0) as client:
        async with client.transaction("books", len(applied) - 1) as tx:
            assert tx.already
            tx.append(TOPIC, b"doubled", partition=0)
        found: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        async with client.topic(TOPIC).read() as records:
            async for record in records:
                assert record.offset == len(found[record.partition])
                found[record.partition].append(record.raw)
    for partition in range(PARTITIONS):
        places = range(partition, PARTITIONS * RECORDS, PARTITIONS)
        assert [b"%d %d" % (number, place) for number in applied for place in places] == found[partition]
    assert [] == await converged(cluster, TOPIC, PARTITIONS)
