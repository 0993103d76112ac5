"""The folder of a backup on a disk: under its name a file is either complete or missing.

A file is written under another name, synced, and renamed, and its folder is synced: after a crash at any
point all files under their names are complete. One export at a time locks the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from laminar.batch import HEADER_SIZE, BatchError, Buffer, Header
from laminar.batch.header import verify_body, verify_header
from laminar.client.backup.manifest import (
    MANIFEST,
    BatchFile,
    Manifest,
    ValueFile,
    decode,
    encode,
    name_parts,
    wrong,
)
from laminar.client.errors import ConfigError

READ_BYTES = 4 << 20
MOST_MANIFEST_BYTES = 1 << 30
_PREFIX = ".writing-"


class BackupFolder:
    """A folder for one topic's backup, locked for writing: use it with ``with``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._held = -1

    def __enter__(self) -> Self:
        self.path.mkdir(parents=True, exist_ok=True)
        self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._held)
            raise ConfigError(
                f"{self.path}: another export writes to it", code="in_use", field="to", value=str(self.path)
            ) from None
        try:
            self._check()
        except BaseException:
            os.close(self._held)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._held)

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

    def manifest(self) -> Manifest | None:
        """Return the manifest of the backup so far; None before the first is written. Raises `Error`."""
        return read_manifest(self.path) if os.path.lexists(self.path / MANIFEST) else None

    def put_manifest(self, manifest: Manifest) -> None:
        """Replace the manifest, durably."""
        temporary = self.path / f"{_PREFIX}{MANIFEST}"
        with open(temporary, "wb") as file:
            file.write(encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path / MANIFEST)
        os.fsync(self._held)

    def writer(self, name: str) -> Writer:
        """Begin a file; return its writer. The file gets its name only when it is finished."""
        place = self.path / name
        if not place.parent.is_dir():
            place.parent.mkdir()
            os.fsync(self._held)
        return Writer(place)

    def remove(self, name: str) -> None:
        """Remove a file that no manifest names."""
        (self.path / name).unlink()

    def names(self, partition: int, ending: str) -> list[tuple[int, str]]:
        """Return the offsets and names of a partition's files with an ending, in order."""
        folder = self.path / str(partition)
        found = []
        for entry in os.listdir(folder) if folder.is_dir() else ():
            parts = name_parts(f"{partition}/{entry}")
            if parts is not None and parts[2] == ending:
                found.append((parts[1], f"{partition}/{entry}"))
        return sorted(found)


class Writer:
    """A file that is being written: `write`, then `finish` or `discard`."""

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


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the backup in the folder `path`, checked.

    Raises:
        Error: there is no manifest, or it is damaged.
    """
    return decode(manifest_bytes(path), where=str(path / MANIFEST))


def manifest_bytes(path: Path) -> bytes:
    """Return the bytes of the manifest. Raises `Error` if it is missing or not a plain file."""
    try:
        with open_plain(path, MANIFEST) as file:
            return file.read(MOST_MANIFEST_BYTES)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} has no {MANIFEST}: it is no backup, or its export did not end",
            code="not_a_backup",
            field="from",
            value=str(path),
            hint="run the export again, it goes on",
        ) from None


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


def digest_of(path: Path, name: str) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a file. Raises `Error` if it cannot be read."""
    digest = hashlib.sha256()
    size = 0
    with open_plain(path, name) as file:
        while data := file.read(READ_BYTES):
            digest.update(data)
            size += len(data)
    return size, digest.hexdigest()


def check_file(path: Path, file: BatchFile | ValueFile) -> None:
    """Compare a file with its size and digest in the manifest.

    Raises:
        Error: (`damaged`) the file is missing or differs.
    """
    try:
        size, digest = digest_of(path, file.name)
    except FileNotFoundError:
        raise wrong(str(path / file.name), "file", "missing", f"{file.bytes} bytes") from None
    if size != file.bytes:
        raise wrong(str(path / file.name), "bytes", size, file.bytes)
    if digest != file.sha256:
        raise wrong(str(path / file.name), "sha256", digest, file.sha256)


def frames_of(path: Path, name: str, *, at: int) -> Iterator[tuple[bytearray, Header]]:
    """Yield the batches of a file, verified, with their headers; the first begins at offset `at`.

    Raises:
        Error: (`damaged`) a batch is incomplete or damaged, or does not follow the one before.
    """
    where = str(path / name)
    with open_plain(path, name) as file:
        while head := file.read(HEADER_SIZE):
            try:
                header = verify_header(head)
                frame = bytearray(head) + file.read(header.body_length)
                verify_body(frame, header)
            except BatchError as error:
                raise wrong(where, f"batch at {at}", str(error), "a whole batch") from None
            if header.base_offset != at or not header.count:
                raise wrong(where, "base_offset", header.base_offset, at)
            yield frame, header
            at = header.next_offset
