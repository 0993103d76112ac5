"""What can go wrong between the log and the disk, as types.

`StorageError` is the family of the world's mistakes: a failing disk, rotten bytes, a full file system.
`BrokenChain` is a peer's mistake: a frame that does not follow the log's end. Our own mistakes are asserts.
"""

from __future__ import annotations

import errno


class StorageError(Exception):
    """A disk, a file or bytes in it did not do what they should."""


class DiskError(StorageError):
    """An operation of the operating system failed; the one place where `OSError` is translated."""

    def __init__(self, operation: str, path: str, number: int, text: str) -> None:
        super().__init__(f"{operation} {path}: {text} (errno {number})")
        self.operation = operation
        self.path = path
        self.errno = number

    @classmethod
    def of(cls, operation: str, path: str, error: OSError) -> DiskError:
        return cls(operation, path, error.errno or 0, error.strerror or str(error))

    @property
    def is_full(self) -> bool:
        """The file system has no room (or no quota) left."""
        return self.errno in (errno.ENOSPC, errno.EDQUOT)

    @property
    def is_missing(self) -> bool:
        """The file or directory is not there."""
        return self.errno == errno.ENOENT

    @property
    def is_damage(self) -> bool:
        """These bytes are gone, and only these: a sector that cannot be read, a file that is missing."""
        return self.errno in (errno.EIO, errno.EILSEQ, errno.ENODATA, errno.ENOENT)


class LogRemoved(StorageError):
    """The log was deleted, or another stands in its place: what waits for it waits for nothing."""


class ReplicaStopped(StorageError):
    """A mistake was met in the state of one replica: it takes part in nothing until a restart."""


class DamagedDocument(StorageError):
    """Copies of a numbered document exist, but none is whole."""


class DamagedRange(StorageError):
    """Entries whose stored bytes are not what the index says; a reader may go on behind them.

    `first_index` to `last_index` (both included) hold the offsets from `first_offset` up to, not
    including, `next_offset`; `file` and `position` say where the bytes lie. `term` is the one entry's as
    its index row has it; 0 where it is not known.
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
    """Bytes offered for a damaged entry are not those that are missing; nothing was changed."""


class StorageClosed(StorageError):
    """The storage was closed, or its journal failed, before the request was done."""


class EntriesTrimmed(StorageError):
    """A truncation or a new log start took the entries away while they were read."""


class FolderInUse(StorageError):
    """Another process, or this one, has the folder open."""


class NotALogFolder(StorageError):
    """A folder that holds something else: nothing in it was touched."""


class RecordsLost(StorageError):
    """Acknowledged records of a log that has no copies are gone."""


class AppendRefused(StorageError):
    """No room for new records now: `resource` is "disk" or "journal". Nothing was appended."""

    def __init__(self, resource: str) -> None:
        super().__init__(f"append refused: no room on the {resource}")
        self.resource = resource


class OffsetOutOfRange(StorageError, LookupError):
    """The log has no record at `offset`: before `start_offset` they were given up, from `end_offset` on not
    written yet.
    """

    def __init__(self, name: str, offset: int, *, start_offset: int, end_offset: int) -> None:
        super().__init__(
            f"log {name!r} has offsets {start_offset} up to, not including, {end_offset}, not {offset}"
        )
        self.offset = offset
        self.start_offset = start_offset
        self.end_offset = end_offset


class BrokenChain(ValueError):
    """A frame does not continue the log: wrong index, previous term, offset or time. It changed nothing."""
