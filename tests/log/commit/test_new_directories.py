"""Logs that get their first entries together: their directories are made with one sync, and fail as one."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from laminar.log import RealDisk, Storage
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import History, contents, frame_for, open_inline, run

_LOGS = 40


class _CountingDisk(RealDisk):
    """The real disk, which counts the syncs of directories and says which names it was given together."""

    def __init__(self) -> None:
        self.synced: Counter[str] = Counter()
        self.together: list[int] = []

    def make_directories(self, paths: Sequence[str]) -> None:
        self.together.append(len(paths))
        super().make_directories(paths)

    def sync_directory(self, path: str) -> None:
        self.synced[os.path.basename(path)] += 1
        super().sync_directory(path)


def test_many_new_logs_take_few_syncs_of_their_folder(tmp_path: Path) -> None:
    """Two for each log would be eighty."""
    disk = _CountingDisk()

    async def main() -> None:
        storage = Storage.open(disk, f"{tmp_path}/home", f"{tmp_path}/logs")
        logs = [storage.create_log("log", number + 1) for number in range(_LOGS)]
        await storage.sync()
        disk.synced.clear()
        for log in logs:
            log.append([frame_for(log, [b"value"])])
        await storage.sync()
        await storage.checkpoint()
        assert [_LOGS] == disk.together
        assert 1 <= disk.synced["logs"] <= 2, disk.synced
        assert all(disk.synced[os.path.basename(log.files.directory)] == 1 for log in logs)
        await storage.close()

        again = Storage.open(disk, f"{tmp_path}/home", f"{tmp_path}/logs")
        assert [1] * _LOGS == [len(contents(log)) for log in again.logs.values()]
        await again.close()

    run(main())


def test_a_failed_sync_of_new_directories_stops_those_logs_and_no_other() -> None:
    """It is not tried again: a second sync might succeed without having written what the first had to."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.write(1, b"before")
        await history.sync()
        await history.storage.checkpoint()
        failures: list[str] = []

        def fail_once(operation: str, path: str) -> int | None:
            if operation == "sync directory" and path.endswith("logs") and not failures:
                failures.append(path)
                return errno.EIO
            return None

        disk.error = fail_once
        for number in (2, 3):
            history.create(number)
        for number in (2, 3):
            history.write(number, b"lost with its folder, and not with the journal")
        history.write(1, b"after")
        await history.sync()
        await history.storage.checkpoint()

        assert len(failures) == 1
        assert [False, True, True] == [history.storage.logs[n].failure is not None for n in (1, 2, 3)]
        disk.kill()
        found = open_inline(disk).logs
        assert [2, 1, 1] == [len(contents(found[number])) for number in (1, 2, 3)]

    run(main())


def test_one_directory_that_cannot_be_made_stops_its_log_alone() -> None:
    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))

        def refused(operation: str, path: str) -> int | None:
            return errno.EIO if operation == "make directory" and "000002" in path else None

        disk.error = refused
        for number in (1, 2, 3):
            history.create(number)
        for number in (1, 2, 3):
            history.write(number, b"value")
        await history.sync()
        await history.storage.checkpoint()

        assert [False, True, False] == [history.storage.logs[n].failure is not None for n in (1, 2, 3)]

    run(main())
