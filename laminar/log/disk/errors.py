"""The errors of the log and the disk.

`StorageError` and its subclasses are failures from outside the program: a failing disk, damaged bytes, a full
file system, a folder in use. `BrokenChain` is a peer's mistake: a frame that does not follow the end of the
log. Mistakes in this program itself are asserts.
"""

from __future__ import annotations

import errno


class StorageError(Exception):
    """An operation of the storage failed: the disk failed, bytes are damaged, or a log's state forbids it."""


class DiskError(StorageError):
    """A file operation failed in the operating system. `errno` is that of the `OSError`, 0 if unknown."""

    def __init__(self, operation: str, path: str, number: int, text: str) -> None:
        super().__init__(f"{operation} {path}: {text} (errno {number})")
        self.operation = operation
        self.path = path
        self.errno = number

    @classmethod
    def of(cls, operation: str, path: str, error: OSError) -> DiskError:
        """Return a `DiskError` that tells of `error`, which `operation` on `path` raised."""
        return cls(operation, path, error.errno or 0, error.strerror or str(error))

    @property
    def is_full(self) -> bool:
        """Whether the file system has no room (or no quota) left."""
        return self.errno in (errno.ENOSPC, errno.EDQUOT)

    @property
    def is_missing(self) -> bool:
        """Whether the file or directory does not exist."""
        return self.errno == errno.ENOENT

    @property
    def is_damage(self) -> bool:
        """Whether the error means damage to this file alone: an unreadable sector, or a missing file."""
        return self.errno in (errno.EIO, errno.EILSEQ, errno.ENODATA, errno.ENOENT)


class LogRemoved(StorageError):
    """The log was deleted or replaced, so the requested change can never be made."""


class ReplicaStopped(StorageError):
    """A replica has stopped because its state is inconsistent; it does nothing more until a restart."""


class DamagedDocument(StorageError):
    """Copies of a numbered document exist, but none is whole."""


class NewerFormat(StorageError):
    """An intact file has a format that this program does not know: a newer program wrote it.

    That is no damage, so nothing may be repaired, dropped or replaced because of it.
    """

    def __init__(self, path: str, version: int, *, known: int) -> None:
        super().__init__(
            f"{path} has format version {version}, and this program knows versions up to {known}: start the "
            "newer program that wrote it"
        )


class DamagedRange(StorageError):
    """Entries whose stored bytes are damaged; a reader may continue at `next_offset`.

    `first_index` to `last_index` (both included) hold the offsets from `first_offset` up to, not
    including, `next_offset`; `file` and `position` say where the bytes lie. `term` is that of the entry
    according to the index; 0 if it is unknown, or if there may be several entries.
    """

    def __init__(
        self,
        *,
        first_index: int,
        last_index: int,
        first_offset: int,
        next_offset: int,
        file: str,
        position: int,
        term: int = 0,
    ) -> None:
        entries = (
            f"entry {first_index}" if first_index == last_index else f"entries {first_index} to {last_index}"
        )
        offsets = (
            f"offsets {first_offset} to {next_offset - 1}" if next_offset > first_offset else "no records"
        )
        super().__init__(
            f"{entries} (term {term or 'unknown'}, {offsets}): damaged bytes in {file} at position {position}"
        )
        self.first_index = first_index
        self.last_index = last_index
        self.first_offset = first_offset
        self.next_offset = next_offset
        self.file = file
        self.position = position
        self.term = term


class RepairRefused(StorageError):
    """Bytes offered for a damaged entry are not the missing ones; nothing was changed."""


class StorageClosed(StorageError):
    """The storage was closed, or its journal failed, before the request was done."""


class EntriesTrimmed(StorageError):
    """The entries were removed while they were read, by a truncation or a trim."""


class FolderInUse(StorageError):
    """Another process, or this one, has the folder open."""


class NotALogFolder(StorageError):
    """The folder is not a folder of logs; nothing in it was changed."""


class RecordsLost(StorageError):
    """Acknowledged records of a log are lost, and there is no replica from which to restore them."""


class AppendRefused(StorageError):
    """There is no room for new records: `resource` is "disk" or "journal". Nothing was appended."""

    def __init__(self, resource: str) -> None:
        super().__init__(f"append refused: no room on the {resource}")
        self.resource = resource


class OffsetOutOfRange(StorageError, LookupError):
    """The log has no record at `offset`.

    Records before `start_offset` were trimmed; those from `end_offset` on are not written yet.
    """

    def __init__(self, name: str, offset: int, *, start_offset: int, end_offset: int) -> None:
        super().__init__(
            f"log {name!r} has offsets {start_offset} up to, not including, {end_offset}, not {offset}"
        )
        self.offset = offset
        self.start_offset = start_offset
        self.end_offset = end_offset


class BrokenChain(ValueError):
    """A frame does not continue the log: wrong index, previous term, offset, time, size or checksum.

    That frame, and those after it in the same call, were not appended.
    """
