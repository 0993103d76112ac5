"""Guards against an older copy of the node's data folder (`membership.boot_history`).

The controller registers this start's boot record with the catalog. While the cluster has other nodes, it then
advances the record's tick every `TICK_MS`. Record and ticks are durable in the folder before the catalog
receives them. There are two outcomes. If this node's copy of the catalog gets the record of this start, whose
nonce no other start can have drawn, the catalog has *confirmed* the folder. If the catalog answers that the
folder is an older copy of itself, the node reports that to the others and ends, before any of its messages
could count (`laminar.node.runtime.peer_admission`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from laminar.log.disk.errors import StorageError
from laminar.node.host.clock import Clock
from laminar.node.runtime.boot import Boot
from membership.boot_history import BootRecord, advance
from membership.records import (
    NodeRecord,
)
from membership.requests import (
    ReportRolledBack,
    Result,
)

_log = logging.getLogger("laminar.controller")

# Time between two ticks. An older copy of a folder is recognised if it was made longer ago than this, or
# before the node's last start.
TICK_MS = 600_000
NEWEST_COPY = (
    "What this node has promised since is not in it, so it may not vote: put the newest copy back, or start "
    "on an empty directory under a new name (--node)"
)


class RollbackGuard:
    """Advances the boot record of one node's folder, and knows whether the catalog has confirmed it."""

    def __init__(self, boot: Boot, clock: Clock) -> None:
        self._boot = boot
        self._clock = clock
        self._tick_due_ms = clock.monotonic_ms() + TICK_MS
        self.confirmed = False

    @property
    def boot(self) -> BootRecord | None:
        """This start's boot record, at its present tick; None before there is one."""
        history = self._boot.boot_history
        return history[-1] if history else None

    @property
    def former(self) -> list[BootRecord]:
        """The boot records of earlier starts, oldest first.

        The catalog has the first one; it may lack the others.
        """
        return list(self._boot.boot_history[:-1])

    async def keep(self, nodes: Iterable[str]) -> None:
        """Write to the folder's identity that the cluster has other nodes, or a new tick, if that is due.

        Once the folder is confirmed, the earlier starts' boot records are dropped. A failed write is only
        logged, and tried again at the next call. `nodes` are those of the catalog.
        """
        boot, now_ms = self._boot, self._clock.monotonic_ms()
        try:
            if not boot.has_peers and any(node != boot.node for node in nodes):
                await boot.keep_has_peers()
            if self.confirmed and len(boot.boot_history) > 1:
                await boot.keep_boot_history(boot.boot_history[-1:])
            if self.confirmed and boot.has_peers and boot.boot_history and now_ms >= self._tick_due_ms:
                await boot.keep_boot_history(advance(boot.boot_history))
                self._tick_due_ms = now_ms + TICK_MS
        except StorageError as error:
            _log.debug("the identity stays as it was: %s", error)

    def confirms(self, record: NodeRecord | None) -> bool:
        """Return whether the catalog's record of this node confirms the folder; True only the first time."""
        if self.confirmed or record is None or record.boot != self.boot or record.rolled_back:
            return False
        self.confirmed = True
        return True

    def report(self, result: Result) -> ReportRolledBack | None:
        """Return the command that records this folder as an older copy; None if `result` has no record."""
        if result.node is None or result.node.boot is None:
            return None
        return ReportRolledBack(self._boot.node, self._boot.store_id, result.node.boot)
