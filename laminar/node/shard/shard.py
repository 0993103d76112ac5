"""A shard: one event loop on one CPU core, with the partitions it owns.

It serves HTTP (on the shared port and on its own), runs the replicas of its partitions, creates new ones when
the catalog says so, and forwards requests for partitions of other shards. It shares nothing with other shards
but the node's data folder, where each has its own store directory.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from laminar.http.api.problem_response import answer_error
from laminar.http.api.problems import Problem
from laminar.http.protocol.flows import Turns
from laminar.http.server.server import HttpServer
from laminar.http.server.state import ServerLimits
from laminar.log.disk.document import Document
from laminar.log.disk.errors import StorageError
from laminar.log.disk.open_files import raise_open_file_limit
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.recovery.node import LAYOUT_DOCUMENT, ShardLayout, shard_store
from laminar.log.storage import Storage
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import CatalogRequest
from laminar.node.catch_up.lagging import may_lag
from laminar.node.catch_up.service import CHECK_S as CATCH_UP_CHECK_S
from laminar.node.catch_up.service import CatchUp
from laminar.node.channels.deliveries import CHECK_S as DELIVERIES_CHECK_S
from laminar.node.channels.deliveries import Deliveries
from laminar.node.consensus.lost_majority import CHECK_S as RELEASE_CHECK_S
from laminar.node.consensus.lost_majority import is_leaderless
from laminar.node.consensus.replica import Replica
from laminar.node.delay.publishers import CHECK_S as DELAYED_CHECK_S
from laminar.node.delay.publishers import Publishers
from laminar.node.fair.bulk import Bulk
from laminar.node.find.index_terms import setting_of
from laminar.node.find.indexing import Indexer
from laminar.node.find.pace import Pace
from laminar.node.host.disk_space import DiskSpace
from laminar.node.host.failed_logs import CHECK_S as FAILED_CHECK_S
from laminar.node.host.periodic import Work
from laminar.node.host.settings import Settings
from laminar.node.partition.partition import Partition
from laminar.node.partition.retention import Retention, Rules
from laminar.node.runtime.boot import Boot, Role, StatusBoard
from laminar.node.runtime.cluster_view import ViewMessage
from laminar.node.runtime.process import Process
from laminar.node.secret.keyring import Keyring
from laminar.node.shard.application import ShardApplication
from laminar.node.shard.catalog_link import CatalogLink
from laminar.node.shard.channels import CHECK_S as CHANNELS_CHECK_S
from laminar.node.shard.channels import ShardChannels
from laminar.node.shard.http_ports import HttpPorts, max_connections
from laminar.node.shard.load_meter import LoadMeter
from laminar.node.shard.refusals import Refusals
from laminar.node.shard.replicas.leader_handback import CHECK_S as LEADERS_CHECK_S
from laminar.node.shard.replicas.leader_handback import LeaderHandback
from laminar.node.shard.replicas.lost_majority_members import PartitionMembers
from laminar.node.shard.replicas.lost_manifest import LostManifest
from laminar.node.shard.replicas.reconcile import Reconciler
from laminar.node.shard.replicas.reconcile_loop import ReconcileLoop
from laminar.node.shard.replicas.replica_moves import CHECK_S as RECONCILE_CHECK_S
from laminar.node.shard.replicas.replica_moves import ReplicaMover
from laminar.node.shard.replicas.replica_startup import ReplicaOpener
from laminar.node.shard.replicas.work_lists import CHECK_S as WORK_CHECK_S
from laminar.node.shard.replicas.work_lists import WorkLists
from laminar.node.shard.route_changes import CHECK_S as ROUTES_CHECK_S
from laminar.node.shard.route_changes import RouteChanges
from laminar.node.shard.snapshots import CHECK_S as SNAPSHOT_CHECK_S
from laminar.node.shard.snapshots import Snapshots
from laminar.node.shard.splitting import MINUTE_S, Splitting
from laminar.node.shard.trash import purge_trash
from laminar.node.trace.ring import TraceRing
from laminar.node.transactions.coordinator import TOPIC as COORDINATORS
from laminar.node.transport.transport import Address, Peer, UnixAddress
from membership.boot_history import BootRecord
from membership.catalog_delta import CatalogDelta
from membership.records import (
    PartitionRecord,
)
from router import owner_shard, partition_hash

T = TypeVar("T")

FIRST_VIEW_RETRY_S = 0.05
HAND_OVER_S = 1.0
REMIND_S = 1.0
SPACE_CHECK_S = 1.0


class Shard(Process):
    """The process of one shard of a node: `run` ends when the shard is stopped or cannot continue."""

    def __init__(
        self, boot: Boot, *, storage: Storage, make_application: Callable[[Shard], ShardApplication]
    ) -> None:
        super().__init__(boot, storage=storage)
        assert isinstance(boot.role, int)
        self.number = boot.role
        self.partitions: dict[tuple[str, int], Partition] = {}
        self.lost: list[ReplicaEntry] = []
        # Replicas that could not be opened because of a bug, and the error.
        self.failed: dict[int, tuple[ReplicaEntry, str]] = {}
        self.by_group: dict[bytes, Partition] = {}
        self._snapshots = Snapshots(storage, self.watched)
        self._recovering = self.watched(lambda each: each.replica.core.recovering)
        self._catalog = CatalogLink(boot, self.view, transport=self.transport, take=self._take_view)
        self._opened = False
        self._is_ready = asyncio.Event()
        settings = boot.settings
        self.space = DiskSpace(
            self.environment.disk,
            boot.data_directory,
            low_water_bytes=settings.low_water_bytes,
            low_water_percent=settings.low_water_percent,
        )
        self._refusals = Refusals(storage, self.space)
        self.traces = TraceRing()
        self.deliveries = Deliveries()
        self.publishers = Publishers()
        self.bulk = Bulk()
        self._application = make_application(self)
        self.http = HttpServer(
            self._application,
            ServerLimits(
                max_body_bytes=self._application.max_body_bytes,
                max_connections=max_connections(raise_open_file_limit()),
            ),
            shard=self.number,
            on_error=answer_error,
            on_answer=self._application.answered,
        )
        self._ports = HttpPorts(boot, self.http)
        self.catch_up = CatchUp(self, by_group=self.by_group, watched=self.watched(may_lag))
        self.work = WorkLists(self)
        self.leaders = LeaderHandback(self, self.work, calm_ms=settings.settle_ms)
        self.moves = ReplicaMover(
            self, self.work, give_away=self.leaders.give_away, learners_added=self.catch_up.learners_added
        )
        self.routes = RouteChanges(self, self.work, transport=self.transport)
        self.channels = ShardChannels(self, self.work, self.deliveries)
        self.splitting = Splitting(self)
        self._opener = ReplicaOpener(self)
        self._reconciler = Reconciler(self, self.work)
        self._reconcile_loop = ReconcileLoop(
            opener=self._opener,
            reconciler=self._reconciler,
            moves=self.moves,
            lost_manifest=LostManifest(self),
            record_replaced_logs=self.catch_up.record_replaced_logs,
        )
        members = PartitionMembers(
            self.by_group,
            leaderless=self.watched(lambda each: is_leaderless(each.replica)),
            view=self.view,
            refresh=self.refresh_view,
        )
        self.releases = self.answer_releases(members)
        self.retention = Retention(
            clock=self.clock,
            rules_of=self._rules_of,
            space_is_low=lambda: self.space.low,
            hold_ms=settings.retention_hold_ms,
            reading_from=self.catch_up.source.reading_from,
            keep_delayed=self.publishers.keep,
            carry=self.deliveries.carry,
        )
        self.indexer = Indexer(
            self.partitions.values,
            setting_of=self._index_setting,
            pace=Pace(settings.find_bytes_per_s),
            space_is_low=lambda: self.space.low,
        )
        meter = LoadMeter(boot.node, self.partitions, clock=self.clock, disk_is_low=lambda: self.space.low)
        self.methods["load"] = meter.on_load
        self.methods |= self._catalog.methods
        self.methods |= self.catch_up.methods
        self.methods |= self.routes.methods
        self.methods |= self._application.methods

    # -- services for the application ----------------------------------------------------

    @property
    def node(self) -> str:
        """Name of this node."""
        return self.boot.node

    @property
    def store_id(self) -> bytes:
        """Id of this node's data folder."""
        return self.boot.store_id

    @property
    def shards(self) -> int:
        """Number of shards of this node."""
        return self.boot.shards

    @property
    def settings(self) -> Settings:
        """The node's settings."""
        return self.boot.settings

    @property
    def secrets(self) -> Keyring:
        """The secrets that the nodes of the cluster share."""
        return self.boot.secrets

    @property
    def board(self) -> StatusBoard:
        """The states of the node's processes, as the supervisor has written them."""
        return self.boot.board

    @property
    def siblings(self) -> list[Role]:
        """The roles of the other processes of this node."""
        return [role for role in self.boot.roles if role != self.number]

    @property
    def datagram_socket(self) -> socket.socket | None:
        """The UDP socket for appends; None if this node takes none."""
        return self.boot.datagrams

    @property
    def turns(self) -> Turns:
        """The fair queue in which principals take turns at this shard."""
        return self.http.turns

    @property
    def knows_its_replicas(self) -> bool:
        """Whether the manifest is complete; False after its loss, until it is restored from the catalog."""
        return self.storage.manifest.known

    async def ask_sibling(self, role: Role, method: str, *, payload: bytes = b"", timeout_s: float) -> bytes:
        """Call `method` of another process of this node. Raises `TransportError`."""
        address = UnixAddress(self.boot.unix_name(role))
        return await self.transport.call(address, method, payload, timeout=timeout_s)

    def off_loop(self, job: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        """Run `job(*arguments)` in the thread for large bodies, and return a future of its result."""
        return self.http.off_loop(job, *arguments)

    def watched(self, keep: Callable[[Partition], bool]) -> Callable[[], list[Partition]]:
        """Return a function that a periodic check calls for the partitions that it has to look at.

        These are the partitions whose groups were awake (not quiesced) since the last call, and quiesced ones
        for which `keep` returned True then (`laminar.node.consensus.awake`).
        """
        return self.driver.awake.list_of(self.by_group, keep).take

    def failed_logs(self) -> set[int]:
        """Return the ids of logs that have failed and take no more entries."""
        return {log.log_id for log in self.storage.failed_logs()}

    def _remind(self) -> None:
        self.driver.awake.remind(self.by_group, passed_s=REMIND_S)

    def catch_up_progress(self, group: bytes) -> tuple[int, int] | None:
        """Return (bytes received, bytes in all) of a group's catch-up to this node; None if there is none."""
        return self.catch_up.progress_of(group)

    def trimmable_index(self, partition: Partition, border: int) -> int:
        """Return the highest index, at most `border`, up to which a log led here may be trimmed now."""
        return self.retention.trimmable_index(partition, border)

    def release(self, replica: Replica, *, incarnation: int, last_term: int, last_index: int) -> bool:
        """Release a recovering replica: its vote counts for logs that reach the entry (`Driver.release`)."""
        return self.driver.release(
            replica, incarnation=incarnation, last_term=last_term, last_index=last_index
        )

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Return counters and gauges by part of the shard; the part `node` is the shard itself."""
        return {
            "storage": self.storage.statistics(),
            "repair": self.repairs.statistics(),
            "scrub": self.storage.scrubber.statistics(),
            "find": self.indexer.statistics(),
            "http": self.http.statistics(),
            "bulk": self.bulk.statistics(),
            "transport": self.transport.statistics(),
            "tls": self.tls_statistics(),
            "secret": self.boot.secrets.statistics(),
            "raft": self.driver.statistics(),
            "loop": self.health.statistics(),
            "node": {
                "lost_replicas": len(self.lost),
                "recovering_replicas": sum(
                    each.replica.core.recovering and self.driver.is_current(each.replica)
                    for each in self._recovering()
                ),
                "disk_free_bytes": self.space.free_bytes,
                "disk_low_water_bytes": self.space.threshold_bytes,
                "disk_is_low": int(self.space.low),
                "log_starts_moved": self.retention.moved,
                "log_starts_held": self.retention.held,
                "work_missed": self.work.missed,
            },
            "catch_up": self.catch_up.statistics(),
            "moves": self.moves.statistics(),
            "leaders": self.leaders.statistics(),
            "routes": self.routes.statistics() | {"splits_by_load": self.splitting.begun},
            "channels": self.channels.statistics() | self.deliveries.statistics(),
            "delayed": self.publishers.statistics(),
            "trace": self.traces.statistics(),
        }

    # -- life ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Open the replicas, serve requests, follow the catalog; return after an orderly stop."""
        await self.listen()
        joining = self.cluster_id is None
        if joining:
            # An operator may ask the node for what it waits. Without replicas it can serve nothing else.
            self.spawn(self._serve_http())
            await self._first_view()
        if self.stopping.is_set():
            self._ports.close()
            await self.http.drain(timeout_s=self.boot.settings.drain_ms / 1000)
            await self.close()
            return
        await self.space.refresh()
        self.every(SPACE_CHECK_S, self.space.refresh)
        await self._opener.open_all()
        self._opened = True
        self._note_ready()
        self.spawn(self.storage.scrubber.run())
        self.spawn(self.indexer.run())
        self.every(FAILED_CHECK_S, self.check_failed_logs)
        if not joining:
            self.spawn(self._serve_http())
        await self._application.start()
        if not self.view.version:
            await self._first_view()
        self.spawn(self._reconcile_loop.run())
        self.every(RECONCILE_CHECK_S, self._reconcile_loop.check)
        self.every(WORK_CHECK_S, self.work.check_all)
        self.every(LEADERS_CHECK_S, self.leaders.check)
        self.every(ROUTES_CHECK_S, self.routes.check)
        self.every(CHANNELS_CHECK_S, self.channels.check)
        with_channels = self.watched(lambda each: bool(each.state.channels))
        self.every(DELIVERIES_CHECK_S, lambda: self.deliveries.check(with_channels()))
        with_delayed = self.watched(lambda each: bool(each.state.delayed))
        self.every(DELAYED_CHECK_S, lambda: self.publishers.check(with_delayed()))
        self.every(MINUTE_S, self.splitting.check)
        self.every(self.boot.settings.retention_check_ms / 1000, self._retain)
        self.every(CATCH_UP_CHECK_S, self.catch_up.check)
        self.every(RELEASE_CHECK_S, self.releases.check)
        self.every(SNAPSHOT_CHECK_S, self._snapshots.check)
        self.every(REMIND_S, self._remind)
        if self.number == 0:
            self.spawn(purge_trash(self.boot, self.space, self.clock))
        await self.stopping.wait()
        self._ports.close()
        for partition in self.partitions.values():
            partition.reader.stop_waiting()
        self.deliveries.stop()
        self.publishers.stop()
        await self.driver.hand_over(timeout_s=HAND_OVER_S)
        await self.http.drain(timeout_s=self.boot.settings.drain_ms / 1000)
        self._application.close()
        await asyncio.gather(self.storage.sync(), return_exceptions=True)
        await self._snapshots.write_at_end(self.partitions.values())
        await self.close()

    async def _serve_http(self) -> None:
        """Open the HTTP ports when this shard is ready, or soon after; report to the supervisor."""
        await self._ports.until_ready(self._is_ready, self.partitions.values(), self.view)
        await self._ports.open()
        self.spawn(self._ports.open_shared())
        await self._is_ready.wait()
        self.boot.ready()

    async def _first_view(self) -> None:
        """Wait for the first view of the catalog: sent by the controller, or requested here."""
        while self.view.message is None and not self.stopping.is_set():
            if await self._catalog.fetch_view():
                return
            await self.stopped_within(FIRST_VIEW_RETRY_S)

    # -- the view ------------------------------------------------------------------------

    def _take_view(self, message: ViewMessage, delta: CatalogDelta | None = None) -> None:
        """Use a new view from now on, and start the work that it asks for.

        `delta` says what has changed since the last view; None if anything may have.
        """
        if message.catalog.version < self.view.version:
            return
        known = self.view.nodes()
        self.view.message = message
        if delta.nodes if delta is not None else known != message.catalog.nodes:
            self.driver.addresses_changed()
        self.leaders.observe()
        self.work.follow(delta)
        self._reconciler.follow_min_replicas()
        self._reconciler.follow_trace()
        self._reconciler.stop_abandoned()
        self.routes.check()
        self.channels.check()
        if self.cluster_id is None:
            self.cluster_id, self.epoch = message.cluster_id, message.epoch
        self._note_ready()
        self._catalog.announce()
        self.request_reconcile()

    async def refresh_view(self) -> None:
        """Wait until the view (copy of the catalog) is at least as new as the catalog was at the call.

        Call it before you rely on the absence of something: a view may be outdated, so a topic that is
        missing in it may exist.

        Raises:
            Problem: `no_leader` while the catalog has no leader, or no new view reaches this node.
        """
        await self._catalog.refresh_view()

    def _note_ready(self) -> None:
        if self._opened and self.boot.node in self.view.nodes():
            self._is_ready.set()

    @property
    def ready(self) -> bool:
        """Whether this shard has a copy of the catalog with this node in it, and has opened its replicas."""
        return self._is_ready.is_set()

    async def view_change(self, timeout_s: float) -> bool:
        """Wait for the controller's next view (copy of the catalog); return whether one came in time."""
        return await self._catalog.view_change(timeout_s)

    # -- replicas ------------------------------------------------------------------------

    def knows(self, node: str) -> bool:
        """Return whether the view (this shard's copy of the catalog) has a node of this name."""
        return node in self.view.nodes()

    def known_boot(self, node: str) -> BootRecord | None:
        """Return the newest boot record of another node's data folder in the view, or None."""
        return self.view.message.boots.get(node) if self.view.message is not None else None

    def known_store(self, node: str) -> bytes | None:
        """Return the store id of another node's data folder in the view, or None."""
        record = self.view.nodes().get(node)
        return None if record is None else record.store_id

    def is_removed(self, store_id: bytes) -> bool:
        """Return whether this data folder belongs to a node that was removed from the cluster."""
        return self.view.message is not None and store_id in self.view.message.catalog.removed_stores

    def admits(self, peer: Peer) -> bool:
        """Return whether a peer's messages are accepted; none from other nodes before the first view."""
        return self.view.message is not None and super().admits(peer)

    def holder_address(self, node: str, entry: ReplicaEntry) -> Address | None:
        """Return the address of the process on `node` that owns an entry's group, or None.

        The group's replica need not be running here yet.
        """
        return self.view.partition_address(node, entry.topic, entry.partition)

    def holders_of(self, entry: ReplicaEntry, replica: Replica | None) -> list[str]:
        """Return the nodes of the other members of a group, the leader's first.

        Before the replica's log is read (`replica` is None), the members in the catalog are included: a
        replica that was added later knows the others only from the catalog then.
        """
        nodes = super().holders_of(entry, replica)
        record = self.view.partition(entry.topic, entry.partition)
        if replica is None and record is not None and record.group == entry.group:
            known = [*record.replicas, *(each.replica for each in record.leaving)]
            others = [each.node for each in known if each.replica_id != entry.replica_id]
            nodes += dict.fromkeys(node for node in others if node not in nodes)
        return nodes

    def address_of(self, node: str, replica: Replica) -> Address | None:
        """Return the address of the process on `node` that owns the replica's group, or None."""
        machine = self.by_group.get(replica.group)
        if machine is None:
            return None
        return self.view.partition_address(node, machine.topic, machine.number)

    async def drop_unfinished(self) -> None:
        """Delete the unfinished logs of catch-ups that were under way when this process last ended."""
        await self.catch_up.drop_unfinished()

    async def open(self, entry: ReplicaEntry) -> None:
        """Start a replica of the manifest; note it as `lost` if its log, or its term and vote, is missing."""
        await self._opener.open(entry)

    def opened(self, partition: Partition) -> None:
        """Note that a replica takes part now, and look for work that the catalog asks of it."""
        partition.on_led = self._led
        partition.appends.on_delayed = lambda: self.publishers.added(partition)
        if self.work.changed(partition):
            self.request_reconcile()
        self.routes.check()
        self.channels.check()

    def _led(self, partition: Partition) -> None:
        if self.work.changed(partition):
            self._reconcile_loop.wake()
        self.routes.check()
        self.channels.check()
        if len(partition.state.delayed):
            self.publishers.added(partition)

    def refusal(self) -> Problem | None:
        """Return the problem for which this shard takes no appends now; None if it takes them."""
        return self._refusals.of_appends()

    def trace_refusal(self) -> Problem | None:
        """Return the problem for which this shard takes no events of the trace now, or None."""
        return self._refusals.of_trace()

    def consumer_refusal(self) -> Problem | None:
        """Return the problem for which this shard takes no cursors and receives of consumers now, or None."""
        return self._refusals.of_consumers()

    # -- retention -----------------------------------------------------------------------

    def _rules_of(self, topic: str) -> Rules:
        if topic == COORDINATORS:
            # A coordinator's whole state is in its tables, which each `log_start` entry contains: so entries
            # need not be kept.
            return Rules(retention_bytes=0)
        record = self.view.topics().get(topic)
        return Rules.of(record.settings) if record is not None else Rules()

    def _index_setting(self, topic: str) -> str | None:
        record = self.view.topics().get(topic)
        return None if record is None else setting_of(record.settings)

    def _retain(self) -> Work | None:
        """Trim the logs led here by their topics' retention; return the rest of the work, if there is any."""
        return self.retention.check_all(self.partitions.values())

    # -- following the catalog -----------------------------------------------------------

    def request_reconcile(self) -> None:
        """Wake the reconcile loop, which brings this shard's replicas to what the catalog says."""
        self._reconcile_loop.request()

    def owns(self, record: PartitionRecord) -> bool:
        """Return whether the partition belongs to this shard on this node, with or without a replica here."""
        return owner_shard(partition_hash(record.topic, record.number), self.boot.shards) == self.number

    async def ask_catalog(self, request: CatalogRequest) -> CatalogAnswer:
        """Ask the catalog's leader through this node's controller.

        `refresh_view` asks it without this method.

        Raises:
            TransportError: if no answer came.
        """
        return await self._catalog.ask(request)

    def remove_replica(self, entry: ReplicaEntry, error: StorageError) -> None:
        """Stop running, repairing and serving a replica; requests that wait for it fail with `error`."""
        self.driver.remove(entry.group, error)
        self.repairs.forget(entry.group)
        self.lost = [each for each in self.lost if each.replica_id != entry.replica_id]
        self.failed.pop(entry.replica_id, None)
        partition = self.by_group.pop(entry.group, None)
        # A topic of the same name may have been created since: its replica stays.
        if partition is not None and self.partitions.get((entry.topic, entry.partition)) is partition:
            del self.partitions[(entry.topic, entry.partition)]


def store_of(boot: Boot) -> str:
    """Return the path of the shard's store directory. Blocks while it reads the layout of the data folder."""
    assert isinstance(boot.role, int)
    payload = Document(boot.environment.disk, boot.data_directory, LAYOUT_DOCUMENT).read()
    assert payload is not None, f"no shard layout in {boot.data_directory}: recovery comes first"
    return shard_store(boot.data_directory, msgspec.msgpack.decode(payload, type=ShardLayout), boot.role)
