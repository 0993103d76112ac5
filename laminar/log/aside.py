"""Bytes that nobody can serve and that are no torn tail: kept for a person, before recovery deletes them."""

from __future__ import annotations

import logging
import os
import re

from laminar.log.disk import Disk
from laminar.log.errors import DiskError
from laminar.log.index import Loaded
from laminar.log.segment import segment_name
from laminar.log.state import LogFiles

_log = logging.getLogger("laminar.recovery")

_COPY_BYTES = 1 << 20


def set_home_aside(disk: Disk, home: str) -> str:
    """Copy what a person may still make sense of, before the new generation deletes it; returns where to.

    Copies, durable before anything is deleted: a crash in between finds all of it again.
    """
    numbers = [int(name[8:]) for name in disk.list(home) if re.fullmatch(r"damaged-\d+", name)]
    aside = os.path.join(home, f"damaged-{max(numbers, default=0) + 1}")
    disk.make_directory(aside)
    names = [name for name in disk.list(home) if name.startswith(("checkpoint-", "journal-"))]
    for name in names:
        _copy(disk, os.path.join(home, name), os.path.join(aside, name))
    disk.sync_directory(aside)
    return aside


def _copy(disk: Disk, path: str, copy_path: str, position: int = 0) -> None:
    """Copy what can be read of a file from `position` on; durable but for the name."""
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


def keep_damaged_end(disk: Disk, files: LogFiles, loaded: Loaded, base_last: int) -> None:
    """Copy what lies where entries up to `base_last`, which a checkpoint names, are missing: no torn tail.

    It cannot be served, as nobody knows what it was, and the leader sends it anew. The copies are beside the
    log's files.
    """
    ends = [
        (file.first_index, 0)
        for file in loaded.stale
        if file.first_index <= base_last and file.first_index > files.start.index
    ]
    if loaded.segments:
        ends.append((loaded.segments[-1].first_index, loaded.segments[-1].size))
    for first_index, position in ends:
        path = os.path.join(files.directory, segment_name(first_index))
        copy = f"{path}.{position}.damaged"
        try:
            if disk.exists(path):
                _copy(disk, path, copy, position)
        except DiskError as error:
            _log.warning("%s: the damaged end of %s cannot be kept: %s", files.name, path, error)
        else:
            _log.error(
                "%s: entries up to %d were durable, but %s cannot be told apart from position %d on; "
                "its bytes from there are kept in %s",
                files.name,
                base_last,
                path,
                position,
                copy,
            )
    if files.made:
        disk.sync_directory(files.directory)
