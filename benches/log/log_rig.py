"""What the benches of the log share: a storage on the real disk, batches for it, and the bare loops.

`Rig` is one event loop and one folder for a whole run. The bare loops write and read the same bytes in the
same order as the storage does, sync and sum what it syncs and sums, and do nothing else.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import uvloop
from crc32c import crc32c

from laminar.batch import build, stamp
from laminar.log import Disk, File, Log, RealDisk, Storage, StorageSettings
from laminar.log.disk.disk import Buffer, RealFile

T = TypeVar("T")
KIB, MIB = 1024, 1 << 20
BATCH_BYTES = 256 * KIB
JOURNAL_BYTES = 64 * MIB
# Batches handed to the log and not yet known to be written.
IN_FLIGHT = 8


class UnsyncedFile(RealFile):
    """A file whose bytes reach the disk when the kernel likes."""

    def sync(self) -> None:
        return None

    def pwritev_synced(self, buffers: Sequence[Buffer], position: int) -> int:
        return self.pwritev(buffers, position)

    def start_writeback(self, size: int, position: int) -> None:
        # It only makes a later sync shorter.
        return None


class _Unsynced:
    def sync(self) -> None:
        return None

    def close(self) -> None:
        return None


class UnsyncedDisk(RealDisk):
    """The real disk without its syncs: what a log costs beside them."""

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        file = super().open(path, create=create, exclusive=exclusive)
        assert isinstance(file, RealFile), f"{path} is a {type(file).__name__}"
        return UnsyncedFile(path, os.dup(file._fd))

    def sync_directory(self, path: str) -> None:
        return None


class Rig:
    """One loop and one folder. Every storage is opened in a folder of its own, and goes with it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._numbers = itertools.count()

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self._runner.run(work)

    def close(self) -> None:
        self._runner.close()

    @contextmanager
    def directory(self) -> Iterator[Path]:
        """A new folder, removed afterwards."""
        path = self.folder / str(next(self._numbers))
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path)

    @contextmanager
    def storage(
        self, path: Path, disk: Disk | None = None, settings: StorageSettings | None = None
    ) -> Iterator[Storage]:
        storage = Storage.open(disk or RealDisk(), f"{path}/home", f"{path}/logs", settings=settings)
        try:
            yield storage
        finally:
            self.run(storage.close())


def batch_values(record_bytes: int, batch_bytes: int = BATCH_BYTES) -> list[bytes]:
    """Random records that fill one batch up to that size, with its head, its directory and its offsets."""
    count = max(1, (batch_bytes - 256) // (record_bytes + 4))
    return [os.urandom(record_bytes) for _ in range(count)]


def place(log: Log, frame: bytearray) -> None:
    """Stamp a frame as the next of a log, as a leader does."""
    stamp(
        frame,
        index=log.last_index + 1,
        term=1,
        prev_term=log.last_term,
        base_offset=log.next_offset,
        append_time_ms=max(int(time.time() * 1000), log.last_append_time_ms),
        committed_index=log.last_index,
        opens_segment=log.segment_full,
    )


async def append_all(storage: Storage, log: Log, frames: Iterator[bytearray]) -> int:
    """Stamp and append all, a few on their way at any time; all are in their segments on return."""
    waiting: deque[asyncio.Future[None]] = deque()
    written = 0
    for frame in frames:
        place(log, frame)
        log.append([frame])
        written += len(frame)
        waiting.append(storage.sync_log(log))
        if len(waiting) >= IN_FLIGHT:
            await waiting.popleft()
    for future in waiting:
        await future
    await storage.checkpoint()
    return written


async def fill(storage: Storage, log: Log, *, total_bytes: int, values: Sequence[bytes]) -> int:
    """Append copies of one batch until so many bytes are there; returns how many are."""
    frame = build(values)
    count = max(1, total_bytes // len(frame))
    return await append_all(storage, log, (frame[:] for _ in range(count)))


async def forget_log(storage: Storage, log: Log) -> None:
    """Delete a log, and its files too: in the trash their pages would go on being written to the disk, while
    the bare loop overwrites its own.
    """
    folder = Path(log.files.directory)
    await storage.delete_log(log.log_id)
    await storage.checkpoint()
    shutil.rmtree(folder.parent.parent / "trash", ignore_errors=True)


def interleave(rounds: int, *sides: Callable[[], float]) -> list[list[float]]:
    """Run the sides by turns, so that what disturbs the machine disturbs all of them."""
    found: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for values, side in zip(found, sides, strict=True):
            values.append(side())
    return found


class BareWriter:
    """Two files, as a journal and a segment: the first zero-filled and used again, the second appended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._journal = os.open(path / "journal", os.O_CREAT | os.O_RDWR, 0o600)
        for position in range(0, JOURNAL_BYTES, MIB):
            os.pwrite(self._journal, bytes(MIB), position)

    def write(self, batches: int, make: Callable[[], bytes]) -> float:
        """Seconds for so many batches, each summed by `make`, and once more for the journal."""
        segment = os.open(self._path / "segment", os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
        position = journal_position = 0
        began = time.perf_counter()
        for _ in range(batches):
            frame = make()
            if journal_position + len(frame) > JOURNAL_BYTES:
                journal_position = 0
            crc32c(frame)
            journal_position += os.pwrite(self._journal, frame, journal_position)
            position += os.pwrite(segment, frame, position)
        took = time.perf_counter() - began
        os.close(segment)
        # As a log is deleted: each side then gets the page cache's memory as the other has left it. A file
        # cut and written again gets its own pages back, which are warm, and everybody else cold ones.
        os.unlink(self._path / "segment")
        return took

    def close(self) -> None:
        os.close(self._journal)
