"""Jobs of a channel, received and acknowledged, beside NATS JetStream; an acknowledgement beside an append.

    make bench-channels

Three nodes of each system on this machine, one topic or stream with three replicas, records of 1 KiB; all
that is acknowledged is synced on a majority (JetStream: `sync_interval: always`). Consumers share the queue:
each asks for 100 jobs, acknowledges each by itself and waits for the answer (JetStream: `ack_sync`), and asks
again. By turns:

* jobs: jobs a second, received and acknowledged, of records that are there before;
* ack: the time of an acknowledgement of one job beside that of an append, one at a time;
* work: jobs that take 50 ms each, of 200 keys in two partitions, worked off by 16 slots: jobs a second beside
  what 16 slots can do at most, in order by key and without order. One key's jobs always fail in a third run:
  beside the second, it shows what a poisoned key costs the others.

A record that is received twice ends it with an error. NATS is left out, and it says so, if its server or its
library is not in `build/peers`. `--quick` is the same with few jobs, and measures nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benches import floors, on_disk
from laminar.aio import Client, connect
from laminar.testing.cluster import LocalCluster

PEERS = Path("build/peers")
VALUE = os.urandom(1024)
NODES = 3
FETCH = 100
PATIENCE_S = 60.0
SLOTS = 16
WORK_S = 0.05
KEYS = 200


def free_ports(count: int) -> list[int]:
    """Return ports on which nothing listens now."""
    with contextlib.ExitStack() as held:
        found = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


async def laminar_jobs(client: Client, name: str, *, jobs: int, consumers: int) -> float:
    """Return jobs a second of a new topic and channel."""
    topic = await client.create_topic(name, partitions=3, replicas=NODES)
    channel = await topic.channel("work", exist_ok=True)
    async with topic.producer() as producer:
        await producer.send_all((None, VALUE) for _ in range(jobs))
    seen: set[tuple[int, int]] = set()

    async def consume() -> None:
        while len(seen) < jobs:
            batch = await channel.receive_batch(FETCH, wait=0.5)
            await asyncio.gather(*(job.ack() for job in batch))
            for job in batch:
                assert (job.partition, job.offset) not in seen, "it was received twice"
                seen.add((job.partition, job.offset))

    began_s = time.perf_counter()
    await asyncio.gather(*(consume() for _ in range(consumers)))
    return jobs / (time.perf_counter() - began_s)


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


async def _ignore(error: Exception) -> None:
    """Leave out that a server is not there yet."""


@asynccontextmanager
async def nats_cluster(folder: Path) -> AsyncIterator[Any]:
    """Start three NATS servers with JetStream, each with its own folder; yield a connection to them."""
    nats = importlib.import_module("nats")
    found = free_ports(2 * NODES)
    ports, routes = found[:NODES], found[NODES:]
    servers = []
    for number in range(NODES):
        store = folder / f"nats-{number}"
        store.mkdir(parents=True)
        settings = store / "nats.conf"
        peers = ", ".join(f'"nats://127.0.0.1:{port}"' for port in routes)
        settings.write_text(
            f'server_name: n{number}\nlisten: "127.0.0.1:{ports[number]}"\n'
            f'jetstream {{ store_dir: "{store}", sync_interval: always }}\n'
            f'cluster {{ name: bench, listen: "127.0.0.1:{routes[number]}", routes: [{peers}] }}\n'
        )
        with (store / "log").open("wb") as log:
            servers.append(
                await asyncio.create_subprocess_exec(
                    PEERS / "bin" / "nats-server", "-c", settings, stdout=log, stderr=log
                )
            )
    connection = None
    try:
        deadline_s = time.perf_counter() + PATIENCE_S
        while connection is None:
            try:
                connection = await nats.connect(
                    [f"nats://127.0.0.1:{port}" for port in ports], error_cb=_ignore
                )
                await connection.jetstream().account_info()
            except Exception:
                if connection is not None:
                    await connection.close()
                    connection = None
                if time.perf_counter() > deadline_s:
                    raise
                await asyncio.sleep(0.2)
        yield connection
    finally:
        if connection is not None:
            await connection.close()
        for server in servers:
            server.terminate()
            await server.wait()


async def nats_jobs(connection: Any, name: str, *, jobs: int, consumers: int) -> float:
    """Return jobs a second of a new stream and its pull consumer."""
    stream = connection.jetstream(timeout=PATIENCE_S)
    deadline_s = time.perf_counter() + PATIENCE_S
    while True:
        try:
            await stream.add_stream(name=name, subjects=[name], num_replicas=NODES, storage="file")
            break
        except Exception:
            if time.perf_counter() > deadline_s:
                raise
            await asyncio.sleep(0.2)
    for first in range(0, jobs, 256):
        await asyncio.gather(*(stream.publish(name, VALUE) for _ in range(first, min(jobs, first + 256))))
    seen: set[int] = set()
    puller = await stream.pull_subscribe(name, durable="work")

    async def consume() -> None:
        while len(seen) < jobs:
            with contextlib.suppress(TimeoutError):
                batch = await puller.fetch(FETCH, timeout=0.5)
                await asyncio.gather(*(message.ack_sync(timeout=PATIENCE_S) for message in batch))
                seen.update(message.metadata.sequence.stream for message in batch)

    began_s = time.perf_counter()
    await asyncio.gather(*(consume() for _ in range(consumers)))
    return jobs / (time.perf_counter() - began_s)


def shown(rates: list[float]) -> str:
    """Return the median of rates, and all of them."""
    return f"{statistics.median(rates):,.0f} ({', '.join(f'{each:,.0f}' for each in rates)})"


def has_nats() -> bool:
    """Return whether the server and the library of NATS are there; make the library importable."""
    if not (PEERS / "bin" / "nats-server").exists():
        return False
    sys.path.append(str(PEERS))
    return True


async def measure(cluster: LocalCluster, given: Any, folder: Path) -> dict[str, float]:
    """Measure all of it, by turns, and print."""
    logging.getLogger("laminar.client").setLevel(logging.ERROR)  # of each failure of a poisoned job
    figures: dict[str, float] = {}
    ours: list[float] = []
    theirs: list[float] = []
    sizes = {"jobs": given.jobs, "consumers": given.consumers}
    async with contextlib.AsyncExitStack() as stack:
        client = await stack.enter_async_context(connect(cluster.urls, timeout=PATIENCE_S))
        nats = await stack.enter_async_context(nats_cluster(folder)) if has_nats() else None
        for number in range(given.rounds):
            ours.append(await laminar_jobs(client, f"jobs-{number}", **sizes))
            if nats is not None:
                theirs.append(await nats_jobs(nats, f"jobs-{number}", **sizes))
        figures["jobs_per_s"] = statistics.median(ours)
        beside = "NATS is not there: `make bench-channels` installs it"
        if theirs:
            figures["nats_jobs_per_s"] = statistics.median(theirs)
            figures["jobs_ratio"] = figures["jobs_per_s"] / figures["nats_jobs_per_s"]
            beside = f"NATS JetStream {shown(theirs)}; ratio {figures['jobs_ratio']:.2f}, must 1, aim 2"
        print(f"jobs/s received and acknowledged: {shown(ours)}; {beside}", flush=True)
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
    parser = on_disk.parser("python -m benches.bench_channels", __doc__)
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
