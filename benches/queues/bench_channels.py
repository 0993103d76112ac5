"""Jobs of a channel, received and acknowledged, beside other queues; an acknowledgement beside an append.

    make bench-channels

Three nodes on this machine, one topic with three replicas, records of 1 KiB; all that is acknowledged is
synced on a majority. Consumers share the queue: each takes up to 100 jobs, acknowledges each by itself, waits
for all answers, and takes more. By turns:

* jobs: jobs a second, received and acknowledged, of records that are there before, from the first batch on;
  beside NATS JetStream (`queue_nats`), Kafka's share groups (`queue_kafka`), Redis streams (`queue_redis`);
* ack: the time of an acknowledgement of one job beside that of an append, one at a time;
* work: jobs that take 50 ms each, of 200 keys in two partitions, worked off by 16 slots: jobs a second beside
  what 16 slots can do at most, in order by key and without order. One key's jobs always fail in a third run:
  beside the second, it shows what a poisoned key costs the others.

A record that is received twice ends it with an error. A peer that is not there is left out, and it says so.
`--quick` is the same with few jobs, and measures nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import statistics
import time
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benches.common import floors, on_disk
from benches.queues.queue_peers import peers
from benches.queues.queues import (
    EMPTY_S,
    FETCH,
    NODES,
    PATIENCE_S,
    VALUE,
    Queue,
    Work,
    jobs_per_s,
)
from laminar.aio import Client, connect
from laminar.testing.cluster import LocalCluster

GOALS = {"nats": "must 1, aim 2", "kafka": "must 1", "redis": "must 0.3, it is not replicated"}
SLOTS = 16
WORK_S = 0.05
KEYS = 200


class Channels:
    """Channels of a cluster of Laminar, each of a topic of its own."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def fill(self, name: str, jobs: int) -> None:
        """Make a topic and its channel."""
        topic = await self._client.create_topic(name, partitions=3, replicas=NODES)
        await topic.channel("work", exist_ok=True)
        async with topic.producer() as producer:
            await producer.send_all((None, VALUE) for _ in range(jobs))

    @asynccontextmanager
    async def worker(self, name: str) -> AsyncIterator[Work]:
        """Return a consumer."""
        channel = await self._client.topic(name).channel("work", exist_ok=True)

        async def work() -> Sequence[Hashable]:
            batch = await channel.receive_batch(FETCH, wait=EMPTY_S)
            await asyncio.gather(*(job.ack() for job in batch))
            return [(job.partition, job.offset) for job in batch]

        yield work


async def laminar_acks(client: Client, *, count: int) -> tuple[list[float], list[float]]:
    """Return how long acknowledgements of one job, and appends of one record, took in ms, by turns."""
    topic = await client.create_topic("acks", partitions=1, replicas=NODES)
    channel = await topic.channel("work", exist_ok=True)
    acks, appends = [], []
    for _ in range(count):
        began_s = time.perf_counter()
        await topic.append(VALUE, partition=0)
        appends.append((time.perf_counter() - began_s) * 1000)
        (job,) = await channel.receive_batch(1, wait=PATIENCE_S)
        began_s = time.perf_counter()
        await job.ack()
        acks.append((time.perf_counter() - began_s) * 1000)
    return acks, appends


async def laminar_work(client: Client, name: str, *, jobs: int, order: str, poisoned: bool = False) -> float:
    """Return jobs a second that slots work off, as a share of what they can do at most."""
    topic = await client.create_topic(name, partitions=2, replicas=NODES)
    channel = await topic.channel("work", order=order, exist_ok=True, retry_ms=100)
    async with topic.producer() as producer:
        await producer.send_all((b"%d" % (number % KEYS), b"%d" % number) for number in range(jobs))
    last: dict[bytes, int] = {}
    left = jobs - (jobs // KEYS if poisoned else 0)
    finished = asyncio.Event()
    ended_s = 0.0

    async def handle(job: Any) -> None:
        nonlocal left, ended_s
        if poisoned and job.key == b"7":
            raise ValueError("poisoned")
        await asyncio.sleep(WORK_S)
        number = int(job.value)
        if order == "key":
            assert last.get(job.key, -1) < number, "a key is out of order"
            last[job.key] = number
        left -= 1
        ended_s = time.perf_counter()
        if not left:
            finished.set()

    began_s = time.perf_counter()
    working = asyncio.create_task(channel.work(handle, concurrency=SLOTS))
    await asyncio.wait_for(finished.wait(), PATIENCE_S)
    working.cancel()
    await asyncio.wait([working])
    done = jobs - (jobs // KEYS if poisoned else 0)
    return done / (ended_s - began_s) / (SLOTS / WORK_S)


def shown(rates: list[float]) -> str:
    """Return the median of rates, and all of them."""
    return f"{statistics.median(rates):,.0f} ({', '.join(f'{each:,.0f}' for each in rates)})"


async def measure_jobs(client: Client, given: Any, folder: Path) -> dict[str, float]:
    """Measure jobs a second of each side by turns, after a short round of each, and print."""
    beside = peers("bench-channels")
    rates: dict[str, list[float]] = {name: [] for name in ("laminar", *beside)}
    async with contextlib.AsyncExitStack() as stack:
        sides: dict[str, Queue] = {"laminar": Channels(client)}
        for name, peer in beside.items():
            sides[name] = await stack.enter_async_context(peer.start(folder))
        for side in sides.values():
            await jobs_per_s(side, "warm", jobs=given.jobs // 10, consumers=given.consumers)
        for number in range(given.rounds):
            for name, side in sides.items():
                rate = await jobs_per_s(side, f"jobs-{number}", jobs=given.jobs, consumers=given.consumers)
                rates[name].append(rate)
                print(f"round {number}, {name}: {rate:,.0f} jobs/s", flush=True)
    print(f"jobs/s received and acknowledged: Laminar {shown(rates['laminar'])}", flush=True)
    figures = {"jobs_per_s": statistics.median(rates["laminar"])}
    for name, peer in beside.items():
        theirs = statistics.median(rates[name])
        ratio = figures["jobs_per_s"] / theirs
        figures |= {f"{name}_jobs_per_s": theirs, f"{name}_ratio": ratio}
        print(f"  {peer.TITLE} {shown(rates[name])}: ratio {ratio:.2f}, {GOALS[name]}", flush=True)
    return figures


async def measure(cluster: LocalCluster, given: Any, folder: Path) -> dict[str, float]:
    """Measure all of it and print."""
    logging.getLogger("laminar.client").setLevel(logging.ERROR)  # of each failure of a poisoned job
    async with connect(cluster.urls, timeout=PATIENCE_S) as client:
        figures = await measure_jobs(client, given, folder)
        acks, appends = await laminar_acks(client, count=given.acks)
        for name, percent in (("p50", 0.5), ("p99", 0.99)):
            ack, append = (floors.percentile(sorted(each), percent) for each in (acks, appends))
            figures |= {f"ack_{name}_ms": ack, f"ack_{name}_ratio": ack / append}
            print(f"ack {name} {ack:.2f} ms, append {append:.2f} ms: ratio {ack / append:.2f}", flush=True)
        for name, order, poisoned in (
            ("key", "key", False),
            ("none", "none", False),
            ("poisoned", "key", True),
        ):
            share = await laminar_work(
                client, f"work-{name}", jobs=given.work, order=order, poisoned=poisoned
            )
            figures[f"work_{name}"] = share
            print(f"work, {SLOTS} slots of {WORK_S * 1000:.0f} ms, {name}: {share:.2f}, aim 0.9", flush=True)
    return figures


def main() -> int:
    """Run it and print."""
    parser = on_disk.parser("python -m benches.queues.bench_channels", __doc__)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--consumers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--acks", type=int, default=500)
    parser.add_argument("--work", type=int, default=4_000)
    parser.add_argument("--shards", type=int, default=1)
    given = parser.parse_args()
    if given.quick:
        given.jobs, given.rounds, given.acks, given.work = 300, 1, 10, 400
    print(
        f"{os.cpu_count()} CPUs, {platform.release()}, Python {platform.python_version()},"
        f" uvloop {version('uvloop')}, {on_disk.filesystem(given.directory)}; {NODES} nodes of "
        f"{given.shards} shard(s), {given.consumers} consumers in one program on this machine; 3 replicas, "
        "flush=commit",
        flush=True,
    )
    with (
        on_disk.folder(given.directory, "channels-") as folder,
        LocalCluster(
            folder / "cluster", nodes=NODES, shards=given.shards, settings={"pin": "off"}
        ) as cluster,
    ):
        figures: dict[str, float] = {}

        async def run() -> None:
            figures.update(await measure(cluster, given, folder))

        floors.run_loop(run())
    print("bench-channels: " + " ".join(f"{name}={value:.4g}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
