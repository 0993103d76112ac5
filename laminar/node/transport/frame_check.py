"""The check that a frame is as its sender made it: a checksum, or a MAC with a key of its connection.

A checksum finds changes by a wire or a machine. A MAC also finds changes on purpose: its key belongs to
one direction of one connection, and it covers the number of the frame, so no frame can be added, changed,
repeated, reordered, left out before another, or taken from another connection.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Sequence
from typing import Final, Protocol

from laminar.checksum import crc32c

Buffer = bytes | bytearray | memoryview

MAC_BYTES: Final = 16
_CRC: Final = struct.Struct("<I")
_COUNT: Final = struct.Struct("<Q")


class FrameCheck(Protocol):
    """Computes the check of each frame of one direction. `size` is how many bytes the check has."""

    size: int

    def of(self, head: Buffer, parts: Sequence[Buffer]) -> bytes:
        """Return the check of the next frame, over `head` (the header without the check) and the payload."""


class Checksum:
    """CRC-32C, the check of frames without an agreed key, or under TLS."""

    def __init__(self) -> None:
        self.size = _CRC.size

    def of(self, head: Buffer, parts: Sequence[Buffer]) -> bytes:
        """Return the checksum of a frame."""
        crc = crc32c(head)
        for part in parts:
            crc = crc32c(part, crc)
        return _CRC.pack(crc)


class FrameMac:
    """HMAC-SHA256 of the frame's number (64 bits, never repeated), header and payload, cut to 16 bytes."""

    def __init__(self, key: bytes) -> None:
        self.size = MAC_BYTES
        self._keyed = hmac.new(key, digestmod=hashlib.sha256)
        self._count = 0

    def __repr__(self) -> str:
        return f"<FrameMac {self._count} frames>"

    def of(self, head: Buffer, parts: Sequence[Buffer]) -> bytes:
        """Return the MAC of the next frame."""
        mac = self._keyed.copy()
        mac.update(_COUNT.pack(self._count) + head)
        self._count += 1
        for part in parts:
            mac.update(part)
        return mac.digest()[:MAC_BYTES]


def is_right(expected: bytes, given: bytes) -> bool:
    """Return whether two checks are equal, in constant time."""
    return hmac.compare_digest(expected, given)
