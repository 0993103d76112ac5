"""The choice between the two forms of gossip datagrams while nodes run older and newer programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from membership.sealing import bound, signed
from membership.sealing.bound import BoundForm, Opened
from membership.sealing.signed import SignedForm

NO_SECRET = b"laminar: a cluster without a secret"
"""The key of clusters without a secret: it keeps out foreign packets, not an attacker."""


class GossipKey(NamedTuple):
    """The gossip keys of one secret: the derived key, and the secret itself for the older form."""

    key: bytes
    secret: bytes


WITHOUT_SECRET = (GossipKey(NO_SECRET, NO_SECRET),)


class Seal:
    """Makes and checks one process's gossip datagrams, in the newest form that all nodes support.

    `keys` returns the present keys, the used one first; without any the cluster has no secret. `is_newer`
    tells whether all nodes are known to support the newer form. Until then the older form is sent,
    and accepted. A datagram of the newer form is always accepted, and shows that its sender has seen all
    nodes support it.
    """

    def __init__(
        self,
        keys: Callable[[], Sequence[GossipKey]],
        *,
        is_newer: Callable[[], bool],
        draw: Callable[[int], bytes],
    ) -> None:
        self._keys = keys
        self._is_newer = is_newer
        self._heard_newer = False
        self._bound = BoundForm(lambda: [each.key for each in self._of_now()], draw)
        self._signed: dict[bytes, SignedForm] = {}

    @property
    def newer(self) -> bool:
        """Whether the newer form is sent, and the older one is no longer accepted."""
        return self._heard_newer or self._is_newer()

    def close(self, body: bytes, address: str) -> bytes:
        """Return the datagram that carries the body to an address."""
        return self._bound.close(body, address) if self.newer else self._older()[0].close(body)

    def open(self, data: bytes, sender: str) -> Opened:
        """Check a datagram received from the address `sender`; return the result."""
        if not data.startswith(signed.MAGIC):
            opened = self._bound.open(data, sender)
            if opened.body is not None:
                self._heard_newer = True
            return opened
        body = next((body for form in self._older() if (body := form.open(data)) is not None), None)
        if body is None:
            return Opened(outcome="bad_signature")
        return Opened(outcome="outdated") if self.newer else Opened(body=body)

    def _of_now(self) -> Sequence[GossipKey]:
        return self._keys() or WITHOUT_SECRET

    def _older(self) -> list[SignedForm]:
        secrets = [each.secret for each in self._of_now()]
        if list(self._signed) != secrets:
            self._signed = {secret: SignedForm(secret) for secret in secrets}
        return list(self._signed.values())


assert bound.HEAD_BYTES == len(signed.MAGIC) + signed.SALT_BYTES + signed.DIGEST_BYTES, "of one size"
