"""The folder of a backup on a disk: under its name a file is either complete or missing.

A file is written under another name, synced, and renamed, and its folder is synced: after a crash at any
point all files under their names are complete. One export at a time locks the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from laminar.batch import Buffer
from laminar.client.backup.manifest import MANIFEST, MOST_MANIFEST_BYTES, name_parts, wrong
from laminar.client.backup.place import Place
from laminar.client.errors import ConfigError

_PREFIX = ".writing-"


class Folder(Place):
    """A folder for one topic's backup; `begin` creates it, and locks it for writing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = -1

    def __str__(self) -> str:
        return str(self.path)

    def begin(self) -> None:
        """Create the folder if it is missing, and lock it. Raises `Error` if it has other files."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{self.path}: another export writes to it", code="in_use", field="to", value=str(self.path)
            ) from None
        self._check()

    def end(self) -> None:
        """Unlock the folder."""
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)

    def stop(self) -> None:
        """Do nothing: a write does not last long."""

    def _check(self) -> None:
        """Refuse a folder that contains other files, and remove the incomplete files of a killed export."""
        for entry in sorted(os.listdir(self.path)):
            place = self.path / entry
            if entry.startswith(_PREFIX):
                place.unlink()
            elif entry.isascii() and entry.isdecimal() and place.is_dir() and not place.is_symlink():
                for name in os.listdir(place):
                    if name.startswith(_PREFIX):
                        (place / name).unlink()
            elif entry != MANIFEST:
                raise ConfigError(
                    f"{self.path} has {entry!r}, which is no part of a backup",
                    code="not_a_backup",
                    field="to",
                    value=str(self.path),
                    hint="name a new or empty folder, or that of an earlier backup",
                )

    def open(self, name: str) -> BinaryIO:
        """Open a file. Raises `FileNotFoundError`, or `Error` for what is no plain file."""
        return open_plain(self.path, name)

    def size_of(self, name: str) -> int | None:
        """Return the bytes of a file; None if there is none."""
        place = self.path / name
        return place.stat().st_size if place.exists() else None

    def names(self, partition: int, ending: str) -> list[tuple[int, str]]:
        """Return the offsets and names of a partition's files with an ending, in order."""
        folder = self.path / str(partition)
        found = []
        for entry in os.listdir(folder) if folder.is_dir() else ():
            parts = name_parts(f"{partition}/{entry}")
            if parts is not None and parts[2] == ending:
                found.append((parts[1], f"{partition}/{entry}"))
        return sorted(found)

    def writer(self, name: str) -> FileWriter:
        """Begin a file under another name; return its writer."""
        place = self.path / name
        if not place.parent.is_dir():
            place.parent.mkdir()
            os.fsync(self._held)
        return FileWriter(place)

    def drop(self, name: str) -> None:
        """Remove a file now: the folder is locked."""
        (self.path / name).unlink()

    def read_manifest(self) -> bytes | None:
        """Return the bytes of the manifest; None if there is none."""
        try:
            with open_plain(self.path, MANIFEST) as file:
                return file.read(MOST_MANIFEST_BYTES)
        except FileNotFoundError:
            return None

    def put_manifest(self, data: bytes) -> None:
        """Replace the manifest, durably."""
        temporary = self.path / f"{_PREFIX}{MANIFEST}"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / MANIFEST)
        os.fsync(self._held)


class FileWriter:
    """A file of a folder that is being written, as `place.Writer` says."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._temporary = place.with_name(f"{_PREFIX}{place.name}")
        self._file = open(self._temporary, "wb")  # noqa: SIM115  # closed by finish or discard
        self._hash = hashlib.sha256()
        self.bytes = 0

    def write(self, data: Buffer) -> None:
        """Add bytes. Raises `OSError`, with the file's name."""
        try:
            self._file.write(data)
        except OSError as error:  # a write to an open file does not say to which
            error.filename = str(self._place)
            raise
        self._hash.update(data)
        self.bytes += len(data)

    def finish(self) -> str:
        """Complete the file: give it its name, durably, and return its SHA-256 as hexadecimal digits.

        Raises `OSError`, with the file's name.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            error.filename = str(self._place)
            raise
        os.rename(self._temporary, self._place)
        folder = os.open(self._place.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return self._hash.hexdigest()

    def discard(self) -> None:
        """Remove the incomplete file. Idempotent; does nothing after `finish`."""
        if not self._file.closed:
            try:
                self._file.close()
            except OSError:
                pass  # the disk is full: what could not be written goes anyway
            self._temporary.unlink(missing_ok=True)


def open_plain(path: Path, name: str) -> BinaryIO:
    """Open a file of a backup for reading. Raises `Error` for a link, or anything but a plain file."""
    folder, place = (path / name).parent, path / name
    if folder != path and folder.is_symlink():
        raise wrong(str(folder), "file", "a link", "a folder")
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise wrong(str(place), "file", error.strerror, "a plain file") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise wrong(str(place), "file", "something else", "a plain file")
    return os.fdopen(descriptor, "rb")
