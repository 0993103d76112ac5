"""Write a key index: entries are gathered in memory, sorted, and written a block at a time.

Sorting a block of millions at once would hold the interpreter for a second. So entries are gathered in 256
buckets by the first byte of their hash, and each is sorted by itself; another thread may run between two.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

from laminar.log.disk.disk import File
from laminar.log.key_index.layout import (
    ENTRY_BYTES,
    HEAD_BYTES,
    MAX_BLOCKS,
    MAX_DISTANCE,
    PAGE_BYTES,
    PAGE_ENTRIES,
    Block,
    Covered,
    Head,
    KeyIndexError,
    pack_entry,
    pack_head,
    pack_page,
)

BLOCK_ENTRIES: Final = 2_000_000
"""Entries that are gathered, in all sections together: 24 MB."""
_BUCKETS = 256
# Sorting more takes about as long as the interpreter lets another thread wait.
_LONG_BYTES = 12_000
_PAGES_AT_ONCE = 64


class _Section:
    """One section: its entries that are gathered in memory, and its blocks that are written already."""

    def __init__(self) -> None:
        self.buckets = [bytearray() for _ in range(_BUCKETS)]
        self.lowest = MAX_DISTANCE
        self.highest = 0
        self.blocks: list[Block] = []

    def take(self) -> Iterable[bytes]:
        """Yield the gathered entries in sorted order, a bucket at a time, and drop them from memory."""
        for number, bucket in enumerate(self.buckets):
            self.buckets[number] = bytearray()
            entries = bytes(bucket)
            yield b"".join(
                sorted(entries[at : at + ENTRY_BYTES] for at in range(0, len(entries), ENTRY_BYTES))
            )
            if len(entries) > _LONG_BYTES:
                time.sleep(0)  # another thread may run


class KeyIndexWriter:
    """A writer of one key index into an empty file. Not for two threads at once.

    The file is not a valid key index until `finish` has written its head.
    """

    def __init__(self, file: File, covered: Covered, names: Sequence[str]) -> None:
        self._file = file
        self._covered = covered
        self._sections = {name: _Section() for name in names}
        self._gathered = 0
        self._page = HEAD_BYTES // PAGE_BYTES
        self.entries = 0

    def add(self, name: str, digests: Iterable[bytes], offset: int) -> int:
        """Add an entry for each of the hashes `digests` (8 bytes each): the batch at `offset` has the value.

        The entries belong to section `name`. Return their number.

        Raises:
            KeyIndexError: `offset` is too far from the segment's first offset, or there are too many entries.
            DiskError: The gathered entries cannot be written.
        """
        distance = offset - self._covered.first_offset
        if not 0 <= distance <= MAX_DISTANCE:
            raise KeyIndexError(f"offset {offset} is {distance} from the segment's first")
        section = self._sections[name]
        buckets, tail, count = section.buckets, pack_entry(b"", distance), 0
        for digest in digests:
            buckets[digest[0]] += digest + tail
            count += 1
        if count:
            section.lowest = min(section.lowest, distance)
            section.highest = max(section.highest, distance)
            self._gathered += count
            self.entries += count
            if self._gathered >= BLOCK_ENTRIES:
                self._write_blocks()
        return count

    def finish(self) -> int:
        """Write the rest of the entries, then the head; durable on return. Return the file's size in bytes.

        Raises:
            KeyIndexError: There are too many blocks.
            DiskError: The file cannot be written.
        """
        self._write_blocks()
        sections = {name: section.blocks for name, section in self._sections.items()}
        self._file.pwritev([pack_head(Head(self._covered, sections))], 0)
        self._file.sync()
        return self._page * PAGE_BYTES

    def _write_blocks(self) -> None:
        for section in self._sections.values():
            if section.lowest <= section.highest:
                self._write_block(section)
        if sum(len(section.blocks) for section in self._sections.values()) > MAX_BLOCKS:
            raise KeyIndexError(f"more than {MAX_BLOCKS} blocks: {self.entries} entries so far")
        self._gathered = 0

    def _write_block(self, section: _Section) -> None:
        first, rest = self._page, b""
        for entries in section.take():
            rest += entries
            rest = self._write_pages(rest, PAGE_ENTRIES * ENTRY_BYTES)
        self._write_pages(rest, 1)
        section.blocks.append(Block(first, self._page - first, section.lowest, section.highest))
        section.lowest, section.highest = MAX_DISTANCE, 0

    def _write_pages(self, entries: bytes, least: int) -> bytes:
        """Write pages while at least `least` bytes of entries are left; return the rest."""
        pages: list[bytes] = []
        step, at = PAGE_ENTRIES * ENTRY_BYTES, 0
        while len(entries) - at >= least:
            pages.append(pack_page(entries[at : at + step], self._page + len(pages)))
            at += step
        position = self._page * PAGE_BYTES
        for first in range(0, len(pages), _PAGES_AT_ONCE):
            self._file.pwritev(pages[first : first + _PAGES_AT_ONCE], position + first * PAGE_BYTES)
        self._page += len(pages)
        return entries[at:]
