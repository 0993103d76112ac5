"""Look up a hash in a key index, which reads about two pages, because hashes are spread evenly.

The result is batches that *may* have a record with the value: different values can have equal hashes, so the
caller compares the records.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final

from laminar.log.disk.disk import File
from laminar.log.disk.errors import DiskError
from laminar.log.key_index.layout import (
    ENTRY_BYTES,
    HASH_BYTES,
    HEAD_BYTES,
    MAX_DISTANCE,
    PAGE_BYTES,
    PAGE_ENTRIES,
    Block,
    Covered,
    KeyIndexError,
    distance_of,
    pack_entry,
    unpack_head,
    unpack_page,
)

_GUESSES: Final = 4
"""Guesses where a page lies before it is bisected for: hashes that a client chose are not spread evenly."""


class KeyIndex:
    """An open key index, for lookups; any thread, one at a time. The last reference closes its file."""

    def __init__(self, file: File) -> None:
        """Read and check the head of `file`.

        Raises:
            KeyIndexError: The file is no key index, is damaged, or cannot be read.
        """
        self._file = file
        self.bytes_read = 0
        try:
            self._head = unpack_head(self._read(HEAD_BYTES, 0))
        except DiskError as error:
            raise KeyIndexError(f"the head cannot be read: {error}") from error
        self._pages: dict[int, bytes] = {}

    @property
    def covered(self) -> Covered:
        """The identity of the segment for which the key index was made; the caller compares it."""
        return self._head.covered

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the sections: one for each sort of values that can be looked up."""
        return tuple(self._head.sections)

    def following(self, name: str, digest: bytes, offset: int) -> tuple[list[int], bool]:
        """Return the offsets of batches that may have a value with the hash `digest`, in section `name`.

        They are batches at or after `offset`, the lowest first, from one page; an empty list if there are
        none. The second value tells whether there may be more after them.

        Raises:
            KeyIndexError: A page is damaged.
        """
        base = self.covered.first_offset
        wanted = max(offset - base, 0)
        blocks = self._head.sections[name]
        for block in blocks:
            if block.highest < wanted:
                continue
            page, place = self._lower_bound(block, pack_entry(digest, wanted))
            if page < block.pages:
                entries = self._entries(block, page)[place:]
                found = _run(entries, digest)
                if found:
                    is_more = len(found) == len(entries) or block is not blocks[-1]
                    return [base + each for each in found], is_more
        return [], False

    def preceding(self, name: str, digest: bytes, offset: int) -> tuple[list[int], bool]:
        """Return the offsets of batches before `offset` that may have a value with the hash `digest`.

        The highest comes first. The second value tells whether there may be more before them.

        Raises:
        KeyIndexError: A page is damaged.
        """
        base = self.covered.first_offset
        wanted = offset - base
        blocks = self._head.sections[name]
        for block in reversed(blocks):
            if block.lowest >= wanted:
                continue
            page, place = self._lower_bound(block, pack_entry(digest, min(wanted, MAX_DISTANCE + 1)))
            if not place:
                page, place = page - 1, PAGE_ENTRIES
            if page < 0:
                continue
            entries = self._entries(block, page)[:place][::-1]
            found = _run(entries, digest)
            if found:
                is_more = len(found) == len(entries) or block is not blocks[0]
                return [base + each for each in found], is_more
        return [], False

    def check(self) -> None:
        """Read and verify every page.

        Raises:
            KeyIndexError: A page is damaged, or its entries are not sorted.
        """
        for name, blocks in self._head.sections.items():
            for block in blocks:
                last = b""
                for page in range(block.pages):
                    entries = self._entries(block, page)
                    if sorted(entries) != entries or entries[0] <= last:
                        raise KeyIndexError(f"page {block.page + page} of {name} is not in its order")
                    last = entries[-1]

    def _lower_bound(self, block: Block, key: bytes) -> tuple[int, int]:
        """Return (page of the block, number in the page) of the first entry that is not below `key`.

        If there is no such entry, that is the page after the last, and 0.
        """
        wanted = int.from_bytes(key[:HASH_BYTES], "big")
        low, high = 0, block.pages
        guess, guesses = wanted * block.pages >> 64, 0
        while low < high:
            guess = min(max(guess, low), high - 1) if guesses < _GUESSES else (low + high) // 2
            guesses += 1
            entries = self._entries(block, guess)
            first = entries[0]
            if entries[-1] < key:
                low = guess + 1
            elif first <= key:
                return guess, bisect_left(entries, key)
            else:
                high = guess
            away = (wanted - int.from_bytes(first[:HASH_BYTES], "big")) * block.pages >> 64
            guess += away or (1 if low > guess else -1)
        return low, 0

    def _entries(self, block: Block, page: int) -> list[bytes]:
        """Return the entries of page `page` of a block; the pages read last are cached."""
        number = block.page + page
        data = self._pages.get(number)
        if data is None:
            try:
                data = unpack_page(self._read(PAGE_BYTES, number * PAGE_BYTES), number)
            except DiskError as error:
                raise KeyIndexError(f"page {number} cannot be read: {error}") from error
            if len(self._pages) >= 8:
                self._pages.clear()
            self._pages[number] = data
        return [data[at : at + ENTRY_BYTES] for at in range(0, len(data), ENTRY_BYTES)]

    def _read(self, size: int, position: int) -> bytes:
        self.bytes_read += size
        return bytes(self._file.pread(size, position))


def _run(entries: Sequence[bytes], digest: bytes) -> list[int]:
    """Return the distances of the entries at the beginning of `entries` that have the hash `digest`."""
    found: list[int] = []
    for entry in entries:
        if entry[:HASH_BYTES] != digest:
            break
        found.append(distance_of(entry))
    return found
