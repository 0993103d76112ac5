"""The interface of a shard to its parts, so that no part depends on the whole shard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.storage import Storage
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import CatalogRequest
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
    """The attributes and calls of a shard that its parts use, such as `reconcile` and `replica_moves`."""

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
    """Events of traced records that are not appended to the trace topic yet."""
    by_group: dict[bytes, Partition]
    """The replicas of `partitions`, by Raft group."""
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
        """Return whether the partition belongs to this shard on this node, with or without a replica here."""
        raise NotImplementedError

    def request_reconcile(self) -> None:
        """Ask the shard to bring its replicas to what the catalog says again, soon (see `reconcile`)."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a task; if it fails, the process ends."""
        raise NotImplementedError

    def off_loop(self, job: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Run `job(*arguments)` in the thread for large bodies, and return a future of its result."""
        raise NotImplementedError

    def refusal(self) -> Problem | None:
        """Return the problem for which this shard takes no appends now; None if it takes them."""

    def trace_refusal(self) -> Problem | None:
        """Return the problem for which this shard takes no events of the trace now, or None."""

    def consumer_refusal(self) -> Problem | None:
        """Return the problem for which this shard takes no cursors and receives of consumers now, or None."""

    async def refresh_view(self) -> None:
        """Wait until the view (copy of the catalog) is as new as the catalog at the call.

        Raises `Problem`.
        """

    async def view_change(self, timeout_s: float) -> bool:
        """Wait for the controller's next view (copy of the catalog); return whether one came in time."""
        raise NotImplementedError

    async def ask_catalog(self, request: CatalogRequest) -> CatalogAnswer:
        """Send a request to the catalog's leader and return its answer. Raises `TransportError`."""
        raise NotImplementedError

    async def drop_unfinished(self) -> None:
        """Delete the unfinished logs of catch-ups that were under way when this process last ended."""

    async def open(self, entry: ReplicaEntry) -> None:
        """Start a replica of the manifest; note it as `lost` if its log, or its term and vote, is missing."""

    def opened(self, partition: Partition) -> None:
        """Note that a replica takes part now, and look for work that the catalog asks of it."""

    def remove_replica(self, entry: ReplicaEntry, error: StorageError) -> None:
        """Stop running, repairing and serving a replica; requests that wait for it fail with `error`."""
