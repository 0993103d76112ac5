"""One record of gigabytes streamed in and out, while another client appends.

    python -m benches.log.bench_streams

Three nodes of two shards and two clients share this machine and one disk. The other client, in a process of
its own, appends records of 1 KiB one at a time to twelve partitions: first alone, then while a record of
`--mib` is streamed into another topic, then while it is streamed out again. Its p99 beside its p99 alone, and
by how much the memory of the largest node grew, are what is asked (issue 11). What is read is compared by
length and checksum with what was written. `--quick` is the same with a tiny record, and measures nothing.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path

from crc32c import crc32c

from benches.common import floors, on_disk, usage
from laminar.aio import Client, connect
from laminar.testing.cluster import LocalCluster

SHARDS, PARTITIONS = 2, 12
VALUE = os.urandom(1024)
MIB = 1 << 20
# What the source gives at a time.
CHUNK = os.urandom(MIB)
MOST_GROWTH_MIB = 64
MOST_RATIO = 2.0
LOOK_S = 0.25


@dataclass(slots=True)
class Memory:
    """The nodes' proportional set sizes in MiB: as they were, and at their largest since."""

    nodes: Sequence[Sequence[int]]
    before: list[float] = field(default_factory=list)
    most: list[float] = field(default_factory=list)

    def look(self) -> None:
        now = [usage.pss_mib(pids) for pids in self.nodes]
        self.before = self.before or now
        self.most = [max(pair) for pair in zip(self.most or now, now, strict=True)]

    async def watch(self) -> None:
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_S)

    @property
    def growth_mib(self) -> float:
        return max(most - before for most, before in zip(self.most, self.before, strict=True))


def main() -> int:
    """Run everything, print, and end 0; a missed aim is said, not punished."""
    parser = on_disk.parser("python -m benches.log.bench_streams", __doc__)
    parser.add_argument("--mib", type=int, default=5 * 1024, help="of the record")
    parser.add_argument("--nodes", type=int, default=3)
    given = parser.parse_args()
    kind = on_disk.filesystem(given.directory)
    mib, alone_s = (8, 1.0) if given.quick else (given.mib, 20.0)
    with on_disk.folder(given.directory, "streams-") as folder:
        run(folder, kind, mib=mib, nodes=given.nodes, alone_s=alone_s, quick=given.quick)
    return 0


def run(folder: Path, filesystem: str, *, mib: int, nodes: int, alone_s: float, quick: bool) -> None:
    """Prints each figure, then all in a line."""
    print(
        f"{os.cpu_count()} CPUs, {platform.release()}, Python {platform.python_version()},"
        f" uvloop {version('uvloop')}, {filesystem}; {nodes} nodes of {SHARDS} shards and two clients on this"
        f" machine; a record of {mib} MiB, {nodes} replicas; beside it records of 1 KiB one at a time",
        flush=True,
    )
    if quick:
        print("--quick: these sizes measure nothing")
    with LocalCluster(folder / "cluster", nodes=nodes, shards=SHARDS) as cluster:
        pids = [cluster.pids(member.number) for member in cluster.members]
        bystanders = usage.Bystanders(pid for node in pids for pid in node)
        figures: dict[str, float] = {}
        ours, theirs = multiprocessing.Pipe()
        other = multiprocessing.get_context("spawn").Process(
            target=append_on_request, args=(theirs, cluster.urls, nodes)
        )
        other.start()
        try:
            floors.run_loop(_all(cluster.urls, ours, Memory(pids), mib, nodes, alone_s, figures))
        finally:
            ours.close()
            theirs.close()
            other.join(20)
            other.kill()
        share = bystanders.share()
        print(f"others, the other client, and the kernel's own threads, used {share:.0%} of the CPUs")
    print("bench-streams: " + " ".join(f"{name}={value:.3g}" for name, value in figures.items()))


async def _all(
    urls: list[str],
    other: Connection,
    memory: Memory,
    mib: int,
    nodes: int,
    alone_s: float,
    figures: dict[str, float],
) -> None:
    async with connect(urls) as client:
        topic = await client.create_topic("stream", partitions=1, replicas=nodes)
        await asyncio.to_thread(other.recv)  # its topic is there, and connections are open
        other.send("begin")
        await asyncio.sleep(alone_s)
        alone = await _told(other)
        memory.look()
        watching = asyncio.create_task(memory.watch())
        try:
            for name, work in (("in", _write(client, mib)), ("out", _read(client, mib))):
                other.send("begin")
                began = time.perf_counter()
                await work
                took_s = time.perf_counter() - began
                beside = await _told(other)
                rate = mib * MIB / 1e6 / took_s
                ratio = beside[0.99] / alone[0.99]
                verdict = "met" if ratio <= MOST_RATIO else "MISSED"
                print(
                    f"streamed {name:<3} {rate:7.1f} MB/s;  appends beside it p50 {beside[0.5]:.2f} ms"
                    f" p99 {beside[0.99]:.2f} ms, alone p50 {alone[0.5]:.2f} ms p99 {alone[0.99]:.2f} ms,"
                    f" ratio of p99 {ratio:.2f}  aim {MOST_RATIO:g}: {verdict}",
                    flush=True,
                )
                figures |= {f"{name}_mb_per_s": rate, f"{name}_p99_ms": beside[0.99], f"{name}_ratio": ratio}
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        assert topic.name == "stream"
    grown = memory.growth_mib
    print(
        f"memory of the node that grew most: {grown:+.1f} MiB, at most {max(memory.most):.0f} MiB"
        f"  aim {MOST_GROWTH_MIB}: {'met' if grown < MOST_GROWTH_MIB else 'MISSED'}",
        flush=True,
    )
    figures |= {"alone_p99_ms": alone[0.99], "grown_mib": max(grown, 0.0), "most_mib": max(memory.most)}


async def _told(other: Connection) -> dict[float, float]:
    """The other client's percentiles, in ms, since it was told to begin."""
    other.send("end")
    took: list[float] = await asyncio.to_thread(other.recv)
    return {share: floors.percentile(took, share) for share in (0.5, 0.99)}


async def _source(mib: int) -> AsyncIterator[bytes]:
    for number in range(mib):
        yield b"%016d" % number + CHUNK[16:]


async def _write(client: Client, mib: int) -> None:
    receipt = await client.topic("stream").append_stream(_source(mib))
    assert receipt.offset == 0, f"the record has {receipt}"


async def _read(client: Client, mib: int) -> None:
    """Read it, and compare it with what was written."""
    expected = size = found = 0
    async for chunk in _source(mib):
        expected = crc32c(chunk, expected)
    async with client.topic("stream").open(0, 0) as value:
        async for chunk in value:
            size += len(chunk)
            found = crc32c(chunk, found)
    assert (mib * MIB, expected) == (size, found), f"{size} bytes of checksum {found:08x} were read"


def append_on_request(told: Connection, urls: list[str], nodes: int) -> None:
    """The other client: told to begin it appends, one record after the other; told to end it says how long
    each took, in ms. Ends with the connection.
    """

    async def work() -> None:
        async with connect(urls) as client:
            topic = await client.create_topic("beside", partitions=PARTITIONS, replicas=nodes)
            for number in range(20 * PARTITIONS):
                await topic.append(VALUE, partition=number % PARTITIONS)
            told.send("ready")
            loop = asyncio.get_running_loop()
            while await loop.run_in_executor(None, told.recv) == "begin":
                took: list[float] = []
                while not told.poll():
                    began = time.perf_counter()
                    await topic.append(VALUE, partition=len(took) % PARTITIONS)
                    took.append((time.perf_counter() - began) * 1000)
                told.recv()
                told.send(took)

    try:
        floors.run_loop(work())
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass


if __name__ == "__main__":
    sys.exit(main())
