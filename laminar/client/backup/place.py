"""The place of a backup: a folder on a disk, or a prefix of a bucket in an object store.

In both a file is either complete under its name or missing, and no file that a manifest names is changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import BinaryIO, Protocol

from laminar.batch import Buffer
from laminar.client.backup.manifest import records_name


class Writer(Protocol):
    """A file that is being written: `write`, then `finish` or `discard`."""

    bytes: int
    """The bytes written so far."""

    def write(self, data: Buffer) -> None:
        """Add bytes. Raises `OSError`, with the file's name."""

    def finish(self) -> str:
        """Complete the file: give it its name, durably, and return its SHA-256 as hexadecimal digits.

        Raises `OSError`, with the file's name, or `Error`.
        """

    def discard(self) -> None:
        """Remove the incomplete file. Idempotent; does nothing after `finish`."""


class Place(ABC):
    """A place for one topic's backup. To write, `begin` first, `end` at last; that is not needed to read.

    Names are those of `manifest`: ``PARTITION/OFFSET.ENDING``, or `manifest.MANIFEST`. ``str()`` names the
    place. All methods but `path_of`, `new_name` and `end` may block.
    """

    export = ""
    """The export that writes, 8 hexadecimal digits, where others may write at the same time; else ""."""

    @abstractmethod
    def begin(self) -> None:
        """Prepare for writing. Raises `Error` if the place has other files, or another export locks it."""

    @abstractmethod
    def end(self) -> None:
        """End writing. Idempotent; may be called without `begin`."""

    @abstractmethod
    def stop(self) -> None:
        """Let work that is under way in another thread end soon, with an error, if it may last long."""

    def path_of(self, name: str) -> str:
        """Return the name of a file with its place, for errors."""
        return f"{self}/{name}"

    @abstractmethod
    def open(self, name: str) -> BinaryIO:
        """Open a file for reading from its start to its end.

        Raises:
            FileNotFoundError: there is no such file.
            Error: it cannot be read.
        """

    @abstractmethod
    def size_of(self, name: str) -> int | None:
        """Return the bytes of a file; None if there is none."""

    @abstractmethod
    def names(self, partition: int, ending: str) -> list[tuple[int, str]]:
        """Return the offsets and names of a partition's files with an ending, in order."""

    def new_name(self, partition: int, offset: int, ending: str) -> str:
        """Return the name for a new file of records that begins at an offset."""
        return records_name(partition, offset, ending)

    @abstractmethod
    def writer(self, name: str) -> Writer:
        """Begin a file; return its writer. The file gets its name only when it is finished."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Remove a file that no manifest names, now or after the next `put_manifest`."""

    @property
    def has_dropped(self) -> bool:
        """Whether dropped files stay until the manifest is replaced."""
        return False

    @abstractmethod
    def read_manifest(self) -> bytes | None:
        """Return the bytes of the manifest; None if there is none. Raises `Error`."""

    @abstractmethod
    def put_manifest(self, data: bytes) -> None:
        """Replace the manifest, durably. Raises `Error` if another export has replaced it meanwhile."""
