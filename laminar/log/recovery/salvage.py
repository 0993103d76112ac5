"""Preserve unreadable bytes before recovery removes them, for inspection by an operator.

A torn tail is not preserved: nothing in it was acknowledged.
"""

from __future__ import annotations

import logging
import os
import re

from laminar.log.disk.disk import Disk
from laminar.log.disk.errors import DiskError
from laminar.log.segment.loading import Loaded
from laminar.log.segment.log_files import LogFiles
from laminar.log.segment.segment_file import segment_name

_log = logging.getLogger("laminar.recovery")

_COPY_BYTES = 1 << 20


def preserve_store(disk: Disk, store: str) -> str:
    """Copy the checkpoints, journal and manifests of a store directory; return the path of the copies.

    They are in a new directory, `damaged-N`, inside it. The copies are durable on return, and the originals
    are still there: so a crash at any step, also later when originals are removed, leaves one of them.
    """
    numbers = [int(name[8:]) for name in disk.list(store) if re.fullmatch(r"damaged-\d+", name)]
    aside = os.path.join(store, f"damaged-{max(numbers, default=0) + 1}")
    disk.make_directory(aside)
    names = [name for name in disk.list(store) if name.startswith(("checkpoint-", "journal-", "manifest-"))]
    for name in names:
        _copy(disk, os.path.join(store, name), os.path.join(aside, name))
    disk.sync_directory(aside)
    return aside


def _copy(disk: Disk, path: str, copy_path: str, position: int = 0) -> None:
    """Copy the bytes of a file from `position` on that can be read; the caller syncs the copy's directory."""
    source, copy = disk.open(path), disk.open(copy_path, create=True)
    try:
        copy.truncate(0)
        size = max(source.size() - position, 0)
        for at in range(0, size, _COPY_BYTES):
            piece = min(_COPY_BYTES, size - at)
            try:
                copy.pwritev([source.pread(piece, position + at)], at)
            except DiskError as error:
                if not error.is_damage:
                    raise
        copy.sync()
    finally:
        source.close()
        copy.close()


def preserve_damaged_tail(
    disk: Disk, files: LogFiles, loaded: Loaded, base_last: int, *, everything: bool
) -> None:
    """Preserve, in the log's directory, damaged bytes that recovery is about to remove.

    These are the segments whose entries could not be identified. If entries up to `base_last`, which the
    checkpoint names, are missing at the end, they are also the bytes after the last segment's last entry.
    Such bytes cannot be served, because it is unknown which entries they were. With `everything` (a part of
    the journal is lost) the bytes and segments after the log's end are preserved in any case.

    Raises:
        DiskError: There is no room for the copies; no bytes were removed.
    """
    gone = [file for file in loaded.stale if everything and file.first_index > files.start.index]
    kept = []
    for file in loaded.unreadable + gone:
        if file.data_size():
            copy = _free_name(disk, files.directory, f"{segment_name(file.first_index)}.0.damaged")
            file.forget()
            disk.rename(file.path, os.path.join(files.directory, copy))
            kept.append((file.path, 0, copy))
    if loaded.segments and (loaded.short or everything):
        last = loaded.segments[-1]
        if last.file.data_size() > last.size:
            copy = f"{segment_name(last.first_index)}.{last.size}.damaged"
            _copy(disk, last.file.path, os.path.join(files.directory, copy), last.size)
            kept.append((last.file.path, last.size, copy))
    for path, position, copy in kept:
        _log.error(
            "%s: %s is not readable from position %d on; its bytes from there are kept in %s",
            files.name,
            path,
            position,
            copy,
        )
    if loaded.short:
        _log.error("%s: entries up to %d were durable, and are missing", files.name, base_last)
    if kept:
        disk.sync_directory(files.directory)


def _free_name(disk: Disk, directory: str, name: str) -> str:
    number = 1
    free = name
    while disk.exists(os.path.join(directory, free)):
        number += 1
        free = f"{name}-{number}"
    return free
