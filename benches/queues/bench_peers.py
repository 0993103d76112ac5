"""Appends and reads beside other logs: NATS JetStream, Kafka, Redis streams, by turns in one run.

    make bench-peers

Three servers of each on this machine (Redis: one, not replicated), three partitions (streams) with three
replicas, records of 1 KiB, all that is acknowledged synced: by a majority, at each append. The client is
Python, one program, each system's own library:

* produce: records a second of a batch, as fast as the library sends it, to the last acknowledgement;
* cpu: CPU time of all servers and this program for each record of that;
* inflight: records a second with 256 single appends under way at any time;
* single: the time of an append that waits for the one before it, p50 and p99;
* consume: records a second read from the beginning, a Python value for each.

A ratio over 1 says that Laminar is better. A peer that is not there is left out, and it says so. `--quick` is
the same with few records, and measures nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import statistics
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benches.common import floors, leaders, on_disk
from benches.common.usage import cpu_s
from benches.queues.queue_peers import peers
from benches.queues.queues import NODES, PARTITIONS, PATIENCE_S, VALUE, Log, Send
from laminar.aio import Client, connect
from laminar.testing.cluster import LocalCluster

UNDER_WAY = 256
MOST_IS_BEST = {"produce": True, "cpu": False, "inflight": True, "p50": False, "p99": False, "consume": True}
TITLES = {
    "produce": "batched produce, records/s",
    "cpu": "CPU of servers and client, us a record",
    "inflight": f"{UNDER_WAY} single appends under way, records/s",
    "p50": "one append at a time, p50 ms",
    "p99": "one append at a time, p99 ms",
    "consume": "consume, records/s",
}
GOALS = {
    "produce": "aim 10",
    "cpu": "aim 10",
    "inflight": "aim 5",
    "p50": "must 1, aim 1.5",
    "consume": "aim 10",
}
"""For the ratio to NATS JetStream."""


class Topics:
    """Topics of a cluster of Laminar."""

    def __init__(self, client: Client, pids: Sequence[int]) -> None:
        self.pids = pids
        self._client = client

    async def make(self, name: str) -> None:
        """Make a topic, and wait until its leaders stay."""
        made = await self._client.create_topic(name, partitions=PARTITIONS, replicas=NODES)
        await leaders.settled(self._client, made)

    async def send_all(self, name: str, records: int) -> None:
        """Send by an idempotent producer."""
        async with self._client.topic(name).producer() as producer:
            await producer.send_all((None, VALUE) for _ in range(records))

    @asynccontextmanager
    async def sender(self, name: str) -> AsyncIterator[Send]:
        """Return what appends one record."""
        async with self._client.topic(name).producer() as producer:
            yield lambda partition: producer.send(VALUE, partition=partition)

    async def read_all(self, name: str) -> int:
        """Read all partitions."""
        read = 0
        async for batch in self._client.topic(name).read().batches():
            read += sum(len(record.value) > 0 for record in batch)
        return read


async def measured(side: Log, name: str, given: Any) -> dict[str, float]:
    """Return the figures of one round of a system, in a new topic."""
    await side.make(name)
    before_s, began_s = cpu_s(side.pids) + time.process_time(), time.perf_counter()
    await side.send_all(name, given.records)
    found = {"produce": given.records / (time.perf_counter() - began_s)}
    found["cpu"] = (cpu_s(side.pids) + time.process_time() - before_s) / given.records * 1e6
    async with side.sender(name) as send:

        async def one_after_another(number: int, count: int) -> None:
            for _ in range(count):
                await send(number % PARTITIONS)

        each = max(1, given.flight // UNDER_WAY)
        await asyncio.gather(*(one_after_another(number, 1) for number in range(UNDER_WAY)))
        began_s = time.perf_counter()
        await asyncio.gather(*(one_after_another(number, each) for number in range(UNDER_WAY)))
        found["inflight"] = each * UNDER_WAY / (time.perf_counter() - began_s)
        took_ms = []
        for _ in range(given.single):
            began_s = time.perf_counter()
            await send(0)
            took_ms.append((time.perf_counter() - began_s) * 1000)
        found["p50"], found["p99"] = (floors.percentile(took_ms, share) for share in (0.5, 0.99))
    written = given.records + (1 + each) * UNDER_WAY + given.single
    began_s = time.perf_counter()
    read = await asyncio.wait_for(side.read_all(name), 10 * PATIENCE_S)
    found["consume"] = read / (time.perf_counter() - began_s)
    assert read == written, f"{read} records were read of {written}"
    return found


@asynccontextmanager
async def ours(folder: Path, shards: int, *, quick: bool) -> AsyncIterator[Log]:
    """Three nodes."""
    settings = {"pin": "off"} | (leaders.QUICK if quick else {})
    with LocalCluster(folder / "cluster", nodes=NODES, shards=shards, settings=settings) as cluster:
        pids = [pid for member in cluster.members for pid in cluster.pids(member.number)]
        async with connect(cluster.urls, timeout=PATIENCE_S) as client:
            yield Topics(client, pids)


async def measure(folder: Path, given: Any) -> dict[str, float]:
    """Measure each side by turns, after a short round of each, and print.

    All servers run all the time, so each side has the others' idle cost beside it.
    """
    sides: dict[str, Log] = {}
    starts: dict[str, Callable[[], AbstractAsyncContextManager[Any]]] = {
        "laminar": lambda: ours(folder, given.shards, quick=given.quick)
    }
    for name, peer in peers("bench-peers").items():
        starts[name] = lambda peer=peer: peer.start(folder)  # type: ignore[misc]
    rounds: dict[str, list[Mapping[str, float]]] = {name: [] for name in starts}
    async with contextlib.AsyncExitStack() as stack:
        for name, start in starts.items():
            sides[name] = await stack.enter_async_context(start())
        for side in sides.values():
            await side.make("warm")
            await side.send_all("warm", given.records // 4)
        for number in range(given.rounds):
            for name, side in sides.items():
                rounds[name].append(found := await measured(side, f"round-{number}", given))
                shown = ", ".join(f"{figure} {value:,.4g}" for figure, value in found.items())
                print(f"round {number}, {name}: {shown}", flush=True)
    figures: dict[str, float] = {}
    for figure, title in TITLES.items():
        medians = {name: statistics.median(found[figure] for found in each) for name, each in rounds.items()}
        figures[figure] = medians.pop("laminar")
        print(f"{title}: Laminar {figures[figure]:,.4g}", flush=True)
        for name, theirs in medians.items():
            better = figures[figure] / theirs if MOST_IS_BEST[figure] else theirs / figures[figure]
            figures[f"{figure}_{name}_ratio"] = better
            goal = f"; {GOALS[figure]}" if name == "nats" and figure in GOALS else ""
            print(f"  {name} {theirs:,.4g}: ratio {better:.2f}{goal}", flush=True)
    return figures


def main() -> int:
    """Run it and print."""
    parser = on_disk.parser("python -m benches.queues.bench_peers", __doc__)
    parser.add_argument("--records", type=int, default=100_000, help="of a batch")
    parser.add_argument("--flight", type=int, default=20_480, help="single appends, 256 under way")
    parser.add_argument("--single", type=int, default=1_000, help="appends, one at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=1)
    given = parser.parse_args()
    if given.quick:
        given.records, given.flight, given.single, given.rounds = 600, 256, 10, 1
    print(
        f"{os.cpu_count()} CPUs, {platform.release()}, Python {platform.python_version()},"
        f" uvloop {version('uvloop')}, {on_disk.filesystem(given.directory)}; {NODES} nodes of "
        f"{given.shards} shard(s), one program on this machine; 3 replicas, flush=commit",
        flush=True,
    )
    with on_disk.folder(given.directory, "peers-") as folder:
        figures: dict[str, float] = {}

        async def run() -> None:
            figures.update(await measure(folder, given))

        floors.run_loop(run())
    print("bench-peers: " + " ".join(f"{name}={value:.4g}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
