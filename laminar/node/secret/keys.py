"""The keys that are derived from a cluster's secret, one for each use.

HKDF (RFC 5869) with SHA-256 derives them. So a key that leaks reveals no other key, and a message of one use
is not valid in another. These are all uses:

- `handshake`: the proofs of two processes that connect (`laminar.node.transport.handshake`).
- `frames_of`: the frames of one direction of one connection without TLS
  (`laminar.node.transport.frame_check`).
- `gossip`: the datagrams between nodes (`membership.sealing`).
- `join`: the proof of a node that asks a member for the cluster's nodes (`laminar.node.runtime.join_proof`).
- `datagrams_of`: appends by datagram under one credential (`laminar.wire.datagram`).

Programs before code version 7 prove the secret itself, in handshake, gossip and join proof. Appends by
datagram under no credential have their own derivation, which is part of their protocol
(`laminar.wire.datagram.DatagramCodec`).
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Final

KEY_BYTES: Final = 32
KEYS_SINCE: Final = 7
"""The code version from which on programs know these keys."""

_SALT: Final = b"laminar: the secret of a cluster"
_HASH_BYTES: Final = 32


def extract(salt: bytes, material: bytes) -> bytes:
    """Return the pseudo-random key of RFC 5869, section 2.2."""
    return hmac.digest(salt or bytes(_HASH_BYTES), material, "sha256")


def expand(key: bytes, info: bytes, size: int = KEY_BYTES) -> bytes:
    """Return `size` bytes for the use `info`, as RFC 5869, section 2.3."""
    assert 0 < size <= 255 * _HASH_BYTES, size
    made = block = b""
    for number in range(1, -(-size // _HASH_BYTES) + 1):
        block = hmac.digest(key, block + info + bytes([number]), "sha256")
        made += block
    return made[:size]


class Keys:
    """The keys derived from one secret. Programs before code version 7 know only `secret` itself as key."""

    __slots__ = ("_key", "gossip", "handshake", "join", "secret")

    def __init__(self, secret: bytes) -> None:
        """Derive the keys; the secret is not empty."""
        assert secret, "no secret"
        self.secret = secret
        self._key = extract(_SALT, secret)
        self.handshake = expand(self._key, b"handshake of nodes")
        self.gossip = expand(self._key, b"gossip")
        self.join = expand(self._key, b"join proof")

    def __repr__(self) -> str:
        return "<Keys>"

    def frames_of(self, direction: bytes, transcript: bytes) -> bytes:
        """Return the key of one `direction` of the connection that began with the handshake `transcript`."""
        return expand(self._key, b"frames: " + direction + hashlib.sha256(transcript).digest())

    def datagrams_of(self, credential: str) -> bytes:
        """Return the key with which a credential's holder appends by datagram."""
        return expand(self._key, b"datagrams of a credential: " + credential.encode())
