"""The older form of gossip datagrams: signed with the secret, without replay protection.

Programs before code version 7 know only this one: magic, salt, digest, body.
"""

from __future__ import annotations

from swimprotocol.sign import Signatures

MAGIC = b"LMG1"
SALT_BYTES = 16
DIGEST_BYTES = 32


class SignedForm:
    """Signs and checks datagrams of the older form, with one key."""

    def __init__(self, key: bytes) -> None:
        # With `check_version` the signature would cover the package's version, so nodes of two releases
        # would refuse each other's datagrams.
        self._signatures = Signatures(key, salt_len=SALT_BYTES, check_version=False)
        assert self._signatures.digest_size == DIGEST_BYTES, self._signatures.digest_size

    def close(self, body: bytes) -> bytes:
        """Return the datagram that carries `body`, signed with the key."""
        salt, digest = self._signatures.sign(MAGIC + body)
        return b"".join((MAGIC, salt, digest, body))

    def open(self, data: bytes) -> bytes | None:
        """Return the body, or None when it isn't signed with this key."""
        head = len(MAGIC) + SALT_BYTES + DIGEST_BYTES
        if len(data) <= head or not data.startswith(MAGIC):
            return None
        salt, digest = data[len(MAGIC) : len(MAGIC) + SALT_BYTES], data[len(MAGIC) + SALT_BYTES : head]
        body = data[head:]
        return body if self._signatures.verify(MAGIC + body, (salt, digest)) else None
