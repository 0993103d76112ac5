"""A checkpoint syncs a segment while the writer's thread is inside a write to it: that write is not covered.

On the real disk, with its threads and two gates: the sync waits for the write to begin, the write for the
sync to end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from laminar.log import RealDisk, Storage, StorageSettings
from laminar.log.commit.snapshot import Snapshot
from laminar.log.disk.disk import Buffer, File
from tests.log.histories import frame_for

# Reached only by what hangs: a sync of a busy disk takes seconds.
LIMIT_S = 60


class GatedFile:
    """A real file of a `GatedDisk`."""

    def __init__(self, disk: GatedDisk, file: File) -> None:
        self._disk = disk
        self._file = file
        self.path = file.path

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        self._disk.write_begins("write", self.path)
        return self._file.pwritev(buffers, position)

    def truncate(self, size: int) -> None:
        self._disk.write_begins("truncate", self.path)
        self._file.truncate(size)

    def sync(self) -> None:
        self._file.sync()
        self._disk.sync_ended(self.path)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class GatedDisk(RealDisk):
    """The real disk. While `gated` names an operation, the next such one of a segment spans the
    sync of a checkpoint.
    """

    def __init__(self) -> None:
        self.gated: str | None = None
        self.near = threading.Event()
        self._begun = threading.Event()
        self._synced = threading.Event()
        self.syncs = 0

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        file: File = GatedFile(self, super().open(path, create=create, exclusive=exclusive))  # type: ignore[assignment]  # the rest passes by
        return file

    def write_begins(self, operation: str, path: str) -> None:
        if path.endswith(".log") and operation == self.gated and self.near.is_set():
            self._begun.set()
            assert self._synced.wait(LIMIT_S), "the sync did not end while the write was under way"

    def sync_is_near(self) -> None:
        if self.gated is not None:
            self._synced.clear()
            self.near.set()
            assert self._begun.wait(LIMIT_S), "the write did not begin before the sync"

    def sync_ended(self, path: str) -> None:
        if path.endswith(".log"):
            self.syncs += 1
            self._synced.set()


@pytest.mark.parametrize("operation", ["write", "truncate"])
async def test_a_write_under_way_during_a_sync_is_synced_by_the_next_checkpoint(
    tmp_path: Path, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = GatedDisk()
    storage = Storage.open(disk, f"{tmp_path}/home", f"{tmp_path}/logs", settings=StorageSettings())
    sync = storage._writer.sync

    def sync_beside_a_write(snapshot: Snapshot) -> None:
        disk.sync_is_near()
        sync(snapshot)

    monkeypatch.setattr(storage._writer, "sync", sync_beside_a_write)
    log = storage.create_log("log", 1)
    log.append([frame_for(log, [b"first"])])
    log.append([frame_for(log, [b"second"])])
    await storage.sync()
    await storage.checkpoint()
    log.append([frame_for(log, [b"third"])])
    await storage.sync()
    syncs = disk.syncs

    disk.gated = operation
    first = asyncio.ensure_future(storage.checkpoint())
    assert await asyncio.to_thread(disk.near.wait, LIMIT_S)
    if operation == "write":
        log.append([frame_for(log, [b"fourth"])])
    else:
        log.truncate(2)
    await storage.sync()
    await first
    disk.gated = None

    assert disk.syncs == syncs + 1
    await storage.checkpoint()
    assert disk.syncs == syncs + 2, "the checkpoint names bytes that no sync has covered"
    await storage.close()
