"""How long small appends take beside each kind of bulk work, by turns with nothing beside them.

    python -m benches.log.bench_beside [--rounds 5] [--only produce] [--quick]

Three nodes of one shard. A client in a process of its own appends records of 1 KiB one at a time to twelve
partitions. Beside it, by turns: nothing; a producer of batches of 1 MiB; four uploads at once; a reader
of all that was written. What counts is the ratio of the appends' times to those with nothing
beside them, in the same run: all share this machine's CPUs and its disk. Elections are counted: moved
leaders first, then none on a quiet machine. `--quick` measures nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection

from benches.common import floors, on_disk
from benches.log.bench_streams import append_on_request
from laminar.aio import Client, connect
from laminar.testing.cluster import LocalCluster

MIB = 1 << 20
VALUE = os.urandom(1024)
NODES = 3
SETTINGS = {"retention_bytes": 64 * MIB}
BEGIN_S = 0.5
FULL_MIB = 32
MOVED = [0]
"""Bytes that the bulk work of this process has moved."""


async def nothing(client: Client) -> None:
    """Only wait."""
    await asyncio.Event().wait()


async def produce(client: Client) -> None:
    """One client that produces as fast as it is answered."""
    async with client.topic("bulk").producer(batch_bytes=MIB - 4096) as producer:
        while True:
            await producer.send_all((None, VALUE) for _ in range(4 * 1024))
            MOVED[0] += 4 * MIB


async def uploads(client: Client) -> None:
    """Four records of no end."""

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield VALUE * 1024
            MOVED[0] += MIB

    topic = client.topic("bulk")
    await asyncio.gather(*(topic.append_stream(endless(), partition=number) for number in range(4)))


async def read(client: Client) -> None:
    """One reader that begins again at the end."""
    while True:
        await client.topic("full").read().to_arrow()
        MOVED[0] += FULL_MIB * MIB


KINDS = (nothing, produce, uploads, read)


def elections(urls: list[str]) -> int:
    """Return the elections that all processes of the nodes have won since they started."""
    count = 0
    for url in urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        count += sum(
            int(line.split()[-1]) for line in lines if line.startswith("laminar_raft_elections_total{")
        )
    return count


def main() -> int:
    """Print the times of each kind, and their ratios, and end 0."""
    parser = on_disk.parser("python -m benches.log.bench_beside", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each kind in a round")
    parser.add_argument("--only", help="this kind, and nothing")
    given = parser.parse_args()
    rounds, seconds = (1, 0.5) if given.quick else (given.rounds, given.seconds)
    on_disk.filesystem(given.directory)
    with (
        on_disk.folder(given.directory.resolve(), "beside-") as folder,
        LocalCluster(folder / "cluster", nodes=NODES, shards=1) as cluster,
    ):
        ours, theirs = multiprocessing.Pipe()
        other = multiprocessing.get_context("spawn").Process(
            target=append_on_request, args=(theirs, cluster.urls, NODES)
        )
        other.start()
        found: dict[str, list[dict[float, float]]] = {}
        try:
            floors.run_loop(measured(cluster.urls, ours, rounds, seconds, given.only, found))
        finally:
            ours.close()
            theirs.close()
            other.join(20)
            other.kill()
    figures: dict[str, float] = {}
    for name, kinds in found.items():
        p50, p99 = (statistics.median(round_[share] for round_ in kinds) for share in (0.5, 0.99))
        bare = found["nothing"]
        ratios = [
            statistics.median(one[share] / alone[share] for one, alone in zip(kinds, bare, strict=True))
            for share in (0.5, 0.99)
        ]
        print(f"{name:<8} p50 {p50:6.2f} ms p99 {p99:6.2f} ms, ratios {ratios[0]:.2f} and {ratios[1]:.2f}")
        figures |= {f"{name}_p50_ratio": ratios[0], f"{name}_p99_ratio": ratios[1]}
    print("bench-beside: " + " ".join(f"{name}={value:.3g}" for name, value in figures.items()))
    return 0


async def measured(
    urls: list[str],
    other: Connection,
    rounds: int,
    seconds: float,
    only: str | None,
    found: dict[str, list[dict[float, float]]],
) -> None:
    """Add the appends' percentiles in ms by kind and round to `found`."""
    async with connect(urls) as client:
        await client.create_topic("bulk", partitions=4, replicas=NODES, settings=SETTINGS)
        full = await client.create_topic("full", partitions=4, replicas=NODES)
        async with full.producer() as producer:
            await producer.send_all((None, VALUE) for _ in range(FULL_MIB * 1024))
        await asyncio.to_thread(other.recv)
        for _ in range(rounds):
            for kind in KINDS:
                if only and kind is not nothing and kind.__name__ != only:
                    continue
                task = asyncio.create_task(kind(client))
                await asyncio.sleep(BEGIN_S)
                other.send("begin")
                won = await asyncio.to_thread(elections, urls)
                before, began_s = MOVED[0], time.perf_counter()
                await asyncio.sleep(seconds)
                moved = (MOVED[0] - before) / 1e6 / (time.perf_counter() - began_s)
                other.send("end")
                took: list[float] = await asyncio.to_thread(other.recv)
                assert not task.done(), f"{kind.__name__} has ended: {task}"
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                won = await asyncio.to_thread(elections, urls) - won
                shares = {share: floors.percentile(took, share) for share in (0.5, 0.99)}
                times = f"p50 {shares[0.5]:.2f} ms, p99 {shares[0.99]:.2f} ms"
                print(
                    f"  {kind.__name__}: {len(took)} appends, {times}; {moved:.1f} MB/s, {won} elections",
                    flush=True,
                )
                found.setdefault(kind.__name__, []).append(shares)
                await asyncio.sleep(BEGIN_S)


if __name__ == "__main__":
    sys.exit(main())
