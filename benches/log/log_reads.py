"""What reading from the log costs: scans, point reads, and what a cold replay does to the writers."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow
from crc32c import crc32c

from benches.common.floors import percentile
from benches.log.laminarmq_format import read_all, write_all
from benches.log.log_rig import (
    BATCH_BYTES,
    MIB,
    Rig,
    UnsyncedDisk,
    append_all,
    batch_values,
    fill,
    interleave,
    place,
)
from benches.log.log_targets import SIZES, Found
from laminar.batch import Batch, build
from laminar.batch.arrow.pyarrow_out import table
from laminar.log import Log, Storage, StorageSettings

# What a reader asks for at a time, as a fetch does.
READ_BYTES = MIB
# Nothing is served from the memory of recent frames: every byte comes from a file.
FROM_FILES = StorageSettings(recent_bytes=0)


def _files(path: Path) -> list[Path]:
    return sorted(path.glob("logs/*/*.log"))


def forget(storage: Storage) -> None:
    """Let go of frames in memory, so that reads go to the files."""
    storage._changes.evict_written()


def scan(rig: Rig, *, total_bytes: int, rounds: int) -> Found:
    """MB/s of a whole log into one Arrow table, verified; beside it, pread and crc32c of the same files.

    Both keep what they have read until the end: a table of everything, the same bytes as buffers. One round
    before is not counted: it fetches the memory.
    """
    with rig.directory() as path, rig.storage(path, settings=FROM_FILES) as storage:
        log = storage.create_log("scan")
        written = rig.run(fill(storage, log, total_bytes=total_bytes, values=batch_values(1024)))
        forget(storage)
        files = _files(path)

        def ours() -> float:
            began = time.perf_counter()
            rows = rig.run(_table(log)).num_rows
            took = time.perf_counter() - began
            assert rows == log.next_offset, f"{rows} rows of {log.next_offset}"
            return written / 1e6 / took

        def bare() -> float:
            began = time.perf_counter()
            kept = [piece for file in files for piece in _bare_scan(file)]
            took = time.perf_counter() - began
            assert sum(map(len, kept)) == written, f"{sum(map(len, kept))} bytes of {written}"
            return written / 1e6 / took

        ours_rates, bare_rates = interleave(1 + rounds, ours, bare)
    return Found(ours_rates[1:], bare_rates[1:])


async def _table(log: Log) -> pyarrow.Table:
    batches: list[Batch] = []
    index = log.first_index
    while index <= log.last_index:
        frames = await log.read(index, log.last_index, max_bytes=READ_BYTES)
        batches += [Batch(frame, verified=True) for frame in frames]
        index += len(frames)
    return table(batches)


def _bare_scan(path: Path) -> list[bytes]:
    fd = os.open(path, os.O_RDONLY)
    pieces = []
    position = 0
    try:
        while piece := os.pread(fd, READ_BYTES, position):
            crc32c(piece)
            pieces.append(piece)
            position += len(piece)
    finally:
        os.close(fd)
    return pieces


def point_reads(rig: Rig, *, reads: int, rounds: int) -> dict[str, Found]:
    """µs to find and read one record by offset, its batch verified each time, in two sizes of batch."""
    return {
        "point_read_us": _point_reads(rig, 4096, total_bytes=16 * MIB, reads=reads, rounds=rounds),
        "point_read_256k_us": _point_reads(
            rig, BATCH_BYTES, total_bytes=64 * MIB, reads=max(10, reads // 10), rounds=rounds
        ),
    }


def _point_reads(rig: Rig, batch_bytes: int, *, total_bytes: int, reads: int, rounds: int) -> Found:
    """Beside it: one pread and one crc32c of a batch's bytes at a random place."""
    rng = random.Random(1)
    values = batch_values(1024, batch_bytes)
    with rig.directory() as path, rig.storage(path, settings=FROM_FILES) as storage:
        log = storage.create_log("points")
        rig.run(fill(storage, log, total_bytes=total_bytes, values=values))
        forget(storage)
        size = len(build(values))
        offsets = [rng.randrange(log.next_offset) for _ in range(reads)]
        fd = os.open(_files(path)[0], os.O_RDONLY)
        read_one(log, offsets[0])

        def ours() -> float:
            began = time.perf_counter()
            for offset in offsets:
                read_one(log, offset)
            return (time.perf_counter() - began) / reads * 1e6

        def bare() -> float:
            positions = [offset // len(values) * size for offset in offsets]
            began = time.perf_counter()
            for position in positions:
                crc32c(os.pread(fd, size, position))
            return (time.perf_counter() - began) / reads * 1e6

        found = interleave(rounds, ours, bare)
        os.close(fd)
    return Found(found[0], found[1])


def read_one(log: Log, offset: int) -> memoryview:
    """The value of one record, from a file that is in memory."""
    value = log.value_nowait(offset)
    assert value is not None, f"record {offset} of {log!r} is not in memory"
    return value


def sizes_read(rig: Rig, *, records: int, rounds: int) -> dict[str, Found]:
    """µs a record to read all in order, verified, each as bytes of its own; beside laminarmq's format."""
    return {
        f"read_{size}_us": _size_read(rig, [os.urandom(size) for _ in range(records)], rounds=rounds)
        for size in SIZES
    }


def _size_read(rig: Rig, values: list[bytes], *, rounds: int) -> Found:
    size, records = len(values[0]), len(values)
    each = max(1, BATCH_BYTES // size)
    with (
        rig.directory() as bare_path,
        rig.directory() as path,
        rig.storage(path, UnsyncedDisk(), FROM_FILES) as storage,
    ):
        log = storage.create_log("sizes")
        rig.run(append_all(storage, log, (build(values[at : at + each]) for at in range(0, records, each))))
        forget(storage)
        segment = write_all(bare_path, values)

        def measured(read: Callable[[], int]) -> float:
            began = time.perf_counter()
            total = read()
            took = time.perf_counter() - began
            assert total == records * size, f"{total} bytes of {records * size}"
            return took / records * 1e6

        found = interleave(
            rounds,
            lambda: measured(lambda: rig.run(_values(log))),
            lambda: measured(lambda: read_all(segment, records)),
        )
        segment.close()
    return Found(found[0], found[1])


async def _values(log: Log) -> int:
    total = 0
    index = log.first_index
    while index <= log.last_index:
        frames = await log.read(index, log.last_index, max_bytes=READ_BYTES)
        for frame in frames:
            for value in Batch(frame, verified=True).values:
                total += len(value)
        index += len(frames)
    return total


def cold_reader(rig: Rig, *, total_bytes: int, commits: int, rounds: int) -> Found:
    """p99 in ms of one 4 KiB commit after the other, with a reader of cold data beside it, and without.

    The reader replays the log over and over; its pages are dropped (`posix_fadvise`) before each pass. Reader
    and writer share one storage and one loop, as consumers and producers of a shard do.
    """
    with (
        rig.directory() as path,
        rig.storage(path, settings=StorageSettings(segment_size_bytes=64 * MIB)) as storage,
    ):
        cold = storage.create_log("cold")
        rig.run(fill(storage, cold, total_bytes=total_bytes, values=batch_values(1024)))
        forget(storage)
        hot = storage.create_log("hot")
        cold_files = [file for file in _files(path) if "cold" in file.parent.name]
        pairs = [
            (
                rig.run(_with_reader(storage, hot, cold, cold_files, commits)),
                rig.run(_p99(storage, hot, commits)),
            )
            for _ in range(rounds)
        ]
    return Found([with_reader for with_reader, _ in pairs], [without for _, without in pairs])


async def _with_reader(storage: Storage, hot: Log, cold: Log, files: list[Path], commits: int) -> float:
    reader = asyncio.ensure_future(_replay(cold, files))
    try:
        return await _p99(storage, hot, commits)
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)


async def _replay(cold: Log, files: list[Path]) -> None:
    while True:
        await asyncio.to_thread(drop, files)
        index = cold.first_index
        while index <= cold.last_index:
            index += len(await cold.read(index, cold.last_index, max_bytes=READ_BYTES))


def drop(files: list[Path]) -> None:
    """Take the pages of synced files out of memory."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


async def _p99(storage: Storage, log: Log, commits: int) -> float:
    ready = build([os.urandom(4096)])
    took = []
    for _ in range(commits):
        frame = ready[:]
        began = time.perf_counter()
        place(log, frame)
        log.append([frame])
        await storage.sync()
        took.append((time.perf_counter() - began) * 1000)
    return percentile(took, 0.99)
