"""Rebuild the index files of logs that no process has open, from their segments.

A start rebuilds an index that is missing or damaged at its end, and readers rebuild rows that they find
damaged. Here all indexes are checked and rebuilt at once, with a report on each. A new index file is written
and synced under another name, and then renamed: so this may be interrupted at any point, and repeated.
Segments are not changed.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from laminar.batch import HEADER_SIZE
from laminar.log.disk.disk import Disk, ReadOnlyDisk, RealDisk
from laminar.log.disk.errors import DiskError, FolderInUse, NotALogFolder
from laminar.log.format.index_entry import ROW_SIZE, UNKNOWN_KIND, unpack_row
from laminar.log.segment.index_rebuild import read_damaged, rebuild_rows
from laminar.log.segment.segment_file import INDEX_HEAD_SIZE, index_head
from laminar.log.tools.folder_scan import Folder, LogPlace, SegmentPlace, scan_folder

_NEW = ".new"


class Reindexed(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one index file.

    `rows` is the number of its rows, `unknown` the number of those whose entries could not be identified, and
    `changed` tells whether the file was replaced.
    """

    file: str
    rows: int
    unknown: int
    changed: bool


def reindex(
    path: str, *, disk: Disk | None = None, progress: Callable[[int], None] = lambda size: None
) -> list[Reindexed]:
    """Rebuild the indexes of a folder, a log or a segment, and return the results. Blocks; takes the lock.

    `progress` is called after each segment with its size in bytes.

    Raises:
        FolderInUse: A process has the folder open.
        NotALogFolder: The path is not that of a folder of logs, a log or a segment.
        DiskError: A file cannot be read or written; indexes that were not done yet are unchanged.
    """
    disk = disk or RealDisk()
    folder = scan_folder(ReadOnlyDisk(), os.path.abspath(path))
    done: list[Reindexed] = []
    with _locked(disk, folder):
        # Scanned again: now nothing changes it.
        for log in scan_folder(ReadOnlyDisk(), folder.path).logs:
            offset = log.state.start.offset if log.state is not None else 0
            for place in log.segments:
                if place.size:
                    result, offset = _reindex(disk, log, place, offset)
                    done.append(result)
                    progress(place.size)
    return done


@contextmanager
def _locked(disk: Disk, folder: Folder) -> Iterator[None]:
    """Hold the folder's lock, which its node or program holds while it runs.

    Without a lock file, as for a copy of one log, nothing is held.

    Raises:
        FolderInUse: A process has the folder open.
    """
    if folder.lock is None:
        yield
        return
    try:
        lock = disk.lock(folder.lock, wait=False)
    except DiskError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise FolderInUse(f"{os.path.dirname(folder.lock)} is in use: stop its node first") from error
    try:
        yield
    finally:
        lock.close()


def _reindex(disk: Disk, log: LogPlace, place: SegmentPlace, offset: int) -> tuple[Reindexed, int]:
    """Rebuild a segment's index; return the result and the offset after its last entry.

    `offset` is the offset after the segment before; it is used if the first header is damaged.
    """
    stored = b"" if place.index_size is None else _read(disk, place.index_path)
    if log.log_id is not None:
        head = index_head(place.first_index, log.log_id)
    elif len(stored) >= INDEX_HEAD_SIZE:
        head = stored[:INDEX_HEAD_SIZE]
    else:
        raise NotALogFolder(f"{log.directory}: its name does not end in the log's id, which an index carries")
    assert place.size is not None
    file = disk.open(place.path)
    try:
        most = range(place.first_index, place.first_index + place.size // HEADER_SIZE + 1)
        rows = rebuild_rows(
            file, most, position=0, offset=offset, size=place.size, hints=stored[INDEX_HEAD_SIZE:]
        )
    finally:
        file.close()
    count = len(rows) // ROW_SIZE
    kinds = [unpack_row(rows, slot, place.first_index + slot).kind for slot in range(count)]
    if count:
        offset = unpack_row(rows, count - 1, place.first_index + count - 1).next_offset
    changed = stored != head + rows
    if changed:
        _replace(disk, place, head, bytes(rows))
    return (
        Reindexed(file=place.index_path, rows=count, unknown=kinds.count(UNKNOWN_KIND), changed=changed),
        offset,
    )


def _replace(disk: Disk, place: SegmentPlace, head: bytes, rows: bytes) -> None:
    path = place.index_path + _NEW
    disk.unlink(path)  # left by an interrupted run
    file = disk.open(path, create=True, exclusive=True)
    try:
        file.pwritev([head, rows], 0)
        file.sync()
    finally:
        file.close()
    disk.rename(path, place.index_path)
    disk.sync_directory(place.directory)


def _read(disk: Disk, path: str) -> bytes:
    file = disk.open(path)
    try:
        return bytes(read_damaged(file, file.size(), 0))
    finally:
        file.close()
