"""Keys out of order while a topic grows from one partition to eight, beside Kafka's `--alter --partitions`.

    python -m benches.queues.bench_order

Three nodes (brokers) on this machine, three replicas. A producer sends the numbers 1, 2, 3... of each key,
all keys by turns, and a group of two consumers reads them, a batch at a time and a little slower than they
come. Meanwhile the number of partitions is doubled three times. A record is out of order when the group was
given one of the same key with a higher number before.

It ends with 1 if a key of Laminar's is out of order or has lost a record. Without Kafka's jars it says so.
`--quick` is the same with fewer records.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from benches.common import floors, on_disk
from benches.queues import queue_kafka
from benches.queues.queues import NODES, PATIENCE_S, PEERS
from laminar.aio import Topic, connect
from laminar.testing.cluster import LocalCluster

KEYS = 100
MEMBERS = 2
DOUBLINGS = 3
BATCH = 50
"""Records of one turn of a consumer, which takes `TURN_S` for them."""
TURN_S = 0.04
LIMIT_S = 300.0


class Reading:
    """What a group of consumers was given, in the order in which it was."""

    def __init__(self) -> None:
        self.highest: Counter[bytes] = Counter()
        self.seen: set[tuple[bytes, int]] = set()
        self.late = 0
        self.keys: set[bytes] = set()

    def take(self, key: bytes, number: int) -> None:
        """Note a record."""
        self.seen.add((key, number))
        if number < self.highest[key]:
            self.late += 1
            self.keys.add(key)
        self.highest[key] = max(self.highest[key], number)


class Growing(Protocol):
    """A topic of one of the systems."""

    async def send(self, key: bytes, number: int) -> None:
        """Send a record; it need not be acknowledged yet."""

    async def sent(self) -> None:
        """Wait until all is acknowledged."""

    async def double(self) -> None:
        """Double the number of partitions, and return when that is in force."""

    async def read(self, reading: Reading) -> None:
        """Read as a member of the group, for ever."""


class Ours:
    """A topic of Laminar."""

    def __init__(self, topic: Topic[bytes], producer: Any) -> None:
        self._topic = topic
        self._producer = producer

    async def send(self, key: bytes, number: int) -> None:
        await self._producer.room()
        self._producer.send(b"%d" % number, key=key)

    async def sent(self) -> None:
        await self._producer.wait()

    async def double(self) -> None:
        for number in (await self._topic.route()).ranges:
            await self._topic.split(number)

    async def read(self, reading: Reading) -> None:
        async with self._topic.subscribe("readers") as records:
            count = 0
            async for record in records:
                assert record.key is not None
                reading.take(record.key, int(record.value))
                count += 1
                if count % BATCH == 0:
                    await asyncio.sleep(TURN_S)
                    await records.commit()


class Kafkas:
    """A topic of Kafka. The library asks for changes of its partitions each 0.2 s, not each five minutes."""

    def __init__(self, servers: dict[str, Any], topic: str) -> None:
        self._kafka = importlib.import_module("confluent_kafka")
        self._admin = importlib.import_module("confluent_kafka.admin")
        self._topic = topic
        self._servers = servers | {"topic.metadata.refresh.interval.ms": 200}
        self._producer = self._kafka.Producer(
            self._servers | {"acks": "all", "enable.idempotence": True, "partitioner": "murmur2_random"}
        )
        self._partitions = 1
        self._client = self._admin.AdminClient(self._servers)
        self._client.create_topics([self._admin.NewTopic(topic, 1, NODES)])[topic].result(PATIENCE_S)

    async def send(self, key: bytes, number: int) -> None:
        self._producer.produce(self._topic, b"%d" % number, key=key)
        self._producer.poll(0)

    async def sent(self) -> None:
        assert await asyncio.to_thread(self._producer.flush, PATIENCE_S) == 0

    async def double(self) -> None:
        self._partitions *= 2
        wanted = self._admin.NewPartitions(self._topic, self._partitions)
        await asyncio.to_thread(self._client.create_partitions([wanted])[self._topic].result, PATIENCE_S)

    async def read(self, reading: Reading) -> None:
        consumer = self._kafka.Consumer(
            self._servers | {"group.id": "readers", "auto.offset.reset": "earliest"}
        )
        consumer.subscribe([self._topic])
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1) as thread:
            try:
                while True:
                    batch = await loop.run_in_executor(thread, consumer.consume, BATCH, 0.5)
                    for message in batch:
                        if message.error() is None:
                            reading.take(message.key(), int(message.value()))
                    await asyncio.sleep(TURN_S if batch else 0.0)
            finally:
                await loop.run_in_executor(thread, consumer.close)


async def grow(topic: Growing, *, rounds: int, pause_s: float) -> Reading:
    """Send `rounds` numbers of each key, double the partitions meanwhile, and return what the group read."""
    reading = Reading()
    readers = [asyncio.create_task(topic.read(reading)) for _ in range(MEMBERS)]

    async def send() -> None:
        for number in range(1, rounds + 1):
            for key in range(KEYS):
                await topic.send(b"key%d" % key, number)
            await asyncio.sleep(pause_s)

    sending = asyncio.create_task(send())
    try:
        for _ in range(DOUBLINGS):
            await asyncio.sleep(rounds * pause_s / (DOUBLINGS + 1))
            await topic.double()
        await sending
        await topic.sent()
        deadline_s = time.perf_counter() + LIMIT_S
        while len(reading.seen) < rounds * KEYS and time.perf_counter() < deadline_s:
            failed = [each for each in readers if each.done()]
            assert not failed, failed
            await asyncio.sleep(0.1)
    finally:
        for task in (sending, *readers):
            task.cancel()
        await asyncio.gather(sending, *readers, return_exceptions=True)
    return reading


@asynccontextmanager
async def ours(folder: Path) -> AsyncIterator[Growing]:
    """Three nodes of Laminar, and a topic."""
    with LocalCluster(folder / "cluster", nodes=NODES, settings={"pin": "off"}) as cluster:
        async with connect(cluster.urls, timeout=PATIENCE_S) as client:
            topic = await client.create_topic("grows", partitions=1, replicas=NODES)
            async with topic.producer() as producer:
                yield Ours(topic, producer)


@asynccontextmanager
async def kafka(folder: Path) -> AsyncIterator[Growing]:
    """Three brokers of Kafka, and a topic."""
    async with queue_kafka.start(folder) as topics:
        yield Kafkas(topics.servers, "grows")


async def measure(folder: Path, *, rounds: int, pause_s: float) -> dict[str, float]:
    """Return the figures; print them as they come."""
    sys.path.append(str(PEERS))
    figures: dict[str, float] = {}
    sides: dict[str, Callable[[Path], contextlib.AbstractAsyncContextManager[Growing]]] = {"laminar": ours}
    if missing := queue_kafka.missing():
        print(f"Kafka is left out: {missing}")
    else:
        sides["kafka"] = kafka
    for name, start in sides.items():
        async with start(folder) as topic:
            reading = await grow(topic, rounds=rounds, pause_s=pause_s)
        lost = rounds * KEYS - len(reading.seen)
        figures |= {f"{name}_late": reading.late, f"{name}_keys": len(reading.keys), f"{name}_lost": lost}
        print(
            f"{name}: {rounds * KEYS:,} records of {KEYS} keys while partitions went from 1 to "
            f"{2**DOUBLINGS}: {reading.late:,} out of order, of {len(reading.keys)} keys; {lost} never read",
            flush=True,
        )
    return figures


def main() -> int:
    """Run it and print; 1 if a key of ours was out of order, or lost a record."""
    parser = on_disk.parser("python -m benches.queues.bench_order", __doc__)
    parser.add_argument("--rounds", type=int, default=400, help="records of each key")
    given = parser.parse_args()
    rounds = 40 if given.quick else given.rounds
    print(
        f"{os.cpu_count()} CPUs, {platform.release()}, Python {platform.python_version()},"
        f" uvloop {version('uvloop')}, {on_disk.filesystem(given.directory)}; {NODES} nodes, a producer and "
        f"{MEMBERS} consumers on this machine; 3 replicas, each append synced",
        flush=True,
    )
    figures: dict[str, float] = {}
    with on_disk.folder(given.directory, "order-") as folder:

        async def run() -> None:
            figures.update(await measure(folder, rounds=rounds, pause_s=0.04))

        floors.run_loop(run())
    print("bench-order: " + " ".join(f"{name}={value:.4g}" for name, value in figures.items()))
    return 1 if figures["laminar_late"] or figures["laminar_lost"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
