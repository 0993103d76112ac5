"""When a shard reconciles its replicas with the catalog, and in what order the steps are taken.

The loop runs a pass whenever a view comes or work is due. The steps are those of `reconcile` and
`replica_moves`; a lost manifest is restored before all of them (`lost_manifest`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from laminar.log.disk.errors import StorageError
from laminar.node.shard.replicas.lost_manifest import LostManifest
from laminar.node.shard.replicas.reconcile import Reconciler
from laminar.node.shard.replicas.replica_moves import ReplicaMover
from laminar.node.shard.replicas.replica_startup import ReplicaOpener
from laminar.node.transport.transport import TransportError

_log = logging.getLogger("laminar.shard")

RETRY_S = 0.2
STORAGE_RETRY_S = 2.0


class ReconcileLoop:
    """The loop that brings one shard's replicas to what the catalog says."""

    def __init__(
        self,
        *,
        opener: ReplicaOpener,
        reconciler: Reconciler,
        moves: ReplicaMover,
        lost_manifest: LostManifest,
        record_replaced_logs: Callable[[], Awaitable[None]],
    ) -> None:
        """Create the loop, which `run` starts.

        `record_replaced_logs` is the step of a catch-up (`CatchUp.record_replaced_logs`).
        """
        self._opener = opener
        self._reconciler = reconciler
        self._moves = moves
        self._lost_manifest = lost_manifest
        self._record_replaced_logs = record_replaced_logs
        # Whether there is a new view to reconcile with; and the event that wakes the loop for it, or for
        # replicas that move.
        self._view_is_new = False
        self._due = asyncio.Event()

    def request(self) -> None:
        """Wake the loop to bring the replicas to what the catalog says."""
        self._view_is_new = True
        self._due.set()

    def wake(self) -> None:
        """Wake the loop for replicas that move."""
        self._due.set()

    def check(self) -> None:
        """Continue work that needs no new view: lone voters, replicas that move, and unfinished steps."""
        self._opener.campaign_lone_voters()
        if self._reconciler.is_unfinished:
            self.request()
        if self._moves.needed:
            self._due.set()

    async def run(self) -> None:
        """Bring the shard's replicas to what the catalog says, whenever a view comes or work is due."""
        while True:
            await self._due.wait()
            self._due.clear()
            if not await self._knows_its_replicas():
                continue
            if self._view_is_new:
                self._view_is_new = False
                await self._follow_view()
            if self._moves.needed:
                await self._moves.run_pass()

    async def _knows_its_replicas(self) -> bool:
        """Return whether the manifest names all replicas that were here; restore it first if it was lost.

        Before that no replica is created, moved or deleted.
        """
        again_s = RETRY_S
        try:
            if await self._lost_manifest.settle():
                return True
        except TransportError as error:
            _log.debug("the catalog cannot be asked now: %s", error)
        except StorageError as error:
            _log.error("cannot write a new manifest for this shard now, will retry: %s", error)
            again_s = STORAGE_RETRY_S
        asyncio.get_running_loop().call_later(again_s, self.request)
        return False

    async def _follow_view(self) -> None:
        """Take all steps of reconciliation. A step that fails is tried again later; the others still run.

        A later step may provide what an earlier one needs, such as room on the disk.
        """
        self._opener.campaign_lone_voters()
        again_s = 0.0
        reconciler = self._reconciler
        for step in (
            reconciler.remove_deleted,
            reconciler.go_on_alone,
            self._record_replaced_logs,
            reconciler.make_missing,
            reconciler.change_policies,
        ):
            try:
                await step()
            except TransportError as error:
                _log.debug("the catalog cannot be asked now: %s", error)
                again_s = max(again_s, RETRY_S)
            except StorageError as error:
                _log.error("this shard cannot follow the catalog now and will retry: %s", error)
                again_s = STORAGE_RETRY_S
        if again_s:
            asyncio.get_running_loop().call_later(again_s, self.request)
        reconciler.campaign_first_replicas()
