"""Millions of delayed records: memory, lists, cancellations beside appends, and how late records come.

    make bench-delay

Three nodes on this machine, one topic with three replicas, flush=commit. Records of 64 bytes in batches of
10,000 are due at random times of the next 30 days, so that every batch has records of every day: the worst
case for a list. In order:

* fill: records a second that are taken;
* memory: what the nodes' processes grew by, for each pending record and replica;
* list: the first 1,000 records of one hour, and the counts of 30 days by day;
* cancel: the time of a cancellation of a random record beside that of an append, one at a time, by turns;
* due: 100,000 more records that are due in the same second: how long after it all of them can be read.

A record that comes early, or twice, ends it with an error. `--quick` is the same with few records, and
measures nothing.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import time
from importlib.metadata import version
from typing import Any

import httpx

from benches.common import floors, on_disk, usage
from laminar.aio import connect
from laminar.batch import BATCH_TYPE, build
from laminar.client.client import Client
from laminar.testing.cluster import LocalCluster
from laminar.wire.delayed import DelayedId, parse_id

NODES = 3
PARTITIONS = 3
BATCH = 10_000
VALUE = os.urandom(64)
DAY_MS = 24 * 3_600_000
PATIENCE_S = 120.0
FILLED = "delayed"
Held = list[tuple[DelayedId, list[int]]]


def now_ms() -> int:
    """Return the wall clock."""
    return time.time_ns() // 1_000_000


async def append(http: httpx.AsyncClient, topic: str, partition: int, times: list[int]) -> DelayedId:
    """Append a batch of delayed records; return the id of the first."""
    frame = build([VALUE] * len(times), delivery_times=times)
    path = f"/v1/topics/{topic}/partitions/{partition}/records"
    answer = await http.post(path, content=bytes(frame), headers={"Content-Type": BATCH_TYPE})
    answer.raise_for_status()
    return parse_id(answer.json()["scheduled"][0])


async def fill(http: httpx.AsyncClient, records: int, draw: random.Random) -> Held:
    """Append the records, some batches at a time; return the first id and the times of each batch."""
    start = now_ms() + DAY_MS
    found: Held = []
    numbers = iter(range(records // BATCH))

    async def send() -> None:
        for number in numbers:
            times = [start + draw.randrange(30 * DAY_MS) for _ in range(BATCH)]
            found.append((await append(http, FILLED, number % PARTITIONS, times), times))

    await asyncio.gather(*(send() for _ in range(4)))
    return found


async def timed(http: httpx.AsyncClient, **params: Any) -> tuple[float, dict[str, Any]]:
    """Return how long a list took, in seconds, and the list."""
    began_s = time.perf_counter()
    answer = await http.get(f"/v1/topics/{FILLED}/delayed", params=params)
    answer.raise_for_status()
    return time.perf_counter() - began_s, answer.json()


async def cancels(
    http: httpx.AsyncClient, held: Held, draw: random.Random, count: int
) -> tuple[list[float], list[float]]:
    """Return how long cancellations of one record, and appends of one record, took in ms, by turns."""
    took: list[float] = []
    appends: list[float] = []
    for first, times in draw.choices(held, k=count):
        row = draw.randrange(len(times))
        named = DelayedId(first.partition, times[row], first.place + row)
        path = f"/v1/topics/{FILLED}/partitions/{first.partition}/records"
        began_s = time.perf_counter()
        (await http.post(path, content=VALUE)).raise_for_status()
        appends.append((time.perf_counter() - began_s) * 1000)
        began_s = time.perf_counter()
        answer = await http.delete(f"/v1/topics/{FILLED}/delayed/{named}")
        took.append((time.perf_counter() - began_s) * 1000)
        assert answer.json()["state"] == "cancelled", answer.text
    return sorted(took), sorted(appends)


async def all_due(http: httpx.AsyncClient, client: Client, count: int) -> float:
    """Return how long after their time, in seconds, records due in the same ms can all be read."""
    topic = await client.create_topic("due", partitions=1, replicas=NODES)
    due_ms = now_ms() + 3_000 + count // 20
    for _ in range(max(1, count // BATCH)):
        await append(http, "due", 0, [due_ms] * min(count, BATCH))
    assert now_ms() < due_ms, "the machine is too slow for this delay"
    seen = 0
    async for record in topic.read("earliest", partitions=[0], follow=True):
        if not seen:
            assert now_ms() >= due_ms, "a record came early"
        seen += 1
        if seen == count:
            assert record.offset == count - 1, "a record came twice"
            return (now_ms() - due_ms) / 1000
    raise AssertionError("the reader ended")


async def measure(cluster: LocalCluster, given: Any) -> dict[str, float]:
    """Measure all of it, in order, and print."""
    draw = random.Random(1)
    figures: dict[str, float] = {}
    async with (
        connect(cluster.urls, timeout=PATIENCE_S) as client,
        httpx.AsyncClient(base_url=cluster.urls[0], timeout=PATIENCE_S) as http,
    ):
        await client.create_topic(FILLED, partitions=PARTITIONS, replicas=NODES)
        pids = [pid for number in range(NODES) for pid in cluster.pids(number)]
        before_mib, began_s = usage.pss_mib(pids), time.perf_counter()
        held = await fill(http, given.records, draw)
        figures["taken_per_s"] = given.records / (time.perf_counter() - began_s)
        grown = usage.pss_mib(pids) - before_mib
        figures["bytes_per_record_and_replica"] = grown * (1 << 20) / given.records / NODES
        print(
            f"{given.records:,} records taken, {figures['taken_per_s']:,.0f} a second; all processes grew by "
            f"{grown:,.0f} MiB, {figures['bytes_per_record_and_replica']:.1f} bytes a record and replica",
            flush=True,
        )
        hour = held[0][1][0]
        figures["list_s"], page = await timed(http, **{"from": hour, "to": hour + 3_600_000, "limit": 1000})
        figures["count_s"], days = await timed(
            http, **{"from": hour - 40 * DAY_MS, "to": hour + 40 * DAY_MS, "bucket_ms": DAY_MS}
        )
        assert sum(each["records"] for each in days["buckets"]) == given.records
        print(
            f"{len(page['records']):,} records of one hour listed in {figures['list_s']:.2f} s; all counted "
            f"by day in {figures['count_s']:.2f} s",
            flush=True,
        )
        took, appends = await cancels(http, held, draw, given.cancels)
        for name, percent in (("p50", 0.5), ("p99", 0.99)):
            cancel, one = (floors.percentile(each, percent) for each in (took, appends))
            figures |= {f"cancel_{name}_ms": cancel, f"cancel_{name}_ratio": cancel / one}
            print(f"cancel {name} {cancel:.2f} ms, append {one:.2f} ms: ratio {cancel / one:.2f}", flush=True)
        figures["due_s"] = await all_due(http, client, given.due)
        print(f"{given.due:,} records due in one ms: all read {figures['due_s']:.2f} s later", flush=True)
    return figures


def main() -> int:
    """Run it and print."""
    parser = on_disk.parser("python -m benches.queues.bench_delay", __doc__)
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--cancels", type=int, default=500)
    parser.add_argument("--due", type=int, default=100_000)
    given = parser.parse_args()
    if given.quick:
        given.records, given.cancels, given.due = 3 * BATCH, 5, 500
    print(
        f"{os.cpu_count()} CPUs, {platform.release()}, Python {platform.python_version()},"
        f" uvloop {version('uvloop')}, {on_disk.filesystem(given.directory)}; {NODES} nodes of one shard and "
        f"the client on this machine; {PARTITIONS} partitions, 3 replicas, flush=commit",
        flush=True,
    )
    with (
        on_disk.folder(given.directory, "delay-") as folder,
        LocalCluster(folder / "cluster", nodes=NODES, shards=1, settings={"pin": "off"}) as cluster,
    ):
        figures: dict[str, float] = {}

        async def run() -> None:
            figures.update(await measure(cluster, given))

        floors.run_loop(run())
    print("bench-delay: " + " ".join(f"{name}={value:.4g}" for name, value in figures.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
