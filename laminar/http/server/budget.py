"""A budget of the bytes (of bodies, or of answers) that a server holds in memory for its clients.

One limit is for all clients together, another for each address, so that no client uses up all the room.
"""

from __future__ import annotations

import ipaddress
from typing import Final

# A quarter of the budget is only for requests that are not larger than this, so that large requests cannot
# use up the room for small ones.
SMALL_BYTES: Final = 64 * 1024


class Budget:
    """A count of bytes in memory: at most `total_bytes` in all, and `share_bytes` for one address.

    `held_bytes` is the number in all at the moment. Call `lacks` before `take`: `take` checks no limit.
    """

    __slots__ = ("_by_address", "held_bytes", "share_bytes", "total_bytes")

    def __init__(self, total_bytes: int, share_bytes: int) -> None:
        self.total_bytes = total_bytes
        self.share_bytes = min(share_bytes, total_bytes)
        self.held_bytes = 0
        self._by_address: dict[str, int] = {}

    def lacks(self, address: str, size: int, *, of: int = 0) -> int | None:
        """Return the limit that `size` more bytes for `address` would exceed; None if there is room.

        `of` is the size of the whole body, if these bytes are a part of one.
        """
        whole = max(size, of)
        for held, most in (
            (self._by_address.get(address, 0), self.share_bytes),
            (self.held_bytes, self.total_bytes),
        ):
            limit = most if whole <= SMALL_BYTES else most - most // 4
            if held + size > limit:
                return limit
        return None

    def take(self, address: str, size: int) -> None:
        """Count `size` bytes as held in memory for `address`."""
        self.held_bytes += size
        self._by_address[address] = self._by_address.get(address, 0) + size

    def give(self, address: str, size: int) -> None:
        """Count `size` bytes that were held for `address` as free again."""
        left = self._by_address.get(address, 0) - size
        assert left >= 0, f"{address} gives {size} bytes, and has {left + size}"
        self.held_bytes -= size
        if left:
            self._by_address[address] = left
        else:
            self._by_address.pop(address, None)


def address_of(peername: object) -> str:
    """Return the key under which a peer's bytes are counted.

    It is the IPv4 address, the first 64 bits of the IPv6 address, or one key for all Unix sockets.
    """
    if not isinstance(peername, tuple):
        return "unix"
    host = str(peername[0])
    if ":" not in host:
        return host
    address = ipaddress.IPv6Address(host.partition("%")[0])
    mapped = address.ipv4_mapped
    return str(mapped) if mapped is not None else address.packed[:8].hex()
