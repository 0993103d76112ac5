"""The window on a real cluster: leaders and copiers are killed, and each record is there once, in order."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys

import laminar
from laminar.testing.cluster import LocalCluster, get_json
from tests.cluster.copier import KEYS

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


def leader_of(cluster: LocalCluster, topic: str, *, asked: int) -> int:
    row = get_json(f"{cluster.urls[asked]}/v1/topics/{topic}/partitions/0", timeout=10)
    names = [node.name for node in cluster.members]
    return names.index(row["leader"]["node"])


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
                    leader = await asyncio.to_thread(leader_of, cluster, "window", asked=0)
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
    """Again and again until all is copied: each number once, in order per key."""
    rng = random.Random(11)
    with laminar.connect(cluster.urls, timeout=60.0) as client:
        client.create_topic("copy", partitions=4, replicas=3)
    command = [sys.executable, "-m", "tests.cluster.copier", ",".join(cluster.urls), "copy", "copier"]
    kills = 0
    resumed: list[int] = []
    while True:
        with subprocess.Popen([*command, str(NUMBERS)], stdout=subprocess.PIPE, text=True) as copier:
            assert copier.stdout is not None
            goal: int | None = None
            for line in copier.stdout:
                what, number = line.split()
                if what == "from":
                    resumed.append(int(number))
                    goal = int(number) + rng.randrange(100, 4_000)
                if what == "done":
                    assert NUMBERS == int(number)
                elif goal is not None and int(number) >= goal:
                    copier.kill()
                    kills += 1
                    break
        if copier.returncode == 0:
            break
        assert -9 == copier.returncode, "it ended by itself"

    assert kills >= 3, f"killed {kills} times only"
    assert resumed == sorted(resumed), "what is durable stays so"
    assert by_key(NUMBERS) == read_by_key(cluster, "copy")
