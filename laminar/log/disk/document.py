"""Small documents that are replaced as a whole: checkpoints, manifests, shard layouts.

Nothing is overwritten in place. Each state is two *new* files (`<name>-<number>.a` and `.b`) with a number
above all others; both files and their directory are synced, and only then are older ones unlinked. So a crash
at any step, or damage to one copy, leaves a whole document.

Both copies are first written and synced under other names (`<name>.a.new`, `<name>.b.new`), which are never
read. A full disk fails there, so a failed write has changed nothing and leaves no file.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Sequence

from laminar.checksum import crc32c
from laminar.log.disk.disk import Buffer, Disk
from laminar.log.disk.errors import DamagedDocument, DiskError, NewerFormat

_MAGIC = b"LMND"
_VERSION = 1
# magic, version, number, length, crc32c of everything else
_HEAD = struct.Struct("<4sIQII")


class Document:
    """A small file that is replaced as a whole, in two copies; its content is the `payload`."""

    def __init__(self, disk: Disk, directory: str, name: str) -> None:
        self.disk = disk
        self.directory = directory
        self.name = name
        self._pattern = re.compile(rf"{re.escape(name)}-(\d+)\.[ab]")

    def _files(self) -> list[tuple[int, str]]:
        """Return (number, file name) of every copy on disk, whole or not, newest first."""
        matches = [self._pattern.fullmatch(entry) for entry in self.disk.list(self.directory)]
        return sorted(((int(found[1]), found[0]) for found in matches if found), reverse=True)

    def exists(self) -> bool:
        """Return whether there is any copy, whole or not; after the first `write` there always is."""
        return bool(self._files())

    def read(self) -> bytes | None:
        """Return the newest whole payload, or None if none was ever written.

        The payload may be in the page cache only: `write` it again before anything relies on it.

        Raises:
            DamagedDocument: There are copies, but none is whole.
            NewerFormat: A newer program wrote the newest whole copy.
        """
        files = self._files()
        while True:
            reasons = []
            for number, name in files:
                found = self._payload(name, number)
                if isinstance(found, bytes):
                    return found
                if isinstance(found, _NewerCopy):
                    raise NewerFormat(os.path.join(self.directory, name), found.version, known=_VERSION)
                reasons.append(f"{name} {found}")
            listed, files = files, self._files()
            if files == listed:
                break
            # Another thread or process has replaced them since they were listed: read the new ones.
        # Only copies "a" with number 1: the first `write` was interrupted between its two renames, and
        # never returned. So no payload was ever durable, and nothing is lost.
        begun_only = bool(files) and files[-1][0] == 1 and all(name.endswith(".a") for _, name in files)
        if files and not begun_only:
            raise DamagedDocument(f"no whole copy of {self.name} in {self.directory}: {', '.join(reasons)}")
        return None

    def copies(self) -> list[tuple[int, str, bytes | str]]:
        """Return every copy, newest first, as (number, file name, content).

        The content is the payload (bytes), or a description of the damage (str) if the copy is not whole.
        """
        return [(number, name, self._payload(name, number)) for number, name in self._files()]

    def _payload(self, name: str, number: int) -> bytes | str:
        """Return the payload (bytes) of one copy, or a description of its damage (str).

        Raises:
            DiskError: The file cannot be read for a reason other than damage.
        """
        try:
            file = self.disk.open(os.path.join(self.directory, name))
            try:
                data = bytes(file.pread(file.size(), 0))
            finally:
                file.close()
        except DiskError as error:
            if not error.is_damage:
                raise
            return f"cannot be read ({error})"
        if len(data) < _HEAD.size:
            return f"has {len(data)} bytes, less than its head"
        magic, version, written_number, length, checksum = _HEAD.unpack_from(data)
        payload = data[_HEAD.size :]
        if magic != _MAGIC:
            return "does not begin as a document of Laminar"
        if written_number != number or length != len(payload):
            return f"has a damaged head, or {len(payload)} of {length} bytes"
        if _checksum(number, payload, version=version) != checksum:
            return "has a wrong checksum"
        return _NewerCopy(version) if version > _VERSION else payload

    def write(self, payload: Buffer) -> None:
        """Replace the document; durable on return.

        Raises:
            DiskError: The write failed. `read` still returns the old payload, in this process and after a
                restart, and no new file is left, unless the disk also refuses to remove the new files.
        """
        files = self._files()
        number = files[0][0] + 1 if files else 1
        head = _HEAD.pack(
            _MAGIC, _VERSION, number, len(payload), _checksum(number, payload, version=_VERSION)
        )
        fresh = [self._path(f"{self.name}.{copy}.new") for copy in "ab"]
        final = [self._path(f"{self.name}-{number}.{copy}") for copy in "ab"]
        try:
            for path in fresh:
                self._write_file(path, head, payload)
            for path, name in zip(fresh, final, strict=True):
                self.disk.rename(path, name)
            self.disk.sync_directory(self.directory)
        except DiskError:
            self._remove([*final, *fresh])
            raise
        for _, name in files:
            self._forget(self._path(name))

    def _path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def _write_file(self, path: str, head: bytes, payload: Buffer) -> None:
        self.disk.unlink(path)  # left by an attempt that a crash interrupted
        file = self.disk.open(path, create=True, exclusive=True)
        try:
            file.pwritev([head, payload], 0)
            file.sync()
        finally:
            file.close()

    def _forget(self, path: str) -> None:
        try:
            self.disk.unlink(path)
        except DiskError:
            return  # an older copy is not read while a newer one is whole; the next write removes it

    def _remove(self, paths: Sequence[str]) -> None:
        """Remove all files of a failed write, as far as the disk allows."""
        for path in paths:
            self._forget(path)
        try:
            self.disk.sync_directory(self.directory)
        except DiskError:
            return


class _NewerCopy(str):
    """The description of a whole copy that a newer program wrote."""

    version: int

    def __new__(cls, version: int) -> _NewerCopy:
        made = super().__new__(cls, f"is of version {version}: a newer program wrote it")
        made.version = version
        return made


def _checksum(number: int, payload: Buffer, *, version: int) -> int:
    return crc32c(payload, crc32c(_HEAD.pack(_MAGIC, version, number, len(payload), 0)))
