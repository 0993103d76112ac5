"""Small documents that are replaced as a whole: checkpoints, manifests, maps of shards.

Nothing that has copies is overwritten in place: each state is two *new* files (`<name>-<number>.a` and
`.b`) with a number above any seen, both and their directory synced, and only then are older ones
unlinked. So a crash at any step, and rot in one copy, leave a whole document.
"""

from __future__ import annotations

import os
import re
import struct

from crc32c import crc32c

from laminar.log.disk import Buffer, Disk
from laminar.log.errors import DamagedDocument

_MAGIC = b"LMND"
_VERSION = 1
# magic, version, number, length, crc32c of everything else
_HEAD = struct.Struct("<4sIQII")


class Document:
    """The newest whole payload under one name in one directory."""

    def __init__(self, disk: Disk, directory: str, name: str) -> None:
        self.disk = disk
        self.directory = directory
        self.name = name
        self._pattern = re.compile(rf"{re.escape(name)}-(\d+)\.[ab]")

    def _files(self) -> list[tuple[int, str]]:
        """(number, file name), newest first."""
        matches = [self._pattern.fullmatch(entry) for entry in self.disk.list(self.directory)]
        return sorted(((int(found[1]), found[0]) for found in matches if found), reverse=True)

    def exists(self) -> bool:
        """Whether there is any copy, whole or not: a document that was written once never leaves nothing."""
        return bool(self._files())

    def read(self) -> bytes | None:
        """The newest whole payload; None when it was never written.

        What is returned may be in the page cache only: `write` it again before anything is built on it.
        Raises `DamagedDocument` when there are copies, but no whole one.
        """
        files = self._files()
        for number, name in files:
            payload = self._payload(name, number)
            if payload is not None:
                return payload
        # A crash in the very first write leaves less than both names: the second is made when the first is
        # synced, and the write has not returned before both names are.
        if files and not (files[-1][0] == 1 and len(files) == 1):
            raise DamagedDocument(f"no whole copy of {self.name} in {self.directory}: {files}")
        return None

    def _payload(self, name: str, number: int) -> bytes | None:
        file = self.disk.open(os.path.join(self.directory, name))
        try:
            data = bytes(file.pread(file.size(), 0))
        finally:
            file.close()
        if len(data) < _HEAD.size:
            return None
        magic, version, written_number, length, checksum = _HEAD.unpack_from(data)
        payload = data[_HEAD.size :]
        if (magic, version, written_number, length) != (_MAGIC, _VERSION, number, len(payload)):
            return None
        return payload if _checksum(number, payload) == checksum else None

    def write(self, payload: Buffer) -> None:
        """Replace the document; durable when this returns. On a `DiskError` the old one stands."""
        files = self._files()
        number = files[0][0] + 1 if files else 1
        head = _HEAD.pack(_MAGIC, _VERSION, number, len(payload), _checksum(number, payload))
        for copy in "ab":
            file = self.disk.open(
                os.path.join(self.directory, f"{self.name}-{number}.{copy}"), create=True, exclusive=True
            )
            try:
                file.pwritev([head, payload], 0)
                file.sync()
            finally:
                file.close()
        self.disk.sync_directory(self.directory)
        for _, name in files:
            self.disk.unlink(os.path.join(self.directory, name))


def _checksum(number: int, payload: Buffer) -> int:
    return crc32c(payload, crc32c(_HEAD.pack(_MAGIC, _VERSION, number, len(payload), 0)))
