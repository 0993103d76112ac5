"""Tokens: their text, and the digest by which the catalog recognises them.

`lam_ID_SECRET`: the id is public, 16 hexadecimal digits; the secret is 32 random bytes as 43 characters of
base64url. The catalog has SHA-256 over a salt and these bytes. A slow hash would not help: there is nothing
to guess in 256 random bits.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from collections.abc import Callable
from typing import Final, NamedTuple

from membership.records import CredentialRecord

ID_BYTES: Final = 8
SECRET_BYTES: Final = 32
SALT_BYTES: Final = 16

_TOKEN: Final = re.compile(r"lam_([0-9a-f]{16})_([A-Za-z0-9_-]{43})", re.ASCII)


class NewToken(NamedTuple):
    """A new token, with the fields that the catalog stores of it."""

    text: str
    id: str
    salt: bytes
    digest: bytes


def new_token(random_bytes: Callable[[int], bytes]) -> NewToken:
    """Return a new token; `random_bytes` must be a source fit for secrets, like `os.urandom`."""
    number, secret, salt = random_bytes(ID_BYTES).hex(), random_bytes(SECRET_BYTES), random_bytes(SALT_BYTES)
    text = base64.urlsafe_b64encode(secret).rstrip(b"=").decode()
    return NewToken(f"lam_{number}_{text}", number, salt, _digest(salt, secret))


def id_of(text: str) -> str:
    """Return the id in the text of a token; empty if the text is no token."""
    found = _TOKEN.fullmatch(text)
    return "" if found is None else found[1]


def proves(text: str, record: CredentialRecord) -> bool:
    """Return whether a token has the secret of the record with its id, in constant time."""
    found = _TOKEN.fullmatch(text)
    if found is None or found[1] != record.id or not record.digest:
        return False
    return hmac.compare_digest(_digest(record.salt, base64.urlsafe_b64decode(f"{found[2]}=")), record.digest)


def _digest(salt: bytes, secret: bytes) -> bytes:
    return hashlib.sha256(salt + secret).digest()
