"""What exactly-once costs: transactions beside the same data appended plainly, cursors beside appends.

    python -m benches.queues.bench_state

Three nodes of two shards and the client share this machine and one disk. A transaction puts as many records
into each of twelve partitions; beside it a producer does the same with batches as large, and waits for every
receipt before the next round. The sides alternate, so that a slow moment hits both; each figure is a median
of the rounds. What is written is what the disk took meanwhile, from whomever: journals and segments of all
three replicas together. `--quick` is the same with tiny sizes, and measures nothing.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benches.common import floors, on_disk, usage
from laminar.aio import Client, Topic, connect
from laminar.client.consume.cursors import CursorState
from laminar.client.policy.partition_queue import RECORD_OVERHEAD_BYTES
from laminar.testing.cluster import LocalCluster

NODES, SHARDS, PARTITIONS = 3, 2, 12
KIB = 1024
VALUE = os.urandom(KIB)
# So that a batch is full, and on its way, with the last record of its partition.
RECORD_BYTES = KIB + RECORD_OVERHEAD_BYTES
# Of the throughput of plain appends, for stages of 1 MiB (issue 11).
AIM = 0.6


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    rounds: int = 5
    small: int = 20  # transactions a round, of 100 records a partition
    large: int = 5  # of 1 MiB a partition
    singles: int = 300
    # The segments are written some time after the journals: when nobody wrote for so long, all is written.
    settled_s: float = 2.0
    settle_limit_s: float = 20.0


QUICK = Sizes(rounds=1, small=2, large=1, singles=10, settled_s=0.1, settle_limit_s=0.0)


@dataclass(frozen=True, slots=True)
class Side:
    """One way to do the work: how often a second it is done, and bytes written to disks per byte of it."""

    rate: float
    written: float


def main() -> int:
    """Run everything, print, and end 0; a missed aim is said, not punished."""
    given = on_disk.parser("python -m benches.queues.bench_state", __doc__).parse_args()
    kind = on_disk.filesystem(given.directory)
    with on_disk.folder(given.directory, "state-") as folder:
        run(folder, kind, QUICK if given.quick else Sizes(), quick=given.quick)
    return 0


def run(folder: Path, filesystem: str, sizes: Sizes, *, quick: bool) -> None:
    """All measurements, in order; the last line printed is the summary."""
    print(
        f"{os.cpu_count()} CPUs, {platform.release()}, Python {platform.python_version()},"
        f" uvloop {version('uvloop')}, {filesystem}; {NODES} nodes of {SHARDS} shards and the client on this"
        f" machine; records of 1 KiB, {PARTITIONS} partitions, {NODES} replicas; medians of {sizes.rounds}",
        flush=True,
    )
    if quick:
        print("--quick: these sizes measure nothing")
    with LocalCluster(folder / "cluster", nodes=NODES, shards=SHARDS) as cluster:
        pids = [pid for member in cluster.members for pid in cluster.pids(member.number)]
        bystanders = usage.Bystanders(pids)
        figures: dict[str, float] = {}
        floors.run_loop(_all(cluster.urls, Writes(folder, pids, sizes), sizes, figures))
        print(f"others, and the kernel's own threads, used {bystanders.share():.0%} of the CPUs")
    print("bench-state: " + " ".join(f"{name}={value:.3g}" for name, value in figures.items()))


async def _all(urls: list[str], writes: Writes, sizes: Sizes, figures: dict[str, float]) -> None:
    async with connect(urls) as client:
        for name, records, rounds in (("small", 100, sizes.small), ("large", KIB, sizes.large)):
            transactions, appends = await _beside(client, writes, name, records, rounds, sizes.rounds)
            ratio = transactions.rate / appends.rate
            mb = records * PARTITIONS * KIB / 1e6
            aim = f"  aim {AIM}: {'met' if ratio >= AIM else 'MISSED'}" if records >= KIB else ""
            print(
                f"{PARTITIONS} x {records} records  {transactions.rate:8.1f} transactions/s"
                f" ({transactions.rate * mb:.1f} MB/s)  {appends.rate:8.1f} times appended plainly/s"
                f" ({appends.rate * mb:.1f} MB/s)  ratio {ratio:.2f}{aim}",
                flush=True,
            )
            print(
                f"{'':>{len(str(records))}}written per byte committed, of {NODES} replicas:"
                f" {transactions.written:.2f} by transactions, {appends.written:.2f} by appends,"
                f" ratio {transactions.written / appends.written:.2f}",
                flush=True,
            )
            figures |= {
                f"{name}_tx_per_s": transactions.rate,
                f"{name}_appends_per_s": appends.rate,
                f"{name}_ratio": ratio,
                f"{name}_tx_written": transactions.written,
                f"{name}_appends_written": appends.written,
            }
        commit_ms, append_ms = await _cursor(client, sizes)
        print(
            f"a cursor's commit {commit_ms:.2f} ms, an append of one record {append_ms:.2f} ms (p50),"
            f" ratio {commit_ms / append_ms:.2f}",
            flush=True,
        )
        figures |= {"cursor_ms": commit_ms, "append_ms": append_ms, "cursor_ratio": commit_ms / append_ms}


async def _beside(
    client: Client, writes: Writes, name: str, records: int, count: int, rounds: int
) -> tuple[Side, Side]:
    """Transactions of so many records a partition, and the same appended plainly, by turns."""
    transacted = await client.create_topic(f"{name}-tx", partitions=PARTITIONS, replicas=NODES)
    appended = await client.create_topic(f"{name}-plain", partitions=PARTITIONS, replicas=NODES)
    number = 0

    async def work(side: int) -> float:
        nonlocal number
        began = time.perf_counter()
        if side == 0:
            for _ in range(count):
                await _transaction(client, transacted, name, number, records)
                number += 1
        else:
            await _appends(appended, records, count)
        return count / (time.perf_counter() - began)

    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(1 + rounds):  # the first is not counted: it finds memory, leaders and connections
        for side in (0, 1):
            rate = await work(side)
            if turn:
                rates[side].append(rate)
    # All rounds again, so that what is written once (a new file of a journal) weighs little.
    committed = rounds * count * records * PARTITIONS * KIB
    written = [await writes.settled(committed)]
    for side in (0, 1):
        for _ in range(rounds):
            await work(side)
        written.append(await writes.settled(committed))
    return (
        Side(statistics.median(rates[0]), (written[1] - written[0]) / committed),
        Side(statistics.median(rates[1]), (written[2] - written[1]) / committed),
    )


async def _transaction(client: Client, topic: Topic[bytes], sink: str, number: int, records: int) -> None:
    async with client.transaction(sink, number, batch_bytes=records * RECORD_BYTES) as tx:
        for place in range(records * PARTITIONS):
            tx.append(topic, VALUE, partition=place % PARTITIONS)
    assert tx.result == "applied", f"transaction {number} was {tx.result}"


async def _appends(topic: Topic[bytes], records: int, count: int) -> None:
    async with topic.producer(batch_bytes=records * RECORD_BYTES) as producer:
        for _ in range(count):
            for place in range(records * PARTITIONS):
                producer.send(VALUE, partition=place % PARTITIONS)
            await producer.wait()


class Writes:
    """What has been written so far: to the disk that holds `folder`, else by the nodes' processes.

    What the kernel says of a process is a count of pages made dirty, and it counts a whole folio (up to
    1 MiB) of which 4 KiB were: up to 86 times what went to the disk. So it is asked only where there is no
    device to ask, as under an overlay.
    """

    def __init__(self, folder: Path, pids: Sequence[int], sizes: Sizes) -> None:
        self._folder = folder
        self._pids = pids
        self._sizes = sizes

    async def settled(self, committed: int) -> int:
        """Bytes, once next to nothing is written beside `committed` any more."""
        deadline = time.monotonic() + self._sizes.settle_limit_s
        before = self._now()
        while True:
            await asyncio.sleep(self._sizes.settled_s)
            now = self._now()
            if now - before < committed // 100 or time.monotonic() > deadline:
                return now
            before = now

    def _now(self) -> int:
        written = usage.disk_written_bytes(self._folder)
        return sum(map(usage.dirtied_bytes, self._pids)) if written is None else written


async def _cursor(client: Client, sizes: Sizes) -> tuple[float, float]:
    """p50 in ms of a cursor's commit and of an append of one record, one at a time and by turns."""
    topic = await client.create_topic("cursors", partitions=1, replicas=NODES)
    cursor = CursorState(client.session, topic.name, "bench")
    await cursor.load()
    commits, appends = [], []
    for number in range(sizes.singles):
        began = time.perf_counter()
        await topic.append(VALUE, partition=0)
        between = time.perf_counter()
        await cursor.commit({0: number + 1})
        appends.append((between - began) * 1000)
        commits.append((time.perf_counter() - between) * 1000)
    return floors.percentile(commits, 0.5), floors.percentile(appends, 0.5)


if __name__ == "__main__":
    sys.exit(main())
