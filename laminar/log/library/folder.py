"""Logs in a user's own process and loop: a folder of named logs, without a server.

The storage is that of a node's shard (`Storage`, `Log`), for programs that need nothing else of a node. What
Raft and the API do in a node is done here and in `local_log`: stamp batches, choose ids, wait for durability,
and turn offsets into entries. There are no replicas, so damage is final: a log that lost acknowledged records
at its end says so, and refuses appends until its owner accepts the loss.

One process at a time may hold a folder. All of it belongs to one loop; within it, any number of tasks may
append to and read from any of the logs.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from laminar.log.disk.disk import Disk, Lock, RealDisk
from laminar.log.disk.errors import DiskError, FolderInUse, NotALogFolder, RecordsLost, StorageClosed
from laminar.log.disk.trash import Trash
from laminar.log.format.flush_policy import FlushPolicy
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.format.settings import MIB, StorageSettings
from laminar.log.library.disk_space import FreeSpace
from laminar.log.library.local_log import LocalLog
from laminar.log.storage import Storage

STORE = "store"
LOGS = "logs"
_LOCK = "lock"
_TRASH = "trash"
_KEEP_TRASH_MS = 24 * 3600 * 1000
_EMPTY_TRASH_EVERY_S = 3600.0
# Names that may be in a folder of logs; anything else is not ours.
_OURS = frozenset({STORE, LOGS, _LOCK, _TRASH, "lost+found"})
_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
_ONLY = "log"


class LogFolder:
    """A folder of named logs that share one journal: concurrent appends to several logs cost one sync.

    `open` makes one; `open_folder` does too, and closes it at the end of a block.
    """

    def __init__(
        self, path: str, lock: Lock, storage: Storage, room: FreeSpace, *, max_batch_bytes: int
    ) -> None:
        self.path = path
        self._lock = lock
        self._storage = storage
        self._room = room
        self._max_batch_bytes = max_batch_bytes
        self._logs: dict[str, LocalLog] = {}
        # Names of logs that calls of `log` wait for, and that are to be made if they are missing.
        self._wanted: set[str] = set()
        self._changing = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None
        self._emptying: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<LogFolder {self.path} {len(self.names)} logs{' closed' if self._closing else ''}>"

    @classmethod
    async def open(
        cls,
        path: str | os.PathLike[str],
        *,
        segment_size_bytes: int | None = None,
        max_batch_bytes: int = 16 * MIB,
        settings: StorageSettings | None = None,
        disk: Disk | None = None,
    ) -> LogFolder:
        """Lock the folder (made if missing), recover its logs, and return it.

        A new segment begins when the last one has `segment_size_bytes` (None: 256 MiB). An append has at most
        `max_batch_bytes`. `settings` are the other settings of the storage. `disk` is for tests.

        Raises:
            FolderInUse: Another process, or this one, has the folder open.
            NotALogFolder: The folder has files that are not those of a folder of logs.
            RecordsLost: The folder has logs, but the list of them is lost.
            StorageError: The disk failed.
        """
        given = settings or StorageSettings()
        if segment_size_bytes is not None:
            given = replace(given, segment_size_bytes=segment_size_bytes)
        loop = asyncio.get_running_loop()
        directory = os.path.join(os.getcwd(), os.fspath(path))
        opening = loop.run_in_executor(None, _open, disk or RealDisk(), directory, given)
        try:
            lock, storage = await asyncio.shield(opening)
        except asyncio.CancelledError:
            # The thread continues: close what it opens, else the folder would stay locked.
            lock, storage = await opening
            await storage.close()
            lock.close()
            raise
        room = FreeSpace(
            disk or RealDisk(), directory, reserve_bytes=given.max_unwritten_bytes + max_batch_bytes
        )
        folder = cls(directory, lock, storage, room, max_batch_bytes=max_batch_bytes)
        try:
            await folder._finish_deletions()
        except BaseException:
            await folder.close()
            raise
        trash = Trash(disk or RealDisk(), os.path.join(directory, _TRASH), keep_ms=_KEEP_TRASH_MS)
        folder._emptying = loop.create_task(_empty(trash), name=f"trash of {directory}")
        return folder

    async def _finish_deletions(self) -> None:
        """Delete the logs that the manifest does not name: their deletion or creation was interrupted."""
        named = {entry.log_id for entry in self._storage.manifest.entries}
        for log_id in self._storage.logs.keys() - named:
            await self._storage.delete_log(log_id)

    @property
    def names(self) -> list[str]:
        """Names of the logs in the manifest, sorted, including those whose records were lost."""
        return sorted(entry.topic for entry in self._storage.manifest.entries)

    async def log(self, name: str, *, create: bool = True, flush: FlushPolicy | None = None) -> LocalLog:
        """Return the log of that name; make it, durably, if it is missing and `create` is set.

        `flush` sets when appends to the log are acknowledged, from now on and after restarts: `COMMIT` (the
        default of a new log), or `FlushPolicy(interval_ms=...)`, with which records survive the end of the
        process, but a power loss may take the last interval. None leaves the policy unchanged.

        Each time that logs are made, the list of all logs is rewritten. So a program that needs many logs
        should ask for them at the same time (`asyncio.gather`): they are made together.

        Raises:
            ValueError: The name is not 1 to 200 letters, digits, '.', '_' or '-'.
            KeyError: There is no such log, and `create` is not set.
            RecordsLost: There was such a log, and all its records are lost.
            StorageClosed: The folder is closed.
        """
        if not _NAME.fullmatch(name) or name in (".", ".."):
            raise ValueError(f"log name {name!r}: 1 to 200 letters, digits, '.', '_' or '-' are allowed")
        if create:
            self._wanted.add(name)
        try:
            return await self._log(name, create=create, flush=flush)
        finally:
            self._wanted.discard(name)

    async def _log(self, name: str, *, create: bool, flush: FlushPolicy | None) -> LocalLog:
        async with self._changing:
            self._check_open()
            entry = next((each for each in self._storage.manifest.entries if each.topic == name), None)
            if entry is None:
                if not create:
                    raise KeyError(name)
                entry = await self._create(name)
            log = self._storage.logs.get(entry.log_id)
            if log is None:
                raise RecordsLost(
                    f"log {name!r} in {self.path} is lost: the journal has no record of it; "
                    "`LogFolder.delete` removes its name"
                )
            if flush is not None:
                await self._storage.set_policy(log, flush)
            known = self._logs.get(name)
            if known is not None:
                return known
            if log.recovering and log.power_lost:
                # Only what the flush policy allows was lost, so the owner has nothing to decide.
                log.set_recovering(recovering=False, incarnation=log.incarnation + 1)
                await self._storage.sync_log(log)
            opened = LocalLog(log, self._storage, self._room, max_batch_bytes=self._max_batch_bytes)
            self._logs[name] = opened
            return opened

    async def _create(self, name: str) -> ReplicaEntry:
        """Make the log `name`, and with it all logs for which other calls wait; return its manifest entry.

        The logs are made first, then the manifest is written: so the manifest never names a log that the
        journal does not have. If this fails, each of the other calls tries to make its own log.
        """
        entries = self._storage.manifest.entries
        names = sorted((self._wanted | {name}) - {each.topic for each in entries})
        self._wanted.clear()
        new = [
            ReplicaEntry(
                log_id=self._storage.create_log(each).log_id,
                replica_id=0,
                group=b"",
                topic=each,
                partition=0,
                partition_hash=0,
                state="made",
            )
            for each in names
        ]
        await self._storage.sync()
        await self._storage.write_manifest([*entries, *new])
        return new[names.index(name)]

    async def delete(self, name: str) -> None:
        """Delete a log and all its records; durable on return. Its files go to the folder's trash.

        From then on all methods of its `LocalLog` raise `StorageClosed`. If this call is cancelled, the
        deletion continues.

        Raises:
            KeyError: There is no such log.
        """
        await self._changing.acquire()
        deleting = asyncio.ensure_future(self._delete(name))
        # The deletion holds `_changing` until it has ended, also if the caller is cancelled and so gets no
        # error.
        deleting.add_done_callback(self._changed)
        await asyncio.shield(deleting)

    def _changed(self, change: asyncio.Future[None]) -> None:
        self._changing.release()
        if not change.cancelled():
            change.exception()

    async def _delete(self, name: str) -> None:
        self._check_open()
        entries = self._storage.manifest.entries
        entry = next((each for each in entries if each.topic == name), None)
        if entry is None:
            raise KeyError(name)
        opened = self._logs.pop(name, None)
        if opened is not None:
            opened.end(f"log {name!r} was deleted")
        await self._storage.write_manifest([each for each in entries if each is not entry])
        if entry.log_id in self._storage.logs:
            await self._storage.delete_log(entry.log_id)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise StorageClosed(f"{self.path} is closed")

    async def close(self) -> None:
        """Close the folder: make everything appended durable, and release files and lock.

        Readers that wait for more records get `StorageClosed`. If this call is cancelled, closing continues,
        and another call waits for its end.
        """
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._emptying is not None:
            self._emptying.cancel()
        for log in self._logs.values():
            log.end(f"{self.path} is closed")
        try:
            await self._storage.close()
        finally:
            self._lock.close()


async def _empty(trash: Trash) -> None:
    """Purge the trash periodically; deleted logs are kept in it for a day."""
    while True:
        await trash.purge(now_ms=time.time_ns() // 1_000_000)
        await asyncio.sleep(_EMPTY_TRASH_EVERY_S)


def _refuse_without_manifest(disk: Disk, directory: str) -> None:
    """Refuse a folder that has logs but no manifest: its store directory was lost.

    A manifest is written with a folder's first log, and nothing removes it. If such a folder were opened, it
    would seem to be empty, and new logs of the same names could be made.

    Raises:
        RecordsLost: There is no manifest; nothing was changed.
    """
    store, logs = os.path.join(directory, STORE), os.path.join(directory, LOGS)
    held = disk.list(logs)
    if held and not any(name.startswith("manifest-") for name in disk.list(store)):
        raise RecordsLost(
            f"{store} has no manifest, so nothing tells which logs there are, but {logs} holds "
            f"{', '.join(held[:3])}{' and more' if held[3:] else ''}; nothing was touched. Put {STORE} back "
            f"from a copy, or move {LOGS} away; `laminar log inspect` shows what is in them"
        )


def _open(disk: Disk, directory: str, settings: StorageSettings) -> tuple[Lock, Storage]:
    """Lock a folder and open its storage. Blocks.

    The folder's own lock comes first: it is refused at once if it is held, while `Storage.open` would wait
    for the lock of the store directory.
    """
    disk.make_directory(directory)
    strange = [name for name in disk.list(directory) if name not in _OURS]
    if strange:
        raise NotALogFolder(
            f"{directory} is not a folder of logs: it holds {', '.join(strange[:3])}"
            + (" and more" if strange[3:] else "")
        )
    try:
        lock = disk.lock(os.path.join(directory, _LOCK), wait=False)
    except DiskError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise FolderInUse(f"{directory} is open already, here or in another process") from error
    try:
        _refuse_without_manifest(disk, directory)
        storage = Storage.open(
            disk, os.path.join(directory, STORE), os.path.join(directory, LOGS), settings=settings
        )
    except BaseException:
        lock.close()
        raise
    return lock, storage


@asynccontextmanager
async def open_folder(
    path: str | os.PathLike[str],
    *,
    segment_size_bytes: int | None = None,
    max_batch_bytes: int = 16 * MIB,
    settings: StorageSettings | None = None,
) -> AsyncIterator[LogFolder]:
    """Open a folder of logs for the length of a block; see `LogFolder.open`."""
    folder = await LogFolder.open(
        path, segment_size_bytes=segment_size_bytes, max_batch_bytes=max_batch_bytes, settings=settings
    )
    try:
        yield folder
    finally:
        await folder.close()


@asynccontextmanager
async def open_log(
    path: str | os.PathLike[str],
    *,
    segment_size_bytes: int | None = None,
    max_batch_bytes: int = 16 * MIB,
    flush: FlushPolicy | None = None,
    settings: StorageSettings | None = None,
) -> AsyncIterator[LocalLog]:
    """Open one log in a folder of its own, for the length of a block.

    The folder is one of `open_folder` that holds a log named "log"; see `LogFolder.open` and
    `LogFolder.log`.
    """
    async with open_folder(
        path, segment_size_bytes=segment_size_bytes, max_batch_bytes=max_batch_bytes, settings=settings
    ) as folder:
        yield await folder.log(_ONLY, flush=flush)
