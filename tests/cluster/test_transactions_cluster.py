"""Transactions on three real nodes, of which one is killed: each committed whole, once, and in order."""

from __future__ import annotations

import asyncio
import signal

import httpx

import laminar
from laminar.client.consume.jobs import Job
from laminar.node.api.transactions.steps import COORDINATORS
from laminar.node.transactions.coordinator import TOPIC as SINKS
from laminar.node.transactions.coordinator import id_of
from laminar.testing.cluster import LocalCluster
from laminar.wire.key_route import Route, logical_of_key
from tests.cluster.load import converged, leaders
from tests.cluster.patience import until as wait_until
from tests.cluster.test_stopped_leader import signalled

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
    async with asyncio.timeout(180):
        while len(applied) < count:
            await asyncio.wait({task}, timeout=0.05)
            if task.done():
                task.result()


async def test_pitfall_41_a_kill_of_a_leader_tears_doubles_and_reorders_no_transaction(
    cluster: LocalCluster,
) -> None:
    """Twice; the node comes back while transactions go on. Then a newer driver takes over where it ended."""
    async with laminar.aio.connect(cluster.urls, timeout=60.0) as client:
        await client.create_topic(TOPIC, partitions=PARTITIONS, replicas=3)
    applied: list[int] = []
    stop = asyncio.Event()
    task = asyncio.create_task(commits(cluster.urls, applied, stop))
    await until(task, applied, 5)
    for _ in range(2):
        victim = await asyncio.to_thread(leader_besides, cluster, "node-1")
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


def leader_besides(cluster: LocalCluster, name: str) -> str:
    """Another node that leads, once there is one."""
    others: set[str] = wait_until(
        lambda: set(leaders(cluster.urls[0], TOPIC).values()) - {name}, "others lead"
    )
    return max(others)


def coordinator_of(sink: str) -> int:
    """The partition of `_transactions` whose leader decides for a sink."""
    return Route.even(COORDINATORS).partition_of(logical_of_key(id_of(sink)))


async def test_a_job_that_is_pinned_ends_with_its_batch_though_its_leader_is_killed(
    cluster: LocalCluster,
) -> None:
    """Between the pin and the decision, which waits for a target that stands still. It never comes again."""
    async with laminar.aio.connect(cluster.urls, timeout=60.0) as client:
        orders = await client.create_topic("orders", partitions=PARTITIONS, replicas=3)
        await client.create_topic("results", partitions=1, replicas=1)
        channel = await orders.channel("work", timeout_ms=20_000, exist_ok=True)
        for partition in range(PARTITIONS):
            await orders.append(b"%d" % partition, partition=partition)
        sinks = [client.sink(f"worker-{number}") for number in range(COORDINATORS)]
        for sink in sinks:
            await sink.begin()
        names = {node.name: node.number for node in cluster.members}
        given: list[Job[bytes]] = []
        while len(given) < PARTITIONS:
            given += await channel.receive_batch(PARTITIONS, wait=5)
        holder, led, coordinators = await asyncio.to_thread(
            lambda: (
                leaders(cluster.urls[0], "results")[0],
                leaders(cluster.urls[0], "orders"),
                leaders(cluster.urls[0], SINKS),
            )
        )
        # Its coordinator is led elsewhere: else no job is pinned while that node stands still.
        sink = next(each for each in sinks if coordinators.get(coordinator_of(each.name), holder) != holder)
        job = next(each for each in given if led[each.partition] != holder)
        for each in given:
            if each is not job:
                await each.ack()
        # It has all its time again: on a slow machine that of its delivery may be nearly over.
        await job.extend()
        async with sink.stage(0) as stager:
            stager.append("results", b"result")
            await stager.ack(job)
        victim = led[job.partition]
        (third,) = (number for name, number in names.items() if name not in (holder, victim))
        parts = [
            {"topic": "results", "partition": 0, "stages": [*stager.staged.parts[1].stages]},
            {"topic": "orders", "partition": job.partition}
            | {"acks": [{"channel": "work", "tokens": [job.token]}]},
        ]
        signalled(cluster, names[holder], signal.SIGSTOP)
        try:
            # Asked of the third node: the client may ask the one that stands still, and wait for it.
            async with httpx.AsyncClient(base_url=cluster.urls[third], timeout=60, trust_env=False) as http:
                body = {"epoch": sink.epoch, "parts": parts}

                def begin() -> asyncio.Task[httpx.Response]:
                    return asyncio.create_task(http.put(f"/v1/sinks/{sink.name}/batches/0", json=body))

                async def is_undecided() -> bool:
                    """A target has not answered yet, and the node that was asked may not wait any longer."""
                    return not commit.done() or (await commit).status_code in (503, 504)

                commit = begin()
                async with asyncio.timeout(60):
                    while not (await http.get("/v1/topics/orders/channels/work")).json().get("pinned"):
                        assert await is_undecided(), (await commit).text
                        commit = begin() if commit.done() else commit
                await asyncio.to_thread(cluster.kill, names[victim])
                assert await is_undecided()
                commit.cancel()
        finally:
            signalled(cluster, names[holder], signal.SIGCONT)
        # `already` if the first request has got through by now.
        assert await sink.commit(0, [stager.staged]) in ("applied", "already")
        await asyncio.to_thread(cluster.restart, names[victim])

        assert [] == await channel.receive_batch(PARTITIONS, wait=22)
        async with asyncio.timeout(60):
            while (told := await channel.describe()).unanswered:
                pass
        assert (0, 0) == (told.depth, told.pinned)
        async with client.topic("results").read() as records:
            assert [b"result"] == [record.raw async for record in records]
