"""The proof with which a node that joins asks a member for the cluster's nodes.

Such a node has no token. It shows that it knows the cluster's secret, by an HMAC over the time, which the
member accepts for `VALID_MS`. An eavesdropper who sees the proof can read the list of nodes for as long, and
nothing else. Members before code version 7 only know the proof made with the secret itself: a joining node
sends that one if the newer one is refused, and members accept both.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Sequence
from typing import Final

from laminar.node.secret.keys import Keys

SCHEME: Final = "Laminar-Node"
VALID_MS: Final = 300_000
"""How far apart the clocks of two nodes may be."""

_LABEL: Final = b"laminar join: "
_PROOF: Final = re.compile(rf"{SCHEME} ([0-9]{{1,15}}) ([0-9a-f]{{64}})", re.ASCII)


def authorization(keys: Keys, *, now_ms: int, older: bool = False) -> str:
    """Return the header `Authorization` of a node that knows the secret.

    With `older` it carries the proof that members before code version 7 know.
    """
    return f"{SCHEME} {now_ms} {_proof(keys.secret if older else keys.join, str(now_ms))}"


def valid_until_ms(text: str, secrets: Sequence[Keys], *, now_ms: int) -> int:
    """Return when the proof in an `Authorization` header expires (ms since the epoch); 0 if it is invalid."""
    found = _PROOF.fullmatch(text)
    if found is None:
        return 0
    proven = False
    for keys in secrets:
        for key in (keys.join, keys.secret):
            proven |= hmac.compare_digest(_proof(key, found[1]), found[2])
    at_ms = int(found[1])
    return at_ms + VALID_MS if proven and abs(now_ms - at_ms) < VALID_MS else 0


def _proof(key: bytes, time: str) -> str:
    return hmac.digest(key, _LABEL + time.encode(), "sha256").hex()
