"""The window on a real cluster: leaders and copiers are killed, and each record is there once, in order."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import laminar
from laminar.testing.cluster import LocalCluster
from tests.cluster.copier import KEYS
from tests.cluster.load import leaders

NUMBERS = 20_000


def read_by_key(cluster: LocalCluster, topic: str) -> dict[bytes | None, list[int]]:
    """The numbers of each key, in the order in which they lie in its partition."""
    found: dict[bytes | None, list[int]] = {}
    with laminar.connect(cluster.urls, timeout=60.0) as client:
        for record in client.topic(topic).read():
            found.setdefault(record.key, []).append(int(record.raw))
    return found


def by_key(total: int) -> dict[bytes, list[int]]:
    """As the source has them."""
    return {b"key %d" % key: [n for n in range(1, total + 1) if n % KEYS == key] for key in range(KEYS)}


def leader_of(cluster: LocalCluster, topic: str) -> int:
    names = [node.name for node in cluster.members]
    return names.index(leaders(cluster.urls[0], topic)[0])


async def test_what_a_killed_leader_had_accepted_is_neither_lost_nor_doubled(cluster: LocalCluster) -> None:
    """Two leaders in turn are killed with batches accepted and not durable."""
    async with laminar.aio.connect(cluster.urls, timeout=60.0) as client:
        await client.create_topic("window", partitions=3, replicas=3)
        topic = client.topic("window")
        kills = {4_000, 10_000}
        dead: list[int] = []
        async with topic.producer(name="copy", batch_bytes=2_000, buffer_bytes=40_000) as producer:
            for number in range(1, NUMBERS + 1):
                producer.send(b"%d" % number, key=b"key %d" % (number % KEYS), number=number)
                if number in kills:
                    if dead:
                        back = dead.pop()
                        await asyncio.to_thread(cluster.restart, back)
                    leader = await asyncio.to_thread(leader_of, cluster, "window")
                    cluster.kill(leader)
                    dead.append(leader)
                elif not producer.has_room():
                    await producer.room()
            await producer.accepted()
            await producer.durable()
            assert NUMBERS == producer.checkpoint
            assert 0 < producer.statistics()["resent"]

    assert by_key(NUMBERS) == read_by_key(cluster, "window")


def test_a_copier_that_is_killed_at_any_point_goes_on_without_doubling(cluster: LocalCluster) -> None:
    """Again and again until all is copied: each number once, in order per key.

    There is more to copy if it was killed too rarely, as on a machine where it is looked at late.
    """
    rng = random.Random(11)
    with laminar.connect(cluster.urls, timeout=60.0) as client:
        client.create_topic("copy", partitions=4, replicas=3)
    command = [sys.executable, "-m", "tests.cluster.copier", ",".join(cluster.urls), "copy", "copier"]
    kills, total = 0, NUMBERS
    resumed: list[int] = []
    while True:
        with subprocess.Popen([*command, str(total)], stdout=subprocess.PIPE, text=True) as copier:
            assert copier.stdout is not None
            goal: int | None = None
            for line in copier.stdout:
                what, number = line.split()
                if what == "from":
                    resumed.append(int(number))
                    goal = int(number) + rng.randrange(100, 4_000)
                if what == "done":
                    assert total == int(number)
                elif goal is not None and int(number) >= goal:
                    copier.kill()
                    kills += 1
                    break
        assert copier.returncode in (0, -9), "it ended by itself"
        if copier.returncode == 0 and kills >= 3:
            break
        if copier.returncode == 0:
            total += NUMBERS

    assert resumed == sorted(resumed), "what is durable stays so"
    assert by_key(total) == read_by_key(cluster, "copy")
