"""The controller: a node's process for gossip and the catalog; it has no data path.

It holds the node's replica of group 0 (`local_replica`), feeds the shards with a view of the cluster
(`view_publisher`), and reconciles the node with the catalog: registers it, keeps its addresses current, and,
while it leads group 0, performs `leader_duties`. Gossip gives it hints and addresses, and decides nothing
(docs/consensus.md#the-catalog).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re

import msgspec

from laminar.log.disk.errors import StorageError
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.recovery.node import controller_store
from laminar.log.storage import Storage
from laminar.node.access.first_token import FirstToken
from laminar.node.catalog import controller_addresses
from laminar.node.catalog.balancing import Balancer
from laminar.node.catalog.group import CatalogGroup
from laminar.node.catalog.leader_duties import LeaderDuties
from laminar.node.catalog.load_reports import REPORT_S, LoadReporter
from laminar.node.catalog.local_replica import ANOTHER_NAME, LocalReplica
from laminar.node.catalog.lost_majority_members import CatalogMembers
from laminar.node.catalog.messages.requests import ConfirmRequest, NodeRequest, ReplicaRequest
from laminar.node.catalog.node_directory import NodeDirectory
from laminar.node.catalog.rollback_guard import NEWEST_COPY, RollbackGuard
from laminar.node.catalog.service import CatalogService
from laminar.node.catalog.view_publisher import ViewPublisher
from laminar.node.consensus.lost_majority import CHECK_S as RELEASE_CHECK_S
from laminar.node.consensus.replica import Replica
from laminar.node.host.failed_logs import CHECK_S as FAILED_CHECK_S
from laminar.node.host.fork import Unrecoverable
from laminar.node.host.settings import TOKENS
from laminar.node.routes.driver import RouteDriver
from laminar.node.runtime.boot import Boot
from laminar.node.runtime.cluster_view import ViewMessage
from laminar.node.runtime.join import Join, JoinAnswer
from laminar.node.runtime.process import Process, run_process
from laminar.node.secret.keys import KEYS_SINCE
from laminar.node.transport.transport import Address, Peer, TcpAddress, TransportError
from membership.boot_history import BootRecord
from membership.catalog import CODE_VERSION, Catalog, NotCatalogLeader
from membership.catalog_rules import kept_by_command
from membership.gossip.gossip import Gossip
from membership.gossip.packets import address_text
from membership.records import (
    CatalogState,
    NodeRecord,
)
from membership.requests import (
    Result,
)
from membership.sealing.seal import GossipKey
from membership.tables import encoded
from raft.configuration import ConfigurationRefused
from raft.values import NotLeader

_log = logging.getLogger("laminar.controller")

ANOTHER_FOLDER = "Start it on an empty folder, with --join, to have it back: its name may be used again"

RECONCILE_S = 1.0
JOIN_RETRY_S = 0.2
CHECK_CLUSTER_S = 2.0
# A start waits this long for the catalog's confirmation of this node, before it serves without.
UNCONFIRMED_S = 3.0
# How often the other controllers' addresses are written again, so that a damaged file does not stay damaged:
# a founder whose catalog is damaged finds the other nodes only by them.
REMEMBER_MS = 60_000
# How often a node asks how new the catalog is. A node that was removed gets no entries any more, perhaps not
# even that of its removal.
COPY_CHECK_MS = 30_000


class Controller(Process):
    """The controller process of a node: gossip, a replica of the catalog, and copies of it for the shards."""

    def __init__(self, boot: Boot, *, storage: Storage) -> None:
        super().__init__(boot, storage=storage)
        self.gossip: Gossip | None = None
        self._addresses = controller_addresses.AddressBook()
        self._guard = RollbackGuard(boot, self.clock)
        self._remembered_until_ms = 0
        self._copy_checked_ms = self.clock.monotonic_ms()
        # The newest version of the catalog as of that check.
        self._newest_version = 0
        self._reconcile_now = asyncio.Event()
        self._patient = True
        # The code version that the cluster had enabled when this node joined it.
        self._joined_version = 0
        self._replica = LocalReplica(
            boot,
            addresses=self._addresses,
            clock=self.clock,
            storage=storage,
            driver=self.driver,
            repairs=self.repairs,
            factory=self.replica_factory,
            stopping=self.stopping,
            on_applied=self._applied,
            on_led=self._led,
            on_match=lambda: self.service.changed(),
            on_fatal=self.fatal,
        )
        self.directory = NodeDirectory(boot.node, replica=self._replica, addresses=self._addresses)
        balancer = Balancer(boot.settings, self.clock)
        self._first_token: FirstToken | None = None
        if boot.settings.access == TOKENS:
            self._first_token = FirstToken(boot.data_directory, now_ms=self.clock.wall_ms)
        self.service = CatalogService(
            self.directory,
            balancer=balancer,
            driver=self.driver,
            transport=self.transport,
            clock=self.clock,
            rng=self.rng,
            max_partitions=boot.settings.max_partitions,
            progress_of=lambda topic: self._routes.progress_of(topic),
        )
        self._routes = RouteDriver(
            view=self.view,
            clock=self.clock,
            transport=self.transport,
            led_catalog=self._led_catalog,
            spawn=self.spawn,
        )
        self._duties = LeaderDuties(
            boot,
            clock=self.clock,
            driver=self.driver,
            directory=self.directory,
            balancer=balancer,
            first_token=self._first_token,
            again=self._reconcile_now.set,
        )
        self._loads = LoadReporter(boot, transport=self.transport, service=self.service)
        self._publisher = ViewPublisher(
            boot,
            view=self.view,
            make=self.view_message,
            driver=self.driver,
            transport=self.transport,
            spawn=self.spawn,
        )
        members = CatalogMembers(replica=self._replica, directory=self.directory)
        self._releases = self.answer_releases(members)
        self.methods |= {
            "catalog": lambda peer, payload: self.service.handle(payload),
            "join": self._on_join,
            "view": self._publisher.answer,
            "stats": self._on_stats,
        }

    # -- addresses -----------------------------------------------------------------------

    @property
    def group(self) -> CatalogGroup | None:
        """This node's part of group 0; None until it is opened."""
        return self._replica.group

    def state(self) -> CatalogState:
        """Return this node's copy of the catalog; while that is empty, the one got at joining."""
        return self.directory.state()

    def knows(self, node: str) -> bool:
        """Return whether this process knows a node: it has the node's record or address.

        An address from gossip counts too: this node's copy of the catalog may be so old that it lacks the
        node that leads.
        """
        return self.directory.address(node) is not None

    def known_boot(self, node: str) -> BootRecord | None:
        """Return the newest boot record of another node's data folder that the catalog has named here."""
        return self.directory.boot(node)

    def known_store(self, node: str) -> bytes | None:
        """Return the store id of another node's newest data folder that the catalog has named here."""
        folder = self.directory.folder(node)
        return None if folder is None else folder.store_id

    def is_removed(self, store_id: bytes) -> bool:
        """Return whether the data folder with this id was a removed node's, by our copy of the catalog."""
        return store_id in self.state().removed_stores

    def remembers(self, node: str, boot: BootRecord) -> bool:
        """Return whether this boot record of `node` is on disk here, so it is known after a restart, too."""
        known = self._addresses.folders.get(node)
        return known is not None and known.boot == boot

    def address_of(self, node: str, replica: Replica) -> Address | None:
        """Return the address of the controller on `node`."""
        return self.directory.address(node)

    def address_of_peer(self, peer: Peer) -> Address | None:
        """Return the address at which another process listens for its peers; None if unknown."""
        return self.directory.address(peer.node) if peer.role == 0 else super().address_of_peer(peer)

    def holder_address(self, node: str, entry: ReplicaEntry) -> Address | None:
        """Return the address of the process on `node` that holds its replica of group 0: its controller."""
        return self.directory.address(node)

    def holders_of(self, entry: ReplicaEntry, replica: Replica | None) -> list[str]:
        """Return the other nodes that hold this log: all others, as each node has a replica of group 0."""
        nodes = super().holders_of(entry, replica) if replica is not None else []
        return nodes + [node for node in self._addresses.remembered if node not in (self.boot.node, *nodes)]

    # -- life ----------------------------------------------------------------------------

    def awaiting_restart(self) -> list[str]:
        """Return a text for each log that needs a restart of the process to recover: its name and its fault.

        Without its catalog a controller has little to do, so a restart interrupts nothing.
        """
        failure = self._replica.failure
        own = [] if failure is None else [f"the catalog ({failure})"]
        return [*super().awaiting_restart(), *own]

    async def run(self) -> None:
        """Run gossip, the catalog's replica and the feed of the shards; return after an orderly stop."""
        await self.listen()
        if self.boot.cluster_id is not None:
            await self._check_cluster()
            await self._replica.open()
        else:
            await self._join()
        if self.cluster_id is None:
            await self.close()  # asked to stop before any member answered
            return
        self.spawn(self.storage.scrubber.run())
        self.every(FAILED_CHECK_S, self.check_failed_logs)
        self.every(RELEASE_CHECK_S, self._releases.check)
        self._start_gossip()
        for role in self.boot.roles:
            if role != self.boot.role:
                self.spawn(self._publisher.push(role))
        self.spawn(self._reconcile())
        self.spawn(self._routes.run())
        self.every(RECONCILE_S, self._reconcile_now.set)
        if self.boot.settings.balance_threshold:
            self.every(REPORT_S, self._loads.report)
        asyncio.get_running_loop().call_later(UNCONFIRMED_S, self._be_ready_unconfirmed)
        await self.stopping.wait()
        if self.gossip is not None:
            await self.gossip.close()
        await self.close()

    def _start_gossip(self) -> None:
        assert self.boot.gossip is not None and self.cluster_id is not None
        addresses = self.boot.addresses
        secrets = self.boot.secrets
        self.gossip = self.environment.gossip(
            sock=self.boot.gossip,
            node=self.boot.node,
            address=address_text(addresses.gossip_host, addresses.gossip_port),
            keys=lambda: [GossipKey(keys.gossip, keys.secret) for keys in secrets.current],
            is_newer=lambda: max(self.enabled(), self._joined_version) >= KEYS_SINCE,
            info={
                "cluster": self.cluster_id.hex(),
                "shards": self.boot.shards,
                controller_addresses.HOST: addresses.host,
                controller_addresses.PORT: addresses.peer_ports[0],
            },
            rng=self.rng,
        )
        self.directory.follow(self.gossip, cluster_id=self.cluster_id)
        self.gossip.on_change = lambda member: self._gossiped()
        self.gossip.start(self._gossip_seeds())

    def _gossiped(self) -> None:
        self.directory.gossip_changed()
        self._publisher.changed()
        self.service.changed()

    def _gossip_seeds(self) -> list[str]:
        return [
            address_text(record.host, record.gossip_port)
            for name, record in self.directory.known_nodes().items()
            if name != self.boot.node
        ]

    # -- joining -------------------------------------------------------------------------

    def _own_record(self) -> NodeRecord:
        addresses = self.boot.addresses
        known = self.state().nodes.get(self.boot.node)
        own = NodeRecord(
            node=self.boot.node,
            store_id=self.boot.store_id,
            host=addresses.host,
            http_port=addresses.http_port,
            shard_http_ports=list(addresses.shard_http_ports),
            peer_ports=list(addresses.peer_ports),
            gossip_port=addresses.gossip_port,
            shards=self.boot.shards,
            weight=self.boot.settings.weight,
            catalog_replica=self._catalog_replica(known),
            boot=self._guard.boot,
            zone=self.boot.settings.zone,
            code_version=CODE_VERSION,
            tls=self.boot.settings.tls,
        )
        return own if known is None else kept_by_command(own, known)

    def _catalog_replica(self, known: NodeRecord | None) -> int:
        """Return this node's replica id in group 0; 0 if it has none (registering with 0 asks for one)."""
        if known is not None:
            return known.catalog_replica
        return self.group.replica.replica_id if self.group is not None else 0

    async def _check_cluster(self) -> None:
        """Refuse to start if `--join` names another cluster than the one that the data folder belongs to.

        If no member answers within `CHECK_CLUSTER_S`, for example because all nodes start together, the start
        goes on.

        Raises:
            Unrecoverable: the cluster at `--join` is another one.
        """
        joins = self.boot.settings.join
        if not joins:
            return
        found = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CHECK_CLUSTER_S):
                found = await self.environment.find_cluster(
                    joins, secrets=self.boot.secrets, certificates=self.boot.certificates
                )
        if found not in (None, self.boot.cluster_id):
            raise Unrecoverable(
                f"the data folder is not of the cluster at {', '.join(joins)} (--join): it founded its own "
                "before, or joined another. Start it without --join, or on an empty folder"
            )

    async def _join(self) -> None:
        """Ask members of the cluster to accept this node, until one does or this process is to stop.

        Raises:
            Unrecoverable: the cluster refuses this node.
        """
        request = msgspec.msgpack.encode(Join(record=self._own_record(), former=self._guard.former))
        logged: set[str] = set()

        def say(line: str) -> None:
            # Compared without digits, which are ports and counts, so that the same failure is logged once.
            text = re.sub(r"[0-9]+", "", line)
            if text not in logged:
                logged.add(text)
                _log.warning("joining: %s; still trying", line)

        while not self.stopping.is_set():
            reasons: list[str] = []
            joins = self.boot.settings.join
            addresses = await self.environment.find_controllers(
                joins,
                secrets=self.boot.secrets,
                certificates=self.boot.certificates,
                tell=reasons.append,
            )
            if not addresses:
                say(
                    f"no node answers at {', '.join(joins)} ({'; '.join(reasons)}); --join must name the "
                    "HTTP address of a node that runs, with the port that it was given by --port"
                )
            for address in addresses:
                try:
                    payload = await self.transport.call(address, "join", request, timeout=10.0)
                except TransportError as error:
                    say(f"through {address}: {error}")
                    continue
                answer = msgspec.msgpack.decode(payload, type=JoinAnswer)
                if answer.refused:
                    advice = "" if answer.refused.startswith("invalid") else f". {ANOTHER_NAME}"
                    raise Unrecoverable(f"the cluster refuses this node: {answer.refused}{advice}")
                if answer.cluster_id:
                    await self._accept(answer)
                    return
            await self.stopped_within(JOIN_RETRY_S)

    async def _accept(self, answer: JoinAnswer) -> None:
        self.cluster_id, self.epoch = answer.cluster_id, answer.epoch
        self._addresses.joined, self._joined_version = answer.catalog, answer.code_version
        await self._replica.join(answer)
        _log.info("joined cluster %s", answer.cluster_id.hex())

    async def _on_join(self, peer: Peer, payload: bytes) -> bytes:
        join = msgspec.msgpack.decode(payload, type=Join)
        if self.group is None or self.boot.node not in self.group.catalog.state().nodes:
            # Ask again later. Also while a founder has not registered yet: the joining node would be given
            # the founder's replica id, and lead a second group of the same name.
            return encoded(JoinAnswer())
        assert self.cluster_id is not None
        answer = await self.service.ask(NodeRequest(join.record, join.former))
        result = answer.result
        if result is None:
            return encoded(JoinAnswer())
        if not result.ok or result.node is None:
            return encoded(JoinAnswer(refused=f"{result.outcome}: {result.detail}"))
        self._reconcile_now.set()
        replica = self.group.replica
        return encoded(
            JoinAnswer(
                cluster_id=self.cluster_id,
                replica_id=result.node.catalog_replica,
                configuration=replica.configuration_record.encoded(),
                catalog=self.state(),
                epoch=self.epoch,
                code_version=self.group.catalog.code_version,
            )
        )

    # -- reconciling the node with the catalog -------------------------------------------

    def _led_catalog(self) -> Catalog | None:
        """Return the catalog if this node leads it; None if not."""
        group = self.group
        return group.catalog if group is not None and group.replica.core.is_leader else None

    def _applied(self) -> None:
        self.service.changed()
        self._routes.changed()
        self._publisher.changed()
        if self.gossip is not None:
            self.gossip.set_seeds(self._gossip_seeds())
        self._reconcile_now.set()

    def _led(self, leading: bool) -> None:
        self.service.led(leading)
        self._routes.changed()
        self._reconcile_now.set()

    async def _remember(self) -> None:
        """Write the other controllers' addresses to disk: if one is new, and every `REMEMBER_MS`."""
        known: dict[str, Address] = {
            name: TcpAddress(record.host, record.peer_ports[0])
            for name, record in self.directory.known_nodes().items()
        }
        # A catalog that is stalled or inhibited is old: it must not replace the addresses, needed just then.
        group = self.group
        if group is None or group.stalled or self._replica.campaign_inhibited or not known:
            return
        folders = {name: folder for name in known if (folder := self.directory.folder(name)) is not None}
        now_ms = self.clock.monotonic_ms()
        same = known == self._addresses.remembered and folders == self._addresses.folders
        if same and now_ms < self._remembered_until_ms:
            return
        self._remembered_until_ms = now_ms + REMEMBER_MS
        try:
            await controller_addresses.keep(
                self.storage, group.replica.log, controller_addresses.Peers(known, folders)
            )
        except StorageError as error:
            _log.debug(
                "the addresses of the others are not written: %s", error
            )  # new addresses are written again at the next pass
        else:
            self._addresses.remembered, self._addresses.folders = known, folders

    async def _reconcile(self) -> None:
        while not self.stopping.is_set():
            self._reconcile_now.clear()
            try:
                self._replica.resume_campaigning()
                if self.view.message is not None and self.view.message.catalog_leader != self._leader():
                    self._publisher.changed()
                await self._remember()
                await self._guard.keep(self.state().nodes)
                await self._keep_folder_version()
                await self._register()
                if self._first_token is not None and self.group is not None and self._guard.confirmed:
                    await self._first_token.tidy(self.group.catalog)
                if self.group is not None:
                    await self._duties.run_pass(self.group)
            except (NotCatalogLeader, NotLeader, ConfigurationRefused, TransportError) as error:
                _log.debug("reconciling: %s", error)
            await self._reconcile_now.wait()

    async def _keep_folder_version(self) -> None:
        """Mark the data folder so that older programs refuse it, once a newer code version is enabled."""
        enabled = self.group.catalog.code_version if self.group is not None else 0
        if enabled > self.boot.folder_version:
            try:
                await self.boot.keep_folder_version(enabled)
            except StorageError as error:
                _log.debug("the data folder's format version is not written: %s", error)  # at the next pass

    async def _register(self) -> None:
        """Register this node's present addresses and the boot record of this start in the catalog."""
        group = self.group
        assert group is not None and self.cluster_id is not None
        state = group.catalog.state()
        if group.replica.core.is_leader and not state.cluster_id:
            await group.catalog.found_cluster(self.cluster_id)
        own = self._own_record()
        if state.nodes.get(self.boot.node) != own or await self._copy_stands_still():
            answer = await self.service.ask(NodeRequest(own, self._guard.former))
            if answer.result is not None and answer.result.outcome == "store_changed":
                self.fatal(Unrecoverable(f"node {self.boot.node!r}: {answer.result.detail}. {ANOTHER_NAME}"))
                return
            if answer.result is not None and answer.result.outcome == "removed":
                self.fatal(Unrecoverable(f"{answer.result.detail}. {ANOTHER_FOLDER}"))
                return
            if answer.result is not None and answer.result.outcome == "rolled_back":
                await self._end_as_older_copy(answer.result)
                return
        if self._guard.confirms(group.catalog.state().nodes.get(self.boot.node)):
            self._publisher.changed()
            self._reconcile_now.set()
        self._be_ready()

    async def _copy_stands_still(self) -> bool:
        """Return whether our copy of the catalog has not yet reached the version seen at the last check."""
        now_ms = self.clock.monotonic_ms()
        if now_ms < self._copy_checked_ms + COPY_CHECK_MS or self._leader() == self.boot.node:
            return False
        self._copy_checked_ms = now_ms
        stands_still = self.state().version < self._newest_version
        answer = await self.service.ask(ConfirmRequest([]))
        if not answer.error:
            self._newest_version = answer.version
        return stands_still

    async def _end_as_older_copy(self, result: Result) -> None:
        """Report that this node's folder is an older copy of itself, as the catalog has shown, and end."""
        report = self._guard.report(result)
        if report is not None:
            await self.service.ask(ReplicaRequest(report))
        self.fatal(Unrecoverable(f"{result.detail}. {NEWEST_COPY}"))

    def _be_ready_unconfirmed(self) -> None:
        """Serve without the catalog's confirmation of this folder, because `UNCONFIRMED_S` have passed."""
        self._patient = False
        self._be_ready()

    def _be_ready(self) -> None:
        """Give the shards their first view, from which on they accept Raft messages of other nodes.

        Do nothing until the catalog has confirmed this node's folder or `UNCONFIRMED_S` have passed. A
        confirmed view names the replicas that were abandoned while this node was away, so they stop before
        they take part (docs/consensus.md#accepting-a-loss).
        """
        if self._patient and not self._guard.confirmed:
            return
        if not self._publisher.ready and self.boot.node in self.state().nodes:
            self._publisher.ready = True
            self._publisher.changed()
            self.boot.ready()

    # -- the view that shards get --------------------------------------------------------

    def view_message(self) -> ViewMessage:
        """Return the view of the cluster (catalog and live nodes) that the shards should have now."""
        return ViewMessage(
            cluster_id=self.cluster_id or b"",
            catalog=self.state(),
            statuses=self.directory.statuses(),
            catalog_leader=self._leader(),
            boots={node: boot for node in self.state().nodes if (boot := self.known_boot(node)) is not None},
            confirmed=self._guard.confirmed,
            epoch=self.epoch,
            code_version=self.group.catalog.code_version if self.group is not None else 0,
        )

    def _leader(self) -> str:
        """Return the node that leads group 0, as far as is known here; empty if unknown."""
        return (self.group.replica.leader_node if self.group is not None else None) or ""

    # -- statistics ----------------------------------------------------------------------

    async def _on_stats(self, peer: Peer, payload: bytes) -> bytes:
        group = self.group
        core = group.replica.core if group is not None else None
        parts = {
            "storage": self.storage.statistics(),
            "raft": self.driver.statistics(),
            "transport": self.transport.statistics(),
            "tls": self.tls_statistics(),
            "secret": self.boot.secrets.statistics(),
            "loop": self.health.statistics(),
            "repair": self.repairs.statistics(),
            "catalog": {
                "term": core.term if core is not None else 0,
                "version": self.state().version,
                "voters": len(core.configuration.voters) if core is not None else 0,
            },
            "routes": self._routes.statistics(),
            "gossip": self.gossip.statistics() if self.gossip is not None else {},
        }
        return msgspec.msgpack.encode({"role": "controller", "parts": parts, "histograms": self.histograms()})


def run(boot: Boot) -> int:
    """Run the controller's process and return its exit code."""
    store = controller_store(boot.data_directory)
    return run_process(boot, store, lambda boot, storage: Controller(boot, storage=storage))
