"""What is known to be damaged in one log, and what its segments were when last verified.

In memory, on the loop; `laminar.log.integrity.damage_registry` makes it durable as a small document in the
log's directory, which is moved and deleted with the log. It records where damaged bytes lie and what they
were: they are never served, and stay as they are until the batch is repaired or the entry is removed. It
decides nothing about repair.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator

import msgspec

from laminar.log.disk.disk import Disk
from laminar.log.disk.document import Document
from laminar.log.disk.errors import DamagedDocument, DamagedRange, DiskError

_NAME = "health"


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """Entries `first_index` to `last_index` (both included) with damaged bytes.

    `term` is the entry's term according to the index; 0 if no witness is left, and then the range may
    hold several entries. `segment` is the first index of its segment; `position` and `size` are bytes
    there.
    """

    first_index: int
    last_index: int
    term: int
    first_offset: int
    next_offset: int
    segment: int
    position: int
    size: int
    found_ms: int = 0

    def error(self, directory: str) -> DamagedRange:
        """Return the error that a reader gets; `directory` is the log's."""
        return DamagedRange(
            first_index=self.first_index,
            last_index=self.last_index,
            first_offset=self.first_offset,
            next_offset=self.next_offset,
            file=os.path.join(directory, f"{self.segment:020d}.log"),
            position=self.position,
            term=self.term,
        )


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A sealed segment that was found intact up to its last entry, and the SHA-256 of its bytes.

    With the same index and term of the last entry it is the same segment on every replica.
    """

    last_index: int
    last_term: int
    size: int
    digest: bytes
    verified_ms: int


class Unsealed(msgspec.Struct, frozen=True, kw_only=True):
    """The verified part of the active segment, and when it was verified. `segment` is its first index."""

    segment: int
    last_index: int
    last_term: int
    verified_ms: int


class _Notes(msgspec.Struct):
    damages: list[Damage]
    sealed: dict[int, Sealed]
    # Missing in documents of an earlier version.
    unsealed: Unsealed | None = None


_decoder = msgspec.msgpack.Decoder(_Notes)


class Quarantine:
    """The damages of one log, and its verified segments."""

    __slots__ = ("_damages", "_firsts", "sealed", "suspicious", "unsealed")

    def __init__(self) -> None:
        self._damages: list[Damage] = []
        self._firsts: list[int] = []
        # By the segment's first index.
        self.sealed: dict[int, Sealed] = {}
        self.unsealed: Unsealed | None = None
        # Damage rarely comes alone: after one was found, all of this log is to be read again soon.
        self.suspicious = False

    def __bool__(self) -> bool:
        """Return whether anything is damaged."""
        return bool(self._damages)

    def __len__(self) -> int:
        return len(self._damages)

    def __iter__(self) -> Iterator[Damage]:
        return iter(tuple(self._damages))

    def at(self, index: int) -> Damage | None:
        """Return the damage that holds an entry, or None."""
        place = bisect_right(self._firsts, index) - 1
        if place < 0 or self._damages[place].last_index < index:
            return None
        return self._damages[place]

    def intact_up_to(self, index: int, last_index: int) -> int:
        """Return the last of the entries from `index` to `last_index` before a damaged one."""
        place = bisect_right(self._firsts, index)
        return min(last_index, self._firsts[place] - 1) if place < len(self._firsts) else last_index

    def add(self, damage: Damage) -> bool:
        """Record a damage; return False if it was known. It replaces damages that it covers."""
        known = self.at(damage.first_index)
        if known is not None and known.last_index >= damage.last_index:
            return False
        overlapping = [
            each
            for each in self._damages
            if each.first_index <= damage.last_index and each.last_index >= damage.first_index
        ]
        self._keep([each for each in self._damages if each not in overlapping] + [damage])
        return True

    def clear(self, index: int) -> None:
        """Remove the damage that holds an entry."""
        self._keep([each for each in self._damages if not each.first_index <= index <= each.last_index])

    def truncate(self, index: int) -> None:
        """Remove what is recorded of entry `index` and all after it."""
        if self._damages:
            self._keep([each for each in self._damages if each.first_index < index])
        for first in [first for first, sealed in self.sealed.items() if sealed.last_index >= index]:
            del self.sealed[first]
        if self.unsealed is not None and self.unsealed.last_index >= index:
            self.unsealed = None

    def trim_before(self, index: int) -> None:
        """Remove what is recorded of entries up to `index`."""
        if self._damages:
            self._keep([each for each in self._damages if each.last_index > index])
        for first in [first for first, sealed in self.sealed.items() if sealed.last_index <= index]:
            del self.sealed[first]
        if self.unsealed is not None and self.unsealed.last_index <= index:
            self.unsealed = None

    def forget_verified(self, first_index: int) -> None:
        """Remove a segment from the verified ones: it has changed since."""
        self.sealed.pop(first_index, None)
        if self.unsealed is not None and self.unsealed.segment == first_index:
            self.unsealed = None

    def _keep(self, damages: list[Damage]) -> None:
        self._damages = sorted(damages, key=lambda each: each.first_index)
        self._firsts = [each.first_index for each in self._damages]

    def encode(self) -> bytes:
        """Return the content of the document that `load` reads."""
        return msgspec.msgpack.encode(_Notes(self._damages, self.sealed, self.unsealed))

    def load(self, disk: Disk, directory: str) -> str | None:
        """Load the document of a log's directory; return what was wrong with an unreadable one.

        Then what it recorded is lost, which costs nothing but time: reads and the scrubber find the
        damage again.
        """
        try:
            payload = document(disk, directory).read()
            notes = _decoder.decode(payload) if payload is not None else _Notes([], {})
        except (DamagedDocument, DiskError, msgspec.DecodeError) as error:
            return str(error)
        self._keep(notes.damages)
        self.sealed, self.unsealed = notes.sealed, notes.unsealed
        return None


def document(disk: Disk, directory: str) -> Document:
    """Return the document in which a log's damage is recorded."""
    return Document(disk, directory, _NAME)
