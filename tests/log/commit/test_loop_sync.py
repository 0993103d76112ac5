"""A small group that finds the journal idle is written by the loop's thread; all others by the journal's."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from laminar.log import RealDisk, Storage, StorageSettings
from laminar.log.commit.journal import SLOW_TIMES
from laminar.log.disk.disk import Buffer, File
from laminar.log.disk.threads import SerialThreadExecutor
from tests.log.histories import contents, frame_for

# Whatever a sync takes counts as quick.
QUICK = StorageSettings(loop_sync_us=10**9)


class _File:
    def __init__(self, disk: Watched, file: File) -> None:
        self._disk = disk
        self._file = file
        self.path = file.path

    def pwritev_synced(self, buffers: Sequence[Buffer], position: int) -> int:
        if "journal" in self.path:
            self._disk.threads.append(threading.current_thread().name)
            if self._disk.delay_s:
                time.sleep(self._disk.delay_s)  # what a slow disk does
        return self._file.pwritev_synced(buffers, position)

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)


class Watched(RealDisk):
    """The real disk, which notes what thread writes frames, and may be slow."""

    def __init__(self) -> None:
        self.threads: list[str] = []
        self.delay_s = 0.0

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        file: File = _File(self, super().open(path, create=create, exclusive=exclusive))  # type: ignore[assignment]  # the rest passes by
        return file


def opened(disk: Watched, folder: Path, settings: StorageSettings = QUICK) -> Storage:
    storage = Storage.open(disk, f"{folder}/home", f"{folder}/logs", settings=settings)
    disk.threads.clear()
    return storage


LOOP = threading.main_thread().name


async def test_one_append_at_a_time_is_written_by_the_loops_thread(tmp_path: Path) -> None:
    disk = Watched()
    storage = opened(disk, tmp_path)
    log = storage.create_log("t-0", 1)
    await storage.sync()
    disk.threads.clear()
    for number in range(20):
        log.append([frame_for(log, [b"%d" % number])])
        await storage.sync()
        assert log.last_index == log.durable_index
    # Whenever the journal's thread wrote the end mark at that moment, the frame was that thread's.
    assert disk.threads.count(LOOP) >= 10, disk.threads
    await storage.close()
    again = opened(disk, tmp_path)
    assert 20 == len(contents(again.logs[1]))
    await again.close()


async def test_many_changes_and_large_ones_are_written_by_the_journals_thread(tmp_path: Path) -> None:
    disk = Watched()
    storage = opened(disk, tmp_path)
    logs = [storage.create_log(f"t-{number}", number) for number in range(1, 5)]
    await storage.sync()
    disk.threads.clear()
    for log in logs:
        log.append([frame_for(log, [b"x"])])
    await storage.sync()
    assert LOOP not in disk.threads
    logs[0].append([frame_for(logs[0], [b"x" * 100_000])])
    await storage.sync()
    assert LOOP not in disk.threads
    await storage.close()


async def test_after_a_slow_sync_the_loop_waits_for_none(tmp_path: Path) -> None:
    disk = Watched()
    storage = opened(disk, tmp_path, StorageSettings(loop_sync_us=20_000))
    log = storage.create_log("t-0", 1)
    await storage.sync()
    disk.delay_s = SLOW_TIMES * 0.02
    log.append([frame_for(log, [b"slow"])])
    await storage.sync()
    disk.delay_s = 0.0
    storage._journal.last_sync_us = 0  # as after a quick one of another thread
    disk.threads.clear()
    log.append([frame_for(log, [b"after it"])])
    await storage.sync()
    assert ["journal"] == disk.threads
    await storage.close()


async def test_a_disk_that_takes_longer_than_the_setting_is_not_waited_for(tmp_path: Path) -> None:
    disk = Watched()
    storage = opened(disk, tmp_path, StorageSettings(loop_sync_us=1))
    log = storage.create_log("t-0", 1)
    await storage.sync()
    disk.threads.clear()
    for _ in range(5):
        log.append([frame_for(log, [b"x"])])
        await storage.sync()
    assert LOOP not in disk.threads
    await storage.close()


async def test_a_storage_that_is_closed_before_the_turn_of_the_write_loses_nothing(tmp_path: Path) -> None:
    disk = Watched()
    storage = opened(disk, tmp_path)
    log = storage.create_log("t-0", 1)
    await storage.sync()
    log.append([frame_for(log, [b"x"])])
    storage._commits._end_turn()
    closing = asyncio.ensure_future(storage.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    again = opened(disk, tmp_path)
    assert 1 == len(contents(again.logs[1]))
    await again.close()


async def test_two_tasks_of_a_serial_executor_never_overlap_and_keep_their_order() -> None:
    """Whether the loop's thread may run a task, and what is submitted meanwhile."""
    worker = SerialThreadExecutor("test")
    gate, begun = threading.Event(), threading.Event()
    ran: list[str] = []

    def held() -> None:
        begun.set()
        gate.wait()
        ran.append("held")

    assert worker.run_here(lambda: ran.append("here"))
    worker.submit(held)
    assert not worker.run_here(lambda: ran.append("too early"))
    begun.wait()
    assert not worker.run_here(lambda: ran.append("too early"))
    gate.set()
    worker.close()
    assert ["here", "held"] == ran

    submitted = threading.Thread(target=lambda: worker.submit(lambda: ran.append("after")))

    def here() -> None:
        submitted.start()
        submitted.join()  # it is in the queue, and its thread waits
        ran.append("before")

    assert worker.run_here(here)
    worker.close()
    assert ["here", "held", "before", "after"] == ran
