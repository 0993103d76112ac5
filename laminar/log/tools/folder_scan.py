"""Scan a folder of logs, read-only: store directories, logs, segments, and who holds them.

It reads documents and names, opens nothing for writing and takes no lock, so it may be used on the folder of
a running node; the parts that it finds are then of different moments. It recognises a node's data folder, a
folder of logs of a user's program, one log's directory and one segment. Entries are read by `inspection` and
`verification`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

import msgspec

from laminar.log.disk.disk import ReadOnlyDisk
from laminar.log.disk.document import Document
from laminar.log.disk.errors import DamagedDocument, DiskError, NotALogFolder
from laminar.log.format.checkpoint_state import Checkpoint, LogState, decode_checkpoint
from laminar.log.format.manifest import ReplicaEntry, Unknown, decode_manifest
from laminar.log.key_index.layout import key_index_name
from laminar.log.library.folder import LOGS, STORE
from laminar.log.recovery.node import (
    LAYOUT_DOCUMENT,
    ShardLayout,
    controller_store,
    logs_directory,
    shard_store,
)
from laminar.log.segment.segment_file import index_name, segment_name

_LOG_DIRECTORY = re.compile(r"(?P<name>.+)-(?P<id>[0-9a-f]{16})")
_SEGMENT = re.compile(r"(\d{20})\.(?:log|index|find)")


@dataclass(slots=True, kw_only=True)
class SegmentPlace:
    """The place of a segment: its directory, first index, and the sizes of its files in bytes.

    A size is None if that file is missing.
    """

    directory: str
    first_index: int
    size: int | None = None
    index_size: int | None = None
    key_index_size: int | None = None

    @property
    def path(self) -> str:
        """Path of the data file."""
        return os.path.join(self.directory, segment_name(self.first_index))

    @property
    def index_path(self) -> str:
        """Path of the index file."""
        return os.path.join(self.directory, index_name(self.first_index))

    @property
    def key_index_path(self) -> str:
        """Path of the key index, which searches use."""
        return os.path.join(self.directory, key_index_name(self.first_index))


@dataclass(slots=True, kw_only=True)
class LogPlace:
    """One log that was found: its directory, and what the checkpoint and the manifest say about it.

    `log_id` is None if the directory's name does not tell it. `state` is None if no checkpoint names the log,
    and `entry` is None if no manifest does. `segments` are in order.
    """

    directory: str
    name: str
    log_id: int | None
    state: LogState | None = None
    entry: ReplicaEntry | None = None
    segments: list[SegmentPlace] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class StorePlace:
    """The store directory of a shard, a controller or a folder of logs.

    `live` is set if a process has it open. `checkpoint` is None if no copy of the checkpoint is whole.
    `entries` are those of the manifest; the list is empty if no copy of the manifest is whole. `known` is
    False if the manifest was lost and begun again, so that it may lack replicas.
    """

    directory: str
    live: bool
    checkpoint: Checkpoint | None = None
    entries: list[ReplicaEntry] = field(default_factory=list)
    known: bool = True


@dataclass(slots=True, kw_only=True)
class Folder:
    """A folder of logs that was found: its kind ("node", "logs", "log" or "segment"), and its content.

    `live` is set if a process has the folder open. `lock` is the path of the lock file that such a process
    holds; None for a log that lies outside of a node's folder and of a folder of logs.
    """

    path: str
    kind: str
    live: bool
    lock: str | None
    stores: list[StorePlace] = field(default_factory=list)
    logs: list[LogPlace] = field(default_factory=list)


def scan_folder(disk: ReadOnlyDisk, path: str) -> Folder:
    """Return a description of `path`: its kind, and the store directories, logs and segments in it.

    Raises:
        NotALogFolder: The path is neither that of a node's folder, a folder of logs, a log nor a segment.
        DiskError: A directory or document cannot be read.
    """
    if not disk.exists(path):
        raise NotALogFolder(f"{path}: there is no such file or folder")
    if not disk.is_directory(path):
        return _of_segment(disk, path)
    names = disk.list(path)
    if any(name.startswith("identity-") for name in names) or "shards" in names:
        return _of_node(disk, path)
    if STORE in names and LOGS in names:
        return _of_logs(disk, path)
    if any(_SEGMENT.fullmatch(name) for name in names) or _LOG_DIRECTORY.fullmatch(os.path.basename(path)):
        return _of_log(disk, path)
    raise NotALogFolder(
        f"{path} is neither a node's data folder, nor a folder of logs, nor one log's, nor a segment"
    )


def _of_node(disk: ReadOnlyDisk, path: str) -> Folder:
    directories = [controller_store(path)]
    found = newest(disk, path, LAYOUT_DOCUMENT)
    if found is not None:
        shards = msgspec.msgpack.decode(found, type=ShardLayout)
        directories += [shard_store(path, shards, shard) for shard in range(shards.shards)]
    lock = os.path.join(path, "lock")
    stores = [_store(disk, each) for each in directories if disk.exists(each)]
    live = disk.is_locked(lock) or any(store.live for store in stores)
    logs = _logs(disk, logs_directory(path), stores)
    return Folder(path=path, kind="node", live=live, lock=lock, stores=stores, logs=logs)


def _of_logs(disk: ReadOnlyDisk, path: str) -> Folder:
    store = _store(disk, os.path.join(path, STORE))
    lock = os.path.join(path, "lock")
    logs = _logs(disk, os.path.join(path, LOGS), [store])
    live = store.live or disk.is_locked(lock)
    return Folder(path=path, kind="logs", live=live, lock=lock, stores=[store], logs=logs)


def _of_log(disk: ReadOnlyDisk, path: str) -> Folder:
    """Return one log; if it lies in a node's folder or a folder of logs, with its state from there."""
    around = os.path.dirname(os.path.dirname(path))
    try:
        outer = scan_folder(disk, around) if around not in ("", path) else None
    except (NotALogFolder, RecursionError):
        outer = None
    if outer is not None and outer.kind in ("node", "logs"):
        logs = [log for log in outer.logs if log.directory == path]
        return Folder(path=path, kind="log", live=outer.live, lock=outer.lock, logs=logs)
    return Folder(path=path, kind="log", live=False, lock=None, logs=[_log(disk, path)])


def _of_segment(disk: ReadOnlyDisk, path: str) -> Folder:
    found = _SEGMENT.fullmatch(os.path.basename(path))
    if found is None:
        raise NotALogFolder(f"{path} is no segment: its name would be 20 digits and .log")
    outer = _of_log(disk, os.path.dirname(path))
    for log in outer.logs:
        log.segments = [each for each in log.segments if each.first_index == int(found[1])]
    return Folder(path=path, kind="segment", live=outer.live, lock=outer.lock, logs=outer.logs)


def _store(disk: ReadOnlyDisk, directory: str) -> StorePlace:
    store = StorePlace(directory=directory, live=disk.is_locked(os.path.join(directory, "lock")))
    checkpoint = newest(disk, directory, "checkpoint")
    if checkpoint is not None:
        store.checkpoint = decode_checkpoint(checkpoint)
    entries = newest(disk, directory, "manifest")
    if entries is not None:
        found = decode_manifest(entries)
        store.known = not isinstance(found, Unknown)
        store.entries = found.entries if isinstance(found, Unknown) else found
    return store


def newest(disk: ReadOnlyDisk, directory: str, name: str) -> bytes | None:
    """Return the payload of the newest whole copy of a document; None if no copy is whole.

    If a copy disappears while it is read, it is read again: a process may be replacing the document.
    """
    for _ in range(10):
        try:
            return Document(disk, directory, name).read()
        except DamagedDocument:
            return None
        except DiskError as error:
            if not error.is_missing:
                raise
    return None


def _logs(disk: ReadOnlyDisk, directory: str, stores: list[StorePlace]) -> list[LogPlace]:
    """Return the logs on disk, and those that only a checkpoint names, sorted by name."""
    states: dict[int, LogState] = {}
    entries: dict[int, ReplicaEntry] = {}
    for store in stores:
        entries |= {entry.log_id: entry for entry in store.entries}
        if store.checkpoint is not None:
            states |= {state.log_id: state for state in store.checkpoint.logs}
    found = [_log(disk, os.path.join(directory, name)) for name in disk.list(directory)]
    known = {log.log_id for log in found}
    found += [
        LogPlace(
            directory=os.path.join(directory, f"{state.name}-{log_id:016x}"), name=state.name, log_id=log_id
        )
        for log_id, state in states.items()
        if log_id not in known
    ]
    for log in found:
        if log.log_id is not None:
            log.state, log.entry = states.get(log.log_id), entries.get(log.log_id)
    return sorted(found, key=lambda log: (log.name, log.directory))


def _log(disk: ReadOnlyDisk, directory: str) -> LogPlace:
    parts = _LOG_DIRECTORY.fullmatch(os.path.basename(directory))
    name = parts["name"] if parts else os.path.basename(directory)
    log = LogPlace(directory=directory, name=name, log_id=int(parts["id"], 16) if parts else None)
    names = disk.list(directory)
    firsts = sorted({int(found[1]) for found in map(_SEGMENT.fullmatch, names) if found})
    for first in firsts:
        place = SegmentPlace(directory=directory, first_index=first)
        place.size, place.index_size = size_of(disk, place.path), size_of(disk, place.index_path)
        place.key_index_size = size_of(disk, place.key_index_path)
        log.segments.append(place)
    return log


def size_of(disk: ReadOnlyDisk, path: str) -> int | None:
    """Return the size of a file in bytes; None if the file does not exist (any more)."""
    try:
        file = disk.open(path)
    except DiskError as error:
        if error.is_missing:
            return None
        raise
    try:
        return file.size()
    finally:
        file.close()
