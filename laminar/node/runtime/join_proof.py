"""The proof with which a node that joins asks a member for the cluster's nodes.

It has no token. It shows that it knows the cluster's secret, by an HMAC over the time, which the member takes
within `VALID_MS`. A proof that is seen on the way lets another read the list of nodes for as long, and
nothing else. Members before code version 7 know only the proof under the secret itself: a node that joins
shows that one where the other is refused, and members accept both.
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

    `older`: with the proof that members before code version 7 know.
    """
    return f"{SCHEME} {now_ms} {_proof(keys.secret if older else keys.join, str(now_ms))}"


def valid_until_ms(text: str, secrets: Sequence[Keys], *, now_ms: int) -> int:
    """Return until when a header proves one of the secrets; 0 if it does not."""
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
