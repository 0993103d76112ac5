"""Interfaces to the shard for the handlers of its requests.

Handlers depend on these interfaces, not on a shard, so a test has to provide little more than a partition. A
shard provides all of `HostServices` (`laminar.node.assembly` connects the two); most handlers take only
`ShardServices`.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from laminar.http.api.problems import Problem
from laminar.http.protocol.flows import Turns
from laminar.log.format.manifest import ReplicaEntry
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import CatalogRequest
from laminar.node.channels.deliveries import Deliveries
from laminar.node.consensus.replica import Replica
from laminar.node.delay.publishers import Publishers
from laminar.node.fair.bulk import Bulk
from laminar.node.host.clock import Clock
from laminar.node.host.disk_space import DiskSpace
from laminar.node.host.periodic import Check
from laminar.node.host.settings import Settings
from laminar.node.partition.partition import Partition
from laminar.node.runtime.boot import Role, StatusBoard
from laminar.node.runtime.cluster_view import View
from laminar.node.runtime.process_report import ProcessReport
from laminar.node.secret.keyring import Keyring
from laminar.node.trace.ring import TraceRing
from laminar.node.transport.transport import Transport

T = TypeVar("T")


class ShardServices(Protocol):
    """The services of a shard that any handler may use."""

    @property
    def node(self) -> str:
        """Name of this node."""

    @property
    def number(self) -> int:
        """Number of this shard on its node."""

    @property
    def settings(self) -> Settings:
        """The node's settings."""

    @property
    def secrets(self) -> Keyring:
        """The secrets that the nodes of the cluster share."""

    @property
    def clock(self) -> Clock:
        """The clocks of the process: a monotonic one and the wall clock."""

    @property
    def rng(self) -> random.Random:
        """The source of random numbers, for ids and samples."""

    @property
    def view(self) -> View:
        """This shard's copy of the catalog, and of the list of live nodes."""

    @property
    def partitions(self) -> Mapping[tuple[str, int], Partition]:
        """The open partitions of this shard, by topic and partition number."""

    @property
    def lost(self) -> Sequence[ReplicaEntry]:
        """Replicas of the manifest whose files are missing."""

    @property
    def failed(self) -> Mapping[int, tuple[ReplicaEntry, str]]:
        """Replicas that take no part until a restart, by replica id, with the reason."""

    @property
    def space(self) -> DiskSpace:
        """Free space of the data folder's disk."""

    async def ask_catalog(self, request: CatalogRequest) -> CatalogAnswer:
        """Ask the catalog's leader. Raises `TransportError`."""
        raise NotImplementedError

    async def refresh_view(self) -> None:
        """Wait until this shard's copy of the catalog is as new as the catalog at the call.

        Raises `Problem`.
        """
        raise NotImplementedError

    async def view_change(self, timeout_s: float) -> bool:
        """Wait for the controller's next copy of the catalog (view); return whether one came in time."""
        raise NotImplementedError

    def watched(self, keep: Callable[[Partition], bool]) -> Callable[[], list[Partition]]:
        """Return a function that returns the partitions which a periodic check has to look at.

        They are the partitions whose group was awake since the last call, and the quiesced partitions for
        which `keep` returned True at the last call.
        """
        raise NotImplementedError

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` as a background task; its failure ends the process."""
        raise NotImplementedError

    def every(self, period_s: float, check: Check, *, to_the_end: bool = False) -> None:
        """Call `check` every `period_s` seconds; with `to_the_end` also while the process drains."""

    @property
    def bulk(self) -> Bulk:
        """The limits of work on large data, shared fairly among clients."""

    def off_loop(self, job: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Run `job(*arguments)` in the thread for large bodies; return a future of its result."""
        raise NotImplementedError


class HostServices(ShardServices, Protocol):
    """The services for the whole application: `ShardServices`, and those that only a few routes need."""

    @property
    def publishers(self) -> Publishers:
        """The publishers of delayed records, for the partitions that this shard leads."""

    @property
    def traces(self) -> TraceRing:
        """The events of the trace that wait to be written."""

    @property
    def deliveries(self) -> Deliveries:
        """The deliveries of channels, which give out records, for the partitions that this shard leads."""

    @property
    def transport(self) -> Transport:
        """The transport by which this shard calls other processes of the cluster."""

    @property
    def turns(self) -> Turns:
        """The turns in which the requests of principals are served at this shard, for fairness."""

    @property
    def siblings(self) -> Sequence[Role]:
        """The other processes of this node, without this shard."""

    @property
    def board(self) -> StatusBoard:
        """The states of the node's processes, as the supervisor has written them."""

    @property
    def datagram_socket(self) -> socket.socket | None:
        """The UDP socket for appends; None if this node takes none."""

    @property
    def ready(self) -> bool:
        """Whether this shard knows its cluster and has opened its replicas."""

    @property
    def knows_its_replicas(self) -> bool:
        """Whether this shard has its manifest; False after its loss, until the catalog restores it."""

    async def ask_sibling(self, role: Role, method: str, *, payload: bytes = b"", timeout_s: float) -> bytes:
        """Call `method` of another process of this node. Raises `TransportError`."""
        raise NotImplementedError

    def catch_up_progress(self, group: bytes) -> tuple[int, int] | None:
        """Return (bytes received, bytes in all) of a group's catch-up here; None if none is under way."""

    def trimmable_index(self, partition: Partition, border: int) -> int:
        """Return the highest index, at most `border`, up to which a log led here may be trimmed now."""
        raise NotImplementedError

    def report(self) -> ProcessReport:
        """Return this process's report for the support bundle."""
        raise NotImplementedError

    def release(self, replica: Replica, *, incarnation: int, last_term: int, last_index: int) -> bool:
        """Let a recovering replica vote for logs that reach an entry; return whether it took effect."""
        raise NotImplementedError

    def failed_logs(self) -> set[int]:
        """Return the ids of logs that have failed, and so take no more entries until a restart."""
        raise NotImplementedError

    def histograms(self) -> dict[str, tuple[list[int], float]]:
        """Return the counts and sums of this process's histograms, by the names of their metrics."""
        raise NotImplementedError

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return counters and gauges by part of the shard; those of `node` are about the shard itself."""
        raise NotImplementedError


class MakeTopic(Protocol):
    """The call that creates an internal topic unless it exists."""

    async def __call__(
        self, topic: str, *, partitions: int, settings: Mapping[str, int | str] | None = None
    ) -> None:
        """Create the internal topic `topic` unless it exists. Raises `Problem` if that fails."""


async def check_enabled(services: ShardServices, version: int, what: str) -> None:
    """Refuse a request that needs a code version which the cluster has not enabled (docs/upgrading.md).

    A cluster enables it when all nodes know it. The view may be older than that, so it is refreshed before a
    request is refused.

    Raises:
        Problem: 503 `not_enabled`; or the refresh fails, as the catalog has no leader.
    """
    if services.view.code_version < version:
        await services.refresh_view()
    enabled = services.view.code_version
    if enabled < version:
        raise Problem(
            "not_enabled",
            f"{what} needs code version {version}; {enabled} is enabled until all nodes are upgraded",
            outcome="not_applied",
        )
