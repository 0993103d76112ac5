"""The interface of a shard to its parts, so that no part depends on the whole shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.storage import Storage
from laminar.node.catalog.service import CatalogAnswer, CatalogRequest
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.peer_repair import PeerRepair
from laminar.node.host.clock import Clock
from laminar.node.partition.partition import Partition
from laminar.node.runtime.cluster_view import View
from laminar.node.runtime.replica_factory import ReplicaFactory
from laminar.node.trace.ring import TraceRing
from membership.records import (
    PartitionRecord,
)

T = TypeVar("T")


class ShardContext(Protocol):
    """One shard, as `reconcile`, `replica_moves`, `replica_startup` and `lost_manifest` see it."""

    number: int
    clock: Clock
    view: View
    storage: Storage
    driver: Driver
    repairs: PeerRepair
    replica_factory: ReplicaFactory
    partitions: dict[tuple[str, int], Partition]
    """Replicas that take part, by topic and partition number."""
    traces: TraceRing
    """The events of the trace that wait."""
    by_group: dict[bytes, Partition]
    """The same, by Raft group."""
    lost: list[ReplicaEntry]
    """Replicas of the manifest whose files are missing."""
    failed: dict[int, tuple[ReplicaEntry, str]]
    """Replicas that could not be opened because of a bug: the error, by replica id."""

    @property
    def node(self) -> str:
        """Name of this node."""

    @property
    def store_id(self) -> bytes:
        """Id of this node's data folder."""

    @property
    def shards(self) -> int:
        """Number of shards of this node."""

    def owns(self, record: PartitionRecord) -> bool:
        """Return whether this shard owns the partition, wherever its replicas are."""
        raise NotImplementedError

    def request_reconcile(self) -> None:
        """Have the shard compare its replicas with the view again, soon (see `reconcile`)."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside the rest; its failure ends the process."""
        raise NotImplementedError

    def off_loop(self, job: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Run `job` in the thread for large bodies."""
        raise NotImplementedError

    def refusal(self) -> Problem | None:
        """Return why this shard takes no appends now; None if it does."""

    def trace_refusal(self) -> Problem | None:
        """Return why this shard takes no events of the trace now; None if it does."""

    def consumer_refusal(self) -> Problem | None:
        """Return why this shard takes nothing from consumers now, neither receives nor cursors; or None."""

    async def refresh_view(self) -> None:
        """Wait until the view is as new as the catalog was at the call. Raises `Problem`."""

    async def view_change(self, timeout_s: float) -> bool:
        """Wait for the controller's next view; return whether one came in time."""
        raise NotImplementedError

    async def ask_catalog(self, request: CatalogRequest) -> CatalogAnswer:
        """Ask the catalog's leader. Raises `TransportError`."""
        raise NotImplementedError

    async def drop_unfinished(self) -> None:
        """Delete the unfinished logs of catch-ups that were under way when this process last ended."""

    async def open(self, entry: ReplicaEntry) -> None:
        """Start a replica of the manifest; keep it as `lost` if its log, or its term and vote, is missing."""

    def opened(self, partition: Partition) -> None:
        """Note that a replica takes part now."""

    def remove_replica(self, entry: ReplicaEntry, error: StorageError) -> None:
        """Stop driving, repairing and serving a replica; its waiters get `error`."""
