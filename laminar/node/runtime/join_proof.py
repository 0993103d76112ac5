"""The proof with which a node that joins asks a member for the cluster's nodes.

It has no token. It shows that it knows the cluster's secret, by an HMAC over the time, which the member takes
within `VALID_MS`. A proof that is seen on the way lets another read the list of nodes for as long, and
nothing else.
"""

from __future__ import annotations

import hmac
import re
from typing import Final

SCHEME: Final = "Laminar-Node"
VALID_MS: Final = 300_000
"""How far apart the clocks of two nodes may be."""

_LABEL: Final = b"laminar join: "
_PROOF: Final = re.compile(rf"{SCHEME} ([0-9]{{1,15}}) ([0-9a-f]{{64}})", re.ASCII)


def authorization(secret: bytes, *, now_ms: int) -> str:
    """Return the header `Authorization` of a node that knows the secret."""
    return f"{SCHEME} {now_ms} {_proof(secret, str(now_ms))}"


def valid_until_ms(text: str, secret: bytes, *, now_ms: int) -> int:
    """Return until when a header proves the secret; 0 if it does not."""
    found = _PROOF.fullmatch(text)
    if found is None or not hmac.compare_digest(_proof(secret, found[1]), found[2]):
        return 0
    at_ms = int(found[1])
    return at_ms + VALID_MS if abs(now_ms - at_ms) < VALID_MS else 0


def _proof(secret: bytes, time: str) -> str:
    return hmac.digest(secret, _LABEL + time.encode(), "sha256").hex()
