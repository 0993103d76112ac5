"""The trash: deleted topics and replaced logs, kept for a day and then removed.

A log's directory arrives by one rename, which keeps no time of its own. So the first pass that sees a
directory renames it to `NAME@MS`; once that time is old enough, its files are removed one by one, with
pauses, in another thread. When disk space is low nothing is kept.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re

from laminar.log.disk.disk import Disk
from laminar.log.disk.errors import DiskError

_log = logging.getLogger("laminar.trash")

PAUSE_S = 0.01
_STAMPED = re.compile(r".+@(\d{1,16})")


class Trash:
    """The trash of one data folder or folder of logs. Only one process may purge it."""

    def __init__(self, disk: Disk, directory: str, *, keep_ms: int) -> None:
        self._disk = disk
        self._directory = directory
        self._keep_ms = keep_ms
        self.removed = 0

    async def purge(self, *, now_ms: int, everything: bool = False) -> None:
        """Remove the directories that have been in the trash for `keep_ms`; all with `everything`.

        Directories seen for the first time are renamed, so that their names have the time `now_ms` (in ms
        since the epoch), from which `keep_ms` count. A `DiskError` is logged, and ends this call.
        """
        loop = asyncio.get_running_loop()
        try:
            for name in await loop.run_in_executor(None, self._due, now_ms, everything):
                await self._remove(os.path.join(self._directory, name))
                self.removed += 1
                _log.info("removed %s from the trash", name)
        except DiskError as error:
            _log.warning("the trash cannot be emptied: %s", error)

    def _due(self, now_ms: int, everything: bool) -> list[str]:
        due = []
        new = False
        for name in self._disk.list(self._directory):
            found = _STAMPED.fullmatch(name)
            if everything or (found and now_ms - int(found[1]) >= self._keep_ms):
                due.append(name)
            elif not found:
                old = os.path.join(self._directory, name)
                self._disk.rename(old, f"{old}@{now_ms}")
                new = True
        if new:
            self._disk.sync_directory(self._directory)
        return due

    async def _remove(self, folder: str) -> None:
        """Remove a directory file by file, with pauses.

        Unlinking a large file takes long, and commits and reads need the disk too.
        """
        loop = asyncio.get_running_loop()
        for name in await loop.run_in_executor(None, self._disk.list, folder):
            await loop.run_in_executor(None, self._disk.unlink, os.path.join(folder, name))
            await asyncio.sleep(PAUSE_S)
        await loop.run_in_executor(None, self._disk.remove_tree, folder)
