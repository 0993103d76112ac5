"""Files of a data folder that only the node's user may read: the first token, and the generated secret.

They are no data of partitions, and are not written through the disk interface: no other file has their
permissions, and no acknowledged record depends on them.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Final

MODE: Final = 0o600


def write_private(path: str, text: str) -> None:
    """Replace a file, readable by this user alone from its first byte on; durable on return.

    Raises:
        OSError: the file could not be written; an existing one is unchanged.
    """
    temporary = f"{path}.new"
    with suppress(FileNotFoundError):
        os.unlink(temporary)
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, MODE)
    try:
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(f"{text}\n")
            file.flush()
            os.fsync(fd)
        os.rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(path)


def read_private(path: str) -> str:
    """Return a file's text without surrounding white space; empty if there is no such file.

    Raises:
        OSError: the file exists, but can't be read.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    with os.fdopen(fd, encoding="ascii", errors="replace") as file:
        return file.read().strip()


def remove_private(path: str) -> None:
    """Remove a file, if it exists; durable on return.

    Raises:
        OSError: the file could not be removed.
    """
    with suppress(FileNotFoundError):
        os.unlink(path)
        _sync_folder(path)


def _sync_folder(path: str) -> None:
    fd = os.open(os.path.dirname(path) or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
