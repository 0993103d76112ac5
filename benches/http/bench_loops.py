"""Which turns of a node's loops take long, under each kind of load, and what they do.

    python -m benches.http.bench_loops [--mib 256] [--only large] [--quick]

Three nodes of one shard whose loops write down their turns of over 5 ms (`benches.common.timed_loop`). One
load after the other runs, and for each the culprits are printed: how many turns, the longest (CPU, and
blocked), all of them in ms, the callbacks, and the innermost frames that they were in. Time without a CPU
does not count, so a busy machine does not matter. `--quick` is the same with tiny loads.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from benches.common import on_disk, timed_loop
from benches.common.timed_loop import LONG_S, Turn
from laminar.aio import Client, connect
from laminar.client.backup.export import export_topic
from laminar.client.backup.folder import Folder
from laminar.testing.cluster import LocalCluster

ROOT = Path(__file__).parents[2]
NODES = 3
MIB = 1 << 20
VALUE = os.urandom(1024)
# What the threads beside the loops need to write the last turns down.
SETTLE_S = 0.3


class TimedCluster(LocalCluster):
    """A cluster of nodes with timed loops."""

    folder: Path

    def command(self, number: int) -> list[str]:
        """Return the command line of a node."""
        python, _path, _module, _node, *flags = super().command(number)
        return [python, "-m", "benches.common.timed_node", *flags]

    def environment(self) -> dict[str, str]:
        """Return the environment of a node, which says where the turns are written."""
        return {**super().environment(), timed_loop.FOLDER: str(self.folder), "PYTHONPATH": str(ROOT)}


@dataclass
class Run:
    """What a load needs: the cluster, a client of it, and how much it is to do."""

    cluster: TimedCluster
    client: Client
    folder: Path
    mib: int
    quick: bool


async def bulk(run: Run) -> None:
    """An idempotent producer with batches of 1 MiB."""
    topic = await run.client.create_topic("bulk", partitions=4, replicas=NODES)
    async with topic.producer(batch_bytes=MIB - 4096) as producer:
        await producer.send_all((None, VALUE) for _ in range(run.mib * 1024))


async def ndjson(run: Run) -> None:
    """Bodies of 1 MiB with 10,000 small records each, as NDJSON and as JSON, four at a time."""
    topic = await run.client.create_topic("ndjson", partitions=4, replicas=NODES)
    line = json.dumps({"value": "x" * 80}).encode() + b"\n"
    body = line * (MIB // len(line))

    async def post(number: int) -> None:
        url = run.cluster.urls[number % NODES]
        await asyncio.to_thread(_post, f"{url}/v1/topics/{topic.name}/partitions/{number % 4}/records", body)

    for first in range(0, max(4, run.mib // 4), 4):
        await asyncio.gather(*(post(first + number) for number in range(4)))


def _post(url: str, body: bytes) -> None:
    import httpx

    headers = {"content-type": "application/x-ndjson"}
    httpx.post(
        url, content=body, headers=headers, timeout=60, follow_redirects=True, trust_env=False
    ).raise_for_status()


async def large(run: Run) -> None:
    """A record of `mib` MiB streamed in, then out."""
    topic = await run.client.create_topic("large", partitions=1, replicas=NODES)

    async def source() -> AsyncIterator[bytes]:
        for _ in range(run.mib):
            yield VALUE * 1024

    receipt = await topic.append_stream(source())
    async with topic.open(0, receipt.offset) as value:
        async for _ in value:
            pass


async def fetch(run: Run) -> None:
    """All of `bulk` read into an Arrow table, and once more as JSON by eight consumers."""
    await run.client.topic("bulk").read().to_arrow()


async def search(run: Run) -> None:
    """A search of `bulk` that finds nothing."""
    async for _ in run.client.topic("bulk").search(contains="nothing has this"):
        pass


async def export(run: Run) -> None:
    """`bulk` exported to a folder."""
    await export_topic(run.client.session, "bulk", Folder(run.folder / "backup"))


async def retention(run: Run) -> None:
    """A topic that keeps 8 MiB a partition, in which segments come and go."""
    topic = await run.client.create_topic(
        "short", partitions=2, replicas=NODES, settings={"retention_bytes": 8 * MIB}
    )
    async with topic.producer(batch_bytes=256 * 1024) as producer:
        await producer.send_all((None, VALUE) for _ in range(run.mib * 1024))


async def topics(run: Run) -> None:
    """300 topics created, eight at a time, and deleted."""
    count = 8 if run.quick else 300
    width = asyncio.Semaphore(8)

    async def one(number: int, work: Callable[[str], Awaitable[object]]) -> None:
        async with width:
            await work(f"t{number}")

    create = lambda name: run.client.create_topic(name, partitions=2, replicas=NODES)  # noqa: E731
    await asyncio.gather(*(one(number, create) for number in range(count)))


async def scrape(run: Run) -> None:
    """Every node's /metrics, /v1/topics, /v1/cluster and the health of the cluster, ten times."""
    for _ in range(2 if run.quick else 10):
        for url in run.cluster.urls:
            for path in ("/metrics", "/v1/topics?limit=1000", "/v1/cluster", "/v1/health"):
                await asyncio.to_thread(_get, url + path)


def _get(url: str) -> None:
    import urllib.request

    with urllib.request.urlopen(url, timeout=30) as answer:
        answer.read()


async def checkpoint(run: Run) -> None:
    """Small appends to all partitions of all topics, and the checkpoint that follows."""
    names = [name for name in await run.client.topics() if name.startswith("t")]
    for _ in range(4):
        await asyncio.gather(*(run.client.topic(name).append(VALUE) for name in names))
    await asyncio.sleep(1 if run.quick else 12)


async def catch_up(run: Run) -> None:
    """A node that was away while `mib` MiB were written, until it has all of them."""
    await asyncio.to_thread(run.cluster.kill, NODES - 1)
    topic = run.client.topic("bulk")
    async with topic.producer(batch_bytes=256 * 1024) as producer:
        await producer.send_all((None, VALUE) for _ in range(run.mib * 1024))
    await asyncio.to_thread(run.cluster.restart, NODES - 1)
    ends = {each.partition: each.end_offset for each in await topic.partitions()}
    url = run.cluster.urls[NODES - 1]
    async with asyncio.timeout(120):
        for number, end in ends.items():
            path = f"{url}/v1/topics/bulk/partitions/{number}/records/{end - 1}"
            while await asyncio.to_thread(_local_status, path) != 200:  # noqa: ASYNC110  # asked again
                await asyncio.sleep(0.2)


def _local_status(url: str) -> int:
    """Return the status of an answer that this node gives from its own replica."""
    import httpx

    return httpx.get(url, headers={"Laminar-Local": "1"}, timeout=30, trust_env=False).status_code


LOADS = (bulk, ndjson, large, fetch, search, export, retention, topics, scrape, checkpoint, catch_up)


def main() -> int:
    """Run all loads, print the culprits of each, and end 0."""
    parser = on_disk.parser("python -m benches.http.bench_loops", __doc__)
    parser.add_argument("--mib", type=int, default=128, help="of a load that has bytes")
    parser.add_argument("--only", action="append", help="this load, and `bulk` before it")
    given = parser.parse_args()
    on_disk.filesystem(given.directory)
    with on_disk.folder(given.directory.resolve(), "loops-") as folder:
        (folder / "turns").mkdir()
        cluster = TimedCluster(
            folder / "cluster", nodes=NODES, shards=1, settings={"segment_size_bytes": 4 * MIB}
        )
        cluster.folder = folder / "turns"
        with cluster:
            asyncio.run(_all(cluster, folder, 4 if given.quick else given.mib, given.only, quick=given.quick))
    return 0


async def _all(cluster: TimedCluster, folder: Path, mib: int, only: list[str] | None, *, quick: bool) -> None:
    async with connect(cluster.urls) as client:
        run = Run(cluster, client, folder, mib, quick)
        await asyncio.sleep(SETTLE_S)
        figures: dict[str, int] = {}
        for load in LOADS:
            if only and load is not bulk and load.__name__ not in only:
                continue
            began_s = time.monotonic()
            await load(run)
            await asyncio.sleep(SETTLE_S)
            turns = [turn for turn in timed_loop.read(cluster.folder) if turn.at_s >= began_s]
            figures[load.__name__] = len(turns)
            say(cluster, load.__name__, time.monotonic() - began_s, turns)
        print("bench-loops: " + " ".join(f"{name}={count}" for name, count in figures.items()))


def say(cluster: TimedCluster, name: str, took_s: float, turns: list[Turn]) -> None:
    """Print the culprits of a load, those first that took most."""
    roles: dict[str, str] = {}
    for member in cluster.members:
        document = json.loads((member.data / "node.json").read_text())
        roles |= {str(pid): f"{role}" for role, pid in document["pids"].items()}
    count: Counter[tuple[str, str]] = Counter()
    frames: dict[tuple[str, str], Counter[str]] = {}
    total: defaultdict[tuple[str, str], float] = defaultdict(float)
    most: dict[tuple[str, str], tuple[float, float]] = {}
    for turn in turns:
        what = next(iter(turn.heaviest), "")
        most_ms, many = turn.heaviest.get(what, (0.0, 0))
        if turn.blocked_ms > turn.cpu_ms:
            what = f"blocked beside {what}"
        elif most_ms < turn.cpu_ms / 2:
            named = ", ".join(turn.heaviest)
            what = f"many callbacks: {named}" if turn.outside_ms < most_ms else f"outside, beside {named}"
        elif many > 20:
            what = f"many times {what}"
        key = roles.get(turn.process, "?"), what
        count[key] += 1
        frames.setdefault(key, Counter()).update(stack_of(stack) for stack in turn.stacks)
        total[key] += turn.cpu_ms + turn.blocked_ms
        most[key] = max(most.get(key, (0.0, 0.0)), (turn.cpu_ms, turn.blocked_ms))
    print(f"== {name}: {took_s:.1f} s, {len(turns)} turns over {1000 * LONG_S:g} ms", flush=True)
    for key, ms in sorted(total.items(), key=lambda each: -each[1])[:12]:
        cpu_ms, blocked_ms = most[key]
        print(f"  {count[key]:3}x most {cpu_ms:.1f}+{blocked_ms:.1f} ms, all {ms:.0f} ms: {key[0]}: {key[1]}")
        for stack, samples in frames[key].most_common(3):
            print(f"         {samples:3} in {stack}")


def stack_of(stack: list[str]) -> str:
    """Return the innermost frames of ours."""
    return " < ".join(each for each in stack if not each.startswith(("asyncio/", "python3")))[:300]


if __name__ == "__main__":
    sys.exit(main())
