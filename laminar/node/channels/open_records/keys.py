"""The hash by which an ordered channel knows a key."""

from __future__ import annotations

import mmh3

from laminar.node.partition.state.channels import NO_KEY


def key_hash(key: bytes | None) -> int:
    """Return the hash by which an ordered channel knows a key.

    Keys with the same hash wait for each other.
    """
    return NO_KEY if key is None else (mmh3.hash64(key, 0, True, False)[0] or 1)
