"""Producers and readers over changes of a route, on real nodes, of which leaders are killed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from typing import Any

import pytest

import laminar
from laminar.testing.cluster import LocalCluster
from tests.cluster.load import leaders

# For a change, and for a reader that follows, of whose nodes one starts again meanwhile.
PATIENCE_S = 180
KEYS = [f"key {number}" for number in range(20)]
# Between two bursts. A change and a kill meet a full load; a node that starts has the CPUs.
PAUSE_S, CALM_PAUSE_S = 0.025, 0.1


def check(sent: list[tuple[str, int]], read: list[Any], what: str) -> None:
    """Lost 0, doubled 0, and of each key the order of sending."""
    found: dict[str, list[int]] = defaultdict(list)
    for record in read:
        found[record.key.decode()].append(int(record.value))
    values = [number for numbers in found.values() for number in numbers]
    lost = {number for _, number in sent} - set(values)
    doubled = [number for number, count in Counter(values).items() if count > 1]
    disordered = [key for key, numbers in found.items() if numbers != sorted(numbers)]
    assert (set(), [], []) == (lost, doubled, disordered), what


def leader_of(cluster: LocalCluster, topic: str, number: int) -> int:
    name = leaders(cluster.urls[0], topic)[number]
    return next(at for at, node in enumerate(cluster.members) if node.name == name)


class Sending:
    """A producer in a task, and all that it sent; each record has its receipt at the end."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.sent: list[tuple[str, int]] = []
        self.stop = asyncio.Event()
        self.pause_s = PAUSE_S

    async def run(self, topic: Any) -> None:
        async with topic.producer(name=self.name, timeout=60) as producer:
            while not self.stop.is_set():
                key = random.choice(KEYS)
                number = len(self.sent) + 1
                self.sent.append((key, number))
                producer.send(b"%d" % number, key, number=number if self.name else None)
                if number % 25 == 0:
                    await producer.room()
                    await asyncio.sleep(self.pause_s)


@pytest.mark.parametrize("name", [None, "copier"], ids=["plain", "named"])
@pytest.mark.parametrize("flush", ["commit", "interval"])
async def test_clients_go_over_changes_while_leaders_are_killed(
    cluster: LocalCluster, flush: str, name: str | None
) -> None:
    """A split, a merge and a move under load; the leader of an input is killed at the second and third."""
    async with laminar.aio.connect(cluster.urls, timeout=60) as client:
        topic = await client.create_topic("routed", partitions=2, replicas=3, settings={"flush": flush})
        sending = Sending(name)
        read: list[Any] = []

        async def follow() -> None:
            async for record in topic.read("earliest", follow=True):
                read.append(record)

        tasks = [asyncio.create_task(sending.run(topic)), asyncio.create_task(follow())]

        async def until_read(count: int) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while len(read) < count:
                    failed = [task for task in tasks if task.done() and task.exception()]
                    assert not failed, failed[0].exception()
                    await asyncio.sleep(0.02)

        await until_read(500)
        await topic.split(0, wait=PATIENCE_S)
        await until_read(len(sending.sent))
        changes: list[tuple[int, Any]] = [
            (3, lambda: topic.merge([2, 3], wait=PATIENCE_S)),
            (1, lambda: topic.move(1, wait=PATIENCE_S)),
        ]
        for number, change in changes:
            victim = await asyncio.to_thread(leader_of, cluster, "routed", number)
            changing = asyncio.create_task(change())
            await asyncio.sleep(random.random() * 0.3)
            await asyncio.to_thread(cluster.kill, victim)
            # A change that needs its replicas waits for them: without the node it would be cancelled.
            sending.pause_s = CALM_PAUSE_S
            await asyncio.to_thread(cluster.restart, victim)
            sending.pause_s = PAUSE_S
            await changing
            await until_read(len(sending.sent))
        sending.stop.set()
        await tasks[0]
        await until_read(len(sending.sent))
        tasks[1].cancel()
        await asyncio.gather(tasks[1], return_exceptions=True)
        check(sending.sent, read, "a reader that follows")
        check(sending.sent, [record async for record in topic.read()], "a bounded read")
        # Fetches at the final end of an input do not wait, whoever answers: else three would take longer.
        sealed: set[str] = set()
        end = (await topic.offsets())[0]
        async with asyncio.timeout(80):
            while len(sealed) < 3:
                for replica in range(3):
                    answer = await client.session.fetch(
                        "routed", 0, offset=end, max_bytes=1 << 20, wait_ms=30_000, only=replica
                    )
                    assert str(end) == answer.headers["laminar-sealed"]
                    sealed.add(answer.headers["laminar-node"])
