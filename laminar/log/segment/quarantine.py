"""The quarantine of one log: its damaged entries, and the segments that were verified.

It is in memory, for the loop's thread. `laminar.log.integrity.damage_registry` makes it durable, as a small
document in the log's directory, which is moved and deleted with the log. Damaged bytes are never served, and
stay as they are until the entry is repaired or removed; the quarantine records where they lie and which
entries they held. It decides nothing about repair.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterator

import msgspec

from laminar.log.disk.disk import Disk
from laminar.log.disk.document import Document
from laminar.log.disk.errors import DamagedRange, StorageError

_NAME = "health"


class Damage(msgspec.Struct, frozen=True, kw_only=True):
    """A damaged range: entries `first_index` to `last_index` (both included), whose bytes are damaged.

    `term` is the entry's term according to the index; 0 if header and row are both lost, and then the range
    may hold several entries. Their records have the offsets from `first_offset` up to, not including,
    `next_offset`. `segment` is the first index of their segment; `position` and `size` are bytes in it.
    `found_ms` is in ms since the epoch (0: not noted).
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
        """Return the error that a reader of this range gets; `directory` is the log's, for its text."""
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
    """The record that a sealed segment was verified, with the SHA-256 of its bytes (b"" if any are damaged).

    On every replica on which its last entry has this index and term, the segment has the same bytes.
    """

    last_index: int
    last_term: int
    size: int
    digest: bytes
    verified_ms: int


class Unsealed(msgspec.Struct, frozen=True, kw_only=True):
    """The record that the active segment was verified up to entry `last_index`.

    `segment` is the first index of that segment.
    """

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
    """The damaged ranges of one log, by index, and its verified segments. The loop's thread only."""

    __slots__ = ("_damages", "_firsts", "sealed", "suspicious", "unsealed")

    def __init__(self) -> None:
        self._damages: list[Damage] = []
        self._firsts: list[int] = []
        # By the segment's first index.
        self.sealed: dict[int, Sealed] = {}
        self.unsealed: Unsealed | None = None
        # Set when damage is found: more is likely, so the scrubber reads all of this log again soon.
        self.suspicious = False

    def __bool__(self) -> bool:
        """Return whether anything is damaged."""
        return bool(self._damages)

    def __len__(self) -> int:
        return len(self._damages)

    def __iter__(self) -> Iterator[Damage]:
        return iter(tuple(self._damages))

    def at(self, index: int) -> Damage | None:
        """Return the damaged range that includes entry `index`; None if that entry is not damaged."""
        place = bisect_right(self._firsts, index) - 1
        if place < 0 or self._damages[place].last_index < index:
            return None
        return self._damages[place]

    def intact_up_to(self, index: int, last_index: int) -> int:
        """Return the index up to which all entries from `index` on are intact, but at most `last_index`.

        The entry at `index` itself must be intact.
        """
        place = bisect_right(self._firsts, index)
        return min(last_index, self._firsts[place] - 1) if place < len(self._firsts) else last_index

    def add(self, damage: Damage) -> bool:
        """Record a damaged range; return False if a recorded range covers it already.

        The new range replaces all recorded ranges with which it overlaps.
        """
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
        """Remove the damaged range that includes entry `index`, if there is one."""
        self._keep([each for each in self._damages if not each.first_index <= index <= each.last_index])

    def truncate(self, index: int) -> None:
        """Remove the records about entry `index` and all after it, because the log was truncated there."""
        if self._damages:
            self._keep([each for each in self._damages if each.first_index < index])
        for first in [first for first, sealed in self.sealed.items() if sealed.last_index >= index]:
            del self.sealed[first]
        if self.unsealed is not None and self.unsealed.last_index >= index:
            self.unsealed = None

    def trim_before(self, index: int) -> None:
        """Remove the records about entries up to and including `index`, because they were trimmed."""
        if self._damages:
            self._keep([each for each in self._damages if each.last_index > index])
        for first in [first for first, sealed in self.sealed.items() if sealed.last_index <= index]:
            del self.sealed[first]
        if self.unsealed is not None and self.unsealed.last_index <= index:
            self.unsealed = None

    def forget_verified(self, first_index: int) -> None:
        """Remove the record that a segment was verified, because the segment has changed since."""
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
        """Load the document in a log's directory; return None, or the reason why it cannot be read.

        The content of an unreadable document is lost. That costs only time: reads and the scrubber find the
        damage again.
        """
        try:
            payload = document(disk, directory).read()
            notes = _decoder.decode(payload) if payload is not None else _Notes([], {})
        except (StorageError, msgspec.DecodeError) as error:
            return str(error)
        self._keep(notes.damages)
        self.sealed, self.unsealed = notes.sealed, notes.unsealed
        return None


def document(disk: Disk, directory: str) -> Document:
    """Return the document in a log's `directory` in which the log's damage is recorded."""
    return Document(disk, directory, _NAME)
