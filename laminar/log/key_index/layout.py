"""The bytes of a key index file: a head, then pages of sorted entries, each under its own checksum.

Pure: bytes in, values out. An entry is the hash of a value and the offset of a batch with it, as a distance
from the segment's first offset; both are compared as bytes. docs/format.md has every byte.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from laminar.checksum import crc32c

HEAD_BYTES: Final = 16 * 1024
PAGE_BYTES: Final = 4096
ENTRY_BYTES: Final = 12
HASH_BYTES: Final = 8
PAGE_ENTRIES: Final = 340
MAX_DISTANCE: Final = (1 << 32) - 2
"""The largest distance of an offset from the segment's first."""
MAX_NAME_BYTES: Final = 512
MAX_SECTIONS: Final = 4

_MAGIC = b"LMNF"
_VERSION = 1
# magic, version, sections; log id, first and last index, last term, first offset, offset after the last
# record, bytes of the segment; bytes of the head that are used, its CRC among them.
_HEAD = struct.Struct("<4sHH7QI")
# Bytes of the name, number of blocks.
_SECTION = struct.Struct("<HH")
_BLOCK = struct.Struct("<4I")
_CRC = struct.Struct("<I")
# After the entries: how many there are, the page's number in the file, 0, and the CRC of all before it.
_FOOT = struct.Struct("<4I")
_FOOT_AT = PAGE_ENTRIES * ENTRY_BYTES
assert _FOOT_AT + _FOOT.size == PAGE_BYTES

MAX_BLOCKS: Final = (
    HEAD_BYTES - _HEAD.size - _CRC.size - MAX_SECTIONS * (_SECTION.size + MAX_NAME_BYTES)
) // _BLOCK.size
"""Most blocks of all sections together: the head has room for them, whatever the names."""


class KeyIndexError(Exception):
    """The file is no key index, or is damaged: the caller scans the segment, and builds the file again."""


@dataclass(frozen=True, slots=True)
class Covered:
    """The identity of the sealed segment for which a key index was made; with another it is not valid."""

    log_id: int
    first_index: int
    last_index: int
    last_term: int
    first_offset: int
    next_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Block:
    """A block: sorted entries of one section, in consecutive pages of the file.

    `page` is the number of its first page, and `pages` how many it has. `lowest` and `highest` are the
    smallest and largest distance (from the segment's first offset) of its entries.
    """

    page: int
    pages: int
    lowest: int
    highest: int


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a key index: its segment, and the blocks of each section, in the order of their offsets.

    A section, by its name, is for one sort of values, such as keys.
    """

    covered: Covered
    sections: dict[str, list[Block]]


def key_index_name(first_index: int) -> str:
    """Return the file name of a segment's key index."""
    return f"{first_index:020d}.find"


def pack_head(head: Head) -> bytes:
    """Return the bytes of a head, which fill `HEAD_BYTES`.

    Raises:
        KeyIndexError: There are too many blocks, or a name is too long.
    """
    covered = head.covered
    parts = []
    for name, blocks in head.sections.items():
        encoded = name.encode()
        if len(encoded) > MAX_NAME_BYTES:
            raise KeyIndexError(f"the name of a section has {len(encoded)} bytes, at most {MAX_NAME_BYTES}")
        parts += [_SECTION.pack(len(encoded), len(blocks)), encoded]
        parts += [_BLOCK.pack(each.page, each.pages, each.lowest, each.highest) for each in blocks]
    blocks_in_all = sum(map(len, head.sections.values()))
    if blocks_in_all > MAX_BLOCKS or len(head.sections) > MAX_SECTIONS:
        raise KeyIndexError(f"{blocks_in_all} blocks in {len(head.sections)} sections, at most {MAX_BLOCKS}")
    body = b"".join(parts)
    used = _HEAD.size + len(body) + _CRC.size
    packed = (
        _HEAD.pack(
            *(_MAGIC, _VERSION, len(head.sections), covered.log_id, covered.first_index),
            *(covered.last_index, covered.last_term, covered.first_offset, covered.next_offset),
            *(covered.size, used),
        )
        + body
    )
    return (packed + _CRC.pack(crc32c(packed))).ljust(HEAD_BYTES, b"\0")


def unpack_head(data: bytes) -> Head:
    """Return the head in the first bytes of a file.

    Raises:
        KeyIndexError: They are not the head of a key index, or are damaged.
    """
    if len(data) < HEAD_BYTES:
        raise KeyIndexError(f"the head has {len(data)} of {HEAD_BYTES} bytes")
    magic, version, sections, *covered, used = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or not _HEAD.size + _CRC.size <= used <= HEAD_BYTES:
        raise KeyIndexError("the head is not that of a key index of this version")
    end = used - _CRC.size
    if crc32c(data[:end]) != _CRC.unpack_from(data, end)[0]:
        raise KeyIndexError("the head has a wrong checksum")
    found: dict[str, list[Block]] = {}
    at = _HEAD.size
    try:
        for _ in range(sections):
            length, count = _SECTION.unpack_from(data, at)
            at += _SECTION.size
            name = data[at : at + length].decode()
            at += length
            found[name] = [Block(*_BLOCK.unpack_from(data, at + n * _BLOCK.size)) for n in range(count)]
            at += count * _BLOCK.size
    except (struct.error, UnicodeDecodeError) as error:
        raise KeyIndexError(f"the head does not hold what it says: {error}") from error
    return Head(Covered(*covered), found)


def pack_entry(digest: bytes, distance: int) -> bytes:
    """Return the bytes of an entry: the hash `digest` of a value, and the distance of a batch with it."""
    return digest + distance.to_bytes(4, "big")


def distance_of(entry: bytes) -> int:
    """Return the distance in an entry: the batch's offset minus the segment's first offset."""
    return int.from_bytes(entry[HASH_BYTES:], "big")


def pack_page(entries: bytes, number: int) -> bytes:
    """Return the bytes of page `number` of a file; `entries` are its entries, back to back."""
    body = (
        entries.ljust(_FOOT_AT, b"\0") + _FOOT.pack(len(entries) // ENTRY_BYTES, number, 0, 0)[: -_CRC.size]
    )
    return body + _CRC.pack(crc32c(body))


def unpack_page(data: bytes, number: int) -> bytes:
    """Return the entries of page `number`, back to back; at least one.

    Raises:
        KeyIndexError: The page is damaged, or is not page `number`.
    """
    if len(data) < PAGE_BYTES:
        raise KeyIndexError(f"page {number} has {len(data)} of {PAGE_BYTES} bytes")
    count, found, _, checksum = _FOOT.unpack_from(data, _FOOT_AT)
    if crc32c(data[: PAGE_BYTES - _CRC.size]) != checksum or found != number:
        raise KeyIndexError(f"page {number} is damaged")
    if not 0 < count <= PAGE_ENTRIES:
        raise KeyIndexError(f"page {number} has {count} entries")
    return data[: count * ENTRY_BYTES]
