"""What a node's own data folder shows of its past, and what the catalog says to that (`membership.lives`).

The controller registers the present life, and from then on, while others are in the cluster, a further page
of it now and then: each is in the folder, durably, before the catalog hears of it. The catalog's answer is
one of two. Either its copy here holds our present life, which nobody can have drawn before: then it has
*confirmed* the folder since this start. Or the folder is an older copy of itself: then the node says so to
the others and ends, before anything that it says could count (`Process.admits`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from laminar.log.disk.errors import StorageError
from laminar.node.host.clock import Clock
from laminar.node.runtime.boot import Boot
from membership.lives import Life, turn
from membership.records import NodeRecord, ReportRolledBack, Result

_log = logging.getLogger("laminar.controller")

# A copy of a node's folder is seen to be one when it is older than this, or than the node's last start.
PAGE_MS = 600_000
NEWEST_COPY = (
    "What this node has promised since is not in it, so it may not vote: put the newest copy back, or start "
    "on an empty directory under a new name (--node)"
)


class RollbackGuard:
    """The guard of one node's folder."""

    def __init__(self, boot: Boot, clock: Clock) -> None:
        self._boot = boot
        self._clock = clock
        self._page_due_ms = clock.monotonic_ms() + PAGE_MS
        self.confirmed = False

    @property
    def life(self) -> Life | None:
        """The present one, at its page."""
        lives = self._boot.lives
        return lives[-1] if lives else None

    @property
    def former(self) -> list[Life]:
        """Those before it that the catalog may not know, and one that it does."""
        return list(self._boot.lives[:-1])

    async def keep(self, nodes: Iterable[str]) -> None:
        """Write what the folder must say before another node relies on it; a failed write is tried next time.

        `nodes` are those of the catalog.
        """
        boot, now_ms = self._boot, self._clock.monotonic_ms()
        try:
            if not boot.company and any(node != boot.node for node in nodes):
                await boot.keep_company()
            if self.confirmed and len(boot.lives) > 1:
                await boot.keep_lives(boot.lives[-1:])
            if self.confirmed and boot.company and boot.lives and now_ms >= self._page_due_ms:
                await boot.keep_lives(turn(boot.lives))
                self._page_due_ms = now_ms + PAGE_MS
        except StorageError as error:
            _log.debug("the identity stays as it was: %s", error)

    def heard(self, record: NodeRecord | None) -> bool:
        """The catalog's copy here says this of our node; whether that confirms the folder, as nothing did."""
        if self.confirmed or record is None or record.life != self.life or record.rolled_back:
            return False
        self.confirmed = True
        return True

    def report(self, result: Result) -> ReportRolledBack | None:
        """Return what the catalog is to record when it knows a later state of this folder."""
        if result.node is None or result.node.life is None:
            return None
        return ReportRolledBack(self._boot.node, self._boot.store_id, result.node.life)
