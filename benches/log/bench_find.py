"""A record found by its key, with key indexes and without: ``python -m benches.log.bench_find``.

One partition of one replica in this process, on one disk: the log, its indexes and a search as a shard makes
them, without HTTP. Records have a key of their own and a value of 100 bytes, 1,000 in a batch. Keys are
searched in all sealed segments, as fast as the process can: a shard reads at `search_bytes_per_s`. The ratio
is that of a search without indexes to one with them, of the same log in one run. `--quick` is the same with
few records, and measures nothing.
"""

from __future__ import annotations

import asyncio
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benches.common import floors, on_disk
from laminar.batch import build
from laminar.batch.header import Header
from laminar.log import RealDisk, StorageSettings
from laminar.node.find.examine import Wanted
from laminar.node.find.indexing import Indexer
from laminar.node.find.pace import Pace
from laminar.node.find.scan import Scanned, Span, scan
from laminar.node.find.where import Where
from laminar.node.partition.partition import Partition
from tests.node.alone import lone_partition

RECORDS, QUICK_RECORDS = 1_000_000, 20_000
BATCH, VALUE_BYTES, IN_FLIGHT = 1_000, 100, 32
LOOKUPS, SCANS = 50, 3
MIB = 1 << 20
GROUP = b"g" * 16
UNLIMITED = 1 << 50


def main() -> int:
    """Fill, index, search, print, and exit 0; 1 if a search found something else than its key."""
    parser = on_disk.parser("python -m benches.log.bench_find", __doc__)
    parser.add_argument("--records", type=int, default=RECORDS)
    given = parser.parse_args()
    records = QUICK_RECORDS if given.quick else given.records
    uname = os.uname()
    print(
        f"{os.cpu_count()} CPUs, {uname.sysname} {uname.release}, Python {platform.python_version()},"
        f" {on_disk.filesystem(given.directory)}; load {os.getloadavg()[0]:.1f}; {records:,} records,"
        f" values of {VALUE_BYTES} bytes, {BATCH:,} in a batch",
        flush=True,
    )
    with on_disk.folder(given.directory, "find-") as folder:
        floors.run_loop(_measure(folder, records, segment_bytes=MIB if given.quick else 256 * MIB))
    return 0


def _key(number: int) -> bytes:
    return b"key-%012d" % number


async def _fill(partition: Partition, records: int) -> None:
    value, room = b"v" * VALUE_BYTES, asyncio.Semaphore(IN_FLIGHT)

    async def append(first: int) -> None:
        keys = [_key(n) for n in range(first, min(first + BATCH, records))]
        frame = build([value] * len(keys), keys=keys)
        try:
            await partition.appends.append_frame(frame, Header.unpack(frame))
        finally:
            room.release()

    async with asyncio.TaskGroup() as tasks:
        for first in range(0, records, BATCH):
            await room.acquire()
            tasks.create_task(append(first))


async def _search(partition: Partition, key: bytes, end: int) -> tuple[float, list[Scanned]]:
    """Search for a key in all that lies before `end`; return the seconds, and each step."""
    loop, pace = asyncio.get_running_loop(), Pace(UNLIMITED)
    wanted = Wanted(Where(key=key), newest=False, limit=100, value_bytes=100, most_bytes=MIB)
    began_s, low, steps = time.perf_counter(), 0, list[Scanned]()
    while low < end:
        span = Span(0, GROUP, low, end)
        steps.append(await scan(partition, span, wanted, pace, until_s=loop.time() + 2.0))
        low = steps[-1].low
    return time.perf_counter() - began_s, steps


async def _written(partition: Partition) -> None:
    """Wait until all is in its segment."""
    for _ in range(10_000):
        if partition.log.written_index == partition.log.last_index:
            return
        await asyncio.sleep(0.05)


def _bytes_of(folder: Path, names: str) -> int:
    return sum(path.stat().st_size for path in folder.rglob(names))


def _forget_pages(folder: Path) -> None:
    """Let the files' pages leave memory, as far as the kernel does."""
    for path in folder.rglob("*.*"):
        if path.suffix in (".log", ".index", ".find"):
            file = RealDisk().open(str(path))
            file.sync()
            file.drop_cached(file.size(), 0)
            file.close()


async def _measure(folder: Path, records: int, segment_bytes: int) -> None:
    rng, clock = random.Random(1), time.perf_counter
    settings = StorageSettings(segment_size_bytes=segment_bytes)
    async with lone_partition(folder, settings=settings) as partition:
        log, began_s = partition.log, clock()
        await _fill(partition, records)
        await _written(partition)
        sealed = log.sealed_segments()
        end, size = sealed[-1].next_offset, sum(each.size for each in sealed)
        print(
            f"filled in {clock() - began_s:.0f} s: {end:,} records, {size / 1e6:.0f} MB in {len(sealed)}"
            " sealed segments",
            flush=True,
        )
        keys = [rng.randrange(end) for _ in range(LOOKUPS)]
        scans = [await _found(partition, number, end) for number in keys[:SCANS]]
        _print("scan, warm", scans)
        indexer = Indexer(
            lambda: [partition],
            setting_of=lambda topic: "key",
            pace=Pace(UNLIMITED),
            entries_per_s=UNLIMITED,
        )
        began_s, began_cpu_s = clock(), time.process_time()
        while await indexer.run_pass():
            pass
        bytes_of_indexes = _bytes_of(folder, "*.find")
        print(
            f"indexed in {clock() - began_s:.0f} s, {time.process_time() - began_cpu_s:.0f} s of CPU:"
            f" {bytes_of_indexes / 1e6:.1f} MB, {bytes_of_indexes / end:.1f} bytes a record,"
            f" {100 * bytes_of_indexes / size:.1f} % of the log",
            flush=True,
        )
        cold = []
        for number in keys[:10]:
            await asyncio.to_thread(_forget_pages, folder)
            cold.append(await _found(partition, number, end))
        _print("index, cold", cold)
        warm = [await _found(partition, number, end) for number in keys]
        _print("index, warm", warm)
        ratio = statistics.median(s for s, _ in scans) / statistics.median(s for s, _ in warm)
        print(f"bench-find: records={records} warm_ms={_median_ms(warm):.2f} scan_by_index={ratio:.0f}")


async def _found(partition: Partition, number: int, end: int) -> tuple[float, int]:
    """Search for the key of a record; return the seconds, and the bytes that were read."""
    took_s, steps = await _search(partition, _key(number), end)
    found = [each.offset for step in steps for each in step.found]
    if found != [number]:
        sys.exit(f"a search for the key of record {number} found {found}")
    return took_s, sum(step.bytes for step in steps)


def _median_ms(found: Sequence[tuple[float, int]]) -> float:
    return 1000 * statistics.median(took_s for took_s, _ in found)


def _print(what: str, found: Sequence[tuple[float, int]]) -> None:
    longest = 1000 * max(took_s for took_s, _ in found)
    print(
        f"{what}: median {_median_ms(found):,.2f} ms, longest {longest:,.2f} ms, of {len(found)};"
        f" {statistics.mean(size for _, size in found) / 1000:,.0f} kB read",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
