"""What a large log costs before anything is read from it: to open, to index again, and in memory.

A log of 10 GB is made of valid batches whose values are zeros. It is written by the storage itself, on a
disk that leaves such zeros out of the files: they are holes, which read back as the same zeros. Memory is
measured in a process of its own (``python -m benches.log.log_sizes DIRECTORY``), which prints what it uses.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benches.common.usage import pss_mib
from benches.log.log_rig import BATCH_BYTES, Rig, UnsyncedDisk, UnsyncedFile, append_all, batch_values, place
from benches.log.log_targets import Found
from laminar.batch import Batch, build
from laminar.log import File, Log, RealDisk, Storage
from laminar.log.disk.disk import Buffer

# Of a frame of zeros, what lies before the first value is in its first page.
_HEAD_BYTES = 4096
_ROOT = Path(__file__).parents[2]


class _HollowFile(UnsyncedFile):
    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        end = position
        for buffer in buffers:
            if len(buffer) >= BATCH_BYTES // 2:
                super().pwritev([memoryview(buffer)[:_HEAD_BYTES]], end)
            else:
                super().pwritev([buffer], end)
            end += len(buffer)
        if end > self.size():
            self.truncate(end)
        return end - position


class HollowDisk(UnsyncedDisk):
    """Leaves the body of large frames out: only for frames whose body is zeros behind the first page."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        file = super().open(path, create=create, exclusive=exclusive)
        assert isinstance(file, UnsyncedFile), f"{path} is a {type(file).__name__}"
        return _HollowFile(path, os.dup(file._fd))


def large_log(rig: Rig, *, total_bytes: int, rounds: int) -> dict[str, Found]:
    """Seconds to open a log of so many bytes; MB/s at which its index is rebuilt; memory when read from."""
    with rig.directory() as path:
        frame = build([bytes(1024)] * (BATCH_BYTES // 1024 - 4))
        with rig.storage(path, HollowDisk()) as storage:
            log = storage.create_log("large")
            count = max(2, total_bytes // len(frame))
            written = rig.run(append_all(storage, log, (frame[:] for _ in range(count))))
        opened = [_opened(path) for _ in range(rounds)]
        rss = [_memory(path) for _ in range(min(rounds, 3))]
        rebuilt = []
        for _ in range(min(rounds, 3)):
            for index in path.glob("logs/*/*.index"):
                index.unlink()
            rebuilt.append(written / 1e6 / _opened(path))
    return {"open_s": Found(opened), "rebuild_mb_per_s": Found(rebuilt), "rss_large_mib": Found(rss)}


def _opened(path: Path) -> float:
    """Seconds until the first and the last record of the only log are read, on a fresh storage."""
    began = time.perf_counter()
    storage = Storage.open(RealDisk(), f"{path}/home", f"{path}/logs")
    (log,) = storage.logs.values()
    with asyncio.Runner() as runner:
        runner.run(_ends(log))
        took = time.perf_counter() - began
        runner.run(storage.close())
    return took


async def _ends(log: Log) -> None:
    for index in (log.first_index, log.last_index):
        (frame,) = await log.read(index, index, max_bytes=1)
        assert Batch(frame, verified=True).header.index == index


def many_logs(rig: Rig, *, logs: int, rounds: int) -> Found:
    """MiB of a process that holds so many logs open and has read from each."""
    with rig.directory() as path:
        with rig.storage(path) as storage:
            rig.run(_make_logs(storage, logs))
        return Found([_memory(path) for _ in range(min(rounds, 3))])


async def _make_logs(storage: Storage, count: int) -> None:
    frame = build(batch_values(1024, 4096))
    for number in range(count):
        log = storage.create_log(f"p-{number}")
        for _ in range(4):
            each = frame[:]
            place(log, each)
            log.append([each])
    await storage.sync()


def _memory(path: Path) -> float:
    command = [sys.executable, "-m", "benches.log.log_sizes", str(path)]
    ran = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=True)
    found: float = json.loads(ran.stdout)["pss_mib"]
    return found


def main() -> None:
    """Open what lies in a folder, read 2,000 records from all over it, and print the memory in use."""
    path = sys.argv[1]
    rng = random.Random(1)
    storage = Storage.open(RealDisk(), f"{path}/home", f"{path}/logs")
    logs = list(storage.logs.values())

    async def read() -> None:
        for number in range(max(2000, 2 * len(logs))):
            log = logs[number % len(logs)]
            index = rng.randint(log.first_index, log.last_index)
            await log.read(index, index, max_bytes=1)
        print(json.dumps({"pss_mib": pss_mib([os.getpid()]), "logs": len(logs)}))
        await storage.close()

    asyncio.run(read())


if __name__ == "__main__":
    main()
