"""Consumers of a channel on three nodes, whose leaders are killed meanwhile."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import laminar
from laminar import aio
from laminar.client.consume.jobs import Job
from laminar.testing.cluster import LocalCluster
from tests.cluster.load import leaders

RECORDS = 600
KEYS = 24
PATIENCE_S = 300.0


async def test_jobs_are_worked_in_the_order_of_keys_over_the_death_of_leaders(cluster: LocalCluster) -> None:
    """None is lost; what was acknowledged never comes again; of a key one is out, in order."""
    handed: dict[bytes | None, list[int]] = defaultdict(list)
    acknowledged: set[bytes] = set()
    # Those whose acknowledgement had no answer: perhaps it was made, and they never come again.
    uncertain: set[bytes] = set()
    running: dict[bytes | None, tuple[int, int]] = {}
    half, done = asyncio.Event(), asyncio.Event()
    again = 0

    async def loop(jobs_of: aio.Channel[bytes]) -> None:
        """A consumer that acknowledges each job by itself."""

        async def one(job: Job[bytes]) -> None:
            nonlocal again
            assert job.raw not in acknowledged, f"{job} was done"
            assert job.fence > running.get(job.key, (-1, -1))
            running[job.key] = job.fence
            number = int(job.raw)
            if handed[job.key] and number == handed[job.key][-1]:
                again += 1
            else:
                handed[job.key].append(number)
            await asyncio.sleep(0.005)
            try:
                await job.ack()
            except laminar.Late:  # it changed nothing: the job comes again
                return
            except laminar.OutcomeUnknown:
                uncertain.add(job.raw)
            else:
                acknowledged.add(job.raw)
            if len(acknowledged | uncertain) >= RECORDS // 2:
                half.set()
            if len(acknowledged | uncertain) == RECORDS:
                done.set()

        await jobs_of.work(one, concurrency=8)

    async with (
        aio.connect(cluster.urls, timeout=60) as client,
        aio.connect(cluster.urls, timeout=60) as other,
    ):
        topic = await client.create_topic("t", partitions=2, replicas=3)
        # Long enough that none comes again because a machine stood still.
        first = await topic.channel("c", order="key", timeout_ms=10_000, retry_ms=10, max_attempts=0)
        second = await other.topic("t").channel("c")
        async with topic.producer() as producer:
            for number in range(RECORDS):
                producer.send(b"%d" % number, key=f"k{number % KEYS}")
        workers = [asyncio.create_task(loop(first)), asyncio.create_task(loop(second))]
        async with asyncio.timeout(PATIENCE_S):
            while len(acknowledged) < RECORDS // 4:
                await asyncio.wait({*workers}, timeout=0.02)
            led = await asyncio.to_thread(leaders, cluster.urls[0], "t")
            victim = next(node.number for node in cluster.members if node.name == led[0])
            await asyncio.to_thread(cluster.kill, victim)
            await asyncio.wait(
                {*workers, ended := asyncio.create_task(half.wait())}, return_when="FIRST_COMPLETED"
            )
            ended.cancel()
            await asyncio.to_thread(cluster.restart, victim)
            await asyncio.wait(
                {*workers, ended := asyncio.create_task(done.wait())}, return_when="FIRST_COMPLETED"
            )
            ended.cancel()
            while (described := await first.describe()).depth and not any(each.done() for each in workers):
                await asyncio.wait({*workers}, timeout=0.1)
        first.close()
        second.close()
        await asyncio.gather(*workers)

    assert {f"k{key}".encode(): list(range(key, RECORDS, KEYS)) for key in range(KEYS)} == handed
    assert (0, 0, 0, 0) == (described.depth, described.out, described.aside, described.dead)
    assert again <= 4 * 16, "more came again than was out at the deaths"
