"""The controller: a node's process for gossip and the catalog; no data path.

It holds the node's replica of group 0, feeds the shards with a view of the cluster, and
brings the node into line with the catalog: registers it, keeps its addresses current, and,
while it leads group 0, makes voters of learners (up to three). What it learns by gossip
wakes, suggests and finds addresses; it decides nothing (CONSENSUS.md 9).
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from laminar.log.manifest import ReplicaEntry
from laminar.log.node_recovery import controller_home
from laminar.log.storage import Storage
from laminar.node.boot import Boot, Role
from laminar.node.catalog_group import CatalogGroup
from laminar.node.catalog_service import CatalogService, NodeRequest
from laminar.node.forking import Hopeless
from laminar.node.joining import Join, JoinAnswer, find_controllers
from laminar.node.process import Process, run_process
from laminar.node.replica import Replica, initial_frame
from laminar.node.transport import Address, Peer, TcpAddress, TransportError, UnixAddress
from laminar.node.view import ViewMessage
from laminar.node.wire import ConfigurationRecord
from membership.catalog import NotCatalogLeader
from membership.gossip import Gossip
from membership.records import CatalogState, NodeRecord
from raft.configuration import ConfigurationRefused
from raft.values import NotLeader

_log = logging.getLogger("laminar.controller")

MAX_CATALOG_VOTERS = 3
RECONCILE_S = 1.0
JOIN_RETRY_S = 0.2
PUSH_TIMEOUT_S = 2.0
CATALOG_NAME = "catalog"
ANOTHER_NAME = (
    "Start it on the data folder it had; if that is lost, on an empty one under a new name (--node)"
)


class Controller(Process):
    """One node's controller. `run` ends when it is stopped or can't go on."""

    def __init__(self, boot: Boot, *, storage: Storage) -> None:
        super().__init__(boot, storage=storage)
        self.group: CatalogGroup | None = None
        self.service = CatalogService(self)
        self.gossip: Gossip | None = None
        self._bootstrap = CatalogState()
        self._reconcile_now = asyncio.Event()
        self._view_number = 0
        self._view_changed = asyncio.Condition()
        self._ready = False
        self.methods = {
            "catalog": lambda peer, payload: self.service.handle(payload),
            "join": self._on_join,
            "view": self._on_view,
            "stats": self._on_stats,
        }

    # -- addresses -----------------------------------------------------------------------

    def state(self) -> CatalogState:
        """The catalog as this node has it; before its own copy says more, what it joined with."""
        state = self.group.catalog.state() if self.group is not None else CatalogState()
        return state if state.version > 0 else self._bootstrap

    def controller_address(self, node: str) -> Address | None:
        """Where a node's controller listens for its peers."""
        record = self.state().nodes.get(node)
        return TcpAddress(record.host, record.peer_ports[0]) if record is not None else None

    def address_of(self, node: str, replica: Replica) -> Address | None:
        """See Process."""
        return self.controller_address(node)

    def placement_weights(self) -> dict[str, float]:
        """Nodes that new replicas may be placed on: known to the catalog and not seen dead."""
        statuses = self._statuses()
        return {
            name: record.weight
            for name, record in self.state().nodes.items()
            if record.weight > 0 and statuses.get(name, "unknown") in ("alive", "suspect")
        }

    def _statuses(self) -> dict[str, str]:
        statuses = {self.boot.node: "alive"}
        if self.gossip is not None:
            own = self.cluster_id.hex() if self.cluster_id is not None else ""
            for name, member in self.gossip.members().items():
                if member.info.get("cluster") == own:
                    statuses.setdefault(name, member.status)
        return statuses

    # -- life ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until stopped."""
        await self.listen()
        if self.boot.cluster_id is not None:
            await self._open_group()
        else:
            await self._join()
        if self.cluster_id is None:
            await self.close()  # told to stop before any member answered
            return
        self._start_gossip()
        for role in self.boot.siblings:
            if role != self.boot.role:
                self.spawn(self._push_view(role))
        self.spawn(self._reconcile())
        await self.stopping.wait()
        if self.gossip is not None:
            await self.gossip.close()
        await self.close()

    async def _open_group(self) -> None:
        entry = next((entry for entry in self.storage.manifest.entries if entry.topic == ""), None)
        if entry is None:
            if not self.boot.founding:
                raise Hopeless(
                    f"this node's part of the catalog is gone from its data folder. {ANOTHER_NAME}"
                )
            entry = await self._found()
        if self.boot.founding:
            # Also when a crash came between the two: from now on an empty folder is a loss, not a beginning.
            assert self.cluster_id is not None
            await self.boot.join_cluster(self.cluster_id)
            _log.info("a new cluster: %s", self.cluster_id.hex())
        await self._start_group(entry)

    async def _found(self) -> ReplicaEntry:
        """Make group 0 of a new cluster: this node is its only voter until others join."""
        assert self.cluster_id is not None
        record = ConfigurationRecord(voters=((1, self.boot.node),))
        log = self.storage.create_log(CATALOG_NAME)
        entry = self._catalog_entry(log.log_id, replica_id=1, record=record)
        created_ms = self.clock.wall_ms()
        log.append([initial_frame(record, created_ms=created_ms)])
        self.storage.record_hard_state(1, term=1, vote=0)
        await self.storage.sync()
        await self.storage.write_manifest([entry])
        return entry

    def _catalog_entry(self, log_id: int, *, replica_id: int, record: ConfigurationRecord) -> ReplicaEntry:
        assert self.cluster_id is not None
        return ReplicaEntry(
            log_id=log_id,
            replica_id=replica_id,
            incarnation=1,
            group=self.cluster_id,
            topic="",
            partition=0,
            partition_hash=0,
            state="made",
            created_ms=self.clock.wall_ms(),
            voters=list(record.voters),
            settings={},
        )

    async def _start_group(self, entry: ReplicaEntry) -> None:
        log = self.storage.logs.get(self.storage.resolve(entry.log_id))
        voted = entry.replica_id not in self.storage.lost_hard_states
        if log is None or log.recovering or not voted:
            # It may have voted or acknowledged what it does not know of any more (CONSENSUS.md 2 and 3).
            raise Hopeless(f"this node's part of the catalog is damaged. {ANOTHER_NAME}")
        group = CatalogGroup(
            driver=self.driver,
            log=log,
            on_applied=self._applied,
            on_led=lambda leading: self._reconcile_now.set(),
            on_failed=self.fatal,
        )
        replica = await self.open_replica(entry, name=CATALOG_NAME, machine=group)
        group.replica = replica
        self.group = group
        group.committed(replica.core.committed_index)
        await group.applied(replica.core.committed_index)
        self.driver.add(replica)
        if replica.configuration.voters == (replica.replica_id,):
            self.driver.campaign(replica)

    def _start_gossip(self) -> None:
        assert self.boot.gossip is not None and self.cluster_id is not None
        addresses = self.boot.addresses
        secret = self.boot.settings.secret
        self.gossip = Gossip(
            sock=self.boot.gossip,
            node=self.boot.node,
            address=f"{addresses.host}:{addresses.gossip_port}",
            secret=secret.encode() if secret else None,
            info={"cluster": self.cluster_id.hex(), "shards": self.boot.shards},
            rng=self.rng,
        )
        self.gossip.on_change = lambda member: self._changed()
        self.gossip.start(self._gossip_seeds())

    def _gossip_seeds(self) -> list[str]:
        return [
            f"{record.host}:{record.gossip_port}"
            for name, record in self.state().nodes.items()
            if name != self.boot.node
        ]

    # -- joining -------------------------------------------------------------------------

    def _own_record(self) -> NodeRecord:
        addresses = self.boot.addresses
        known = self.state().nodes.get(self.boot.node)
        return NodeRecord(
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
        )

    def _catalog_replica(self, known: NodeRecord | None) -> int:
        """This node's replica id in group 0; 0 asks the catalog for one."""
        if known is not None:
            return known.catalog_replica
        return self.group.replica.replica_id if self.group is not None else 0

    async def _join(self) -> None:
        """Ask a member of the cluster for a place in it, until one answers."""
        request = msgspec.msgpack.encode(Join(record=self._own_record()))
        said = ""
        while not self.stopping.is_set():
            addresses = await find_controllers(self.boot.settings.join)
            if not addresses and not said:
                said = "nobody answers"
                _log.warning("joining: nobody answers at %s; asking on", ", ".join(self.boot.settings.join))
            for address in addresses:
                try:
                    payload = await self.transport.call(address, "join", request, timeout=10.0)
                except TransportError as error:
                    if str(error) != said:
                        said = str(error)
                        _log.warning("joining through %s: %s", address, said)
                    continue
                answer = msgspec.msgpack.decode(payload, type=JoinAnswer)
                if answer.refused:
                    raise Hopeless(f"the cluster refuses this node: {answer.refused}. {ANOTHER_NAME}")
                if answer.cluster_id:
                    await self._accept(answer)
                    return
            await self.stopped_within(JOIN_RETRY_S)

    async def _accept(self, answer: JoinAnswer) -> None:
        self.cluster_id = answer.cluster_id
        self._bootstrap = answer.catalog
        record = msgspec.msgpack.decode(answer.configuration, type=ConfigurationRecord)
        log = self.storage.create_log(CATALOG_NAME)
        entry = self._catalog_entry(log.log_id, replica_id=answer.replica_id, record=record)
        await self.storage.sync()  # a manifest never names a log that the journal does not know
        await self.storage.write_manifest([entry])
        await self.boot.join_cluster(answer.cluster_id)
        await self._start_group(entry)
        _log.info("joined cluster %s", answer.cluster_id.hex())

    async def _on_join(self, peer: Peer, payload: bytes) -> bytes:
        join = msgspec.msgpack.decode(payload, type=Join)
        if self.group is None or self.cluster_id is None:
            return msgspec.msgpack.encode(JoinAnswer())
        answer = await self.service.ask(NodeRequest(join.record))
        result = answer.result
        if result is None:
            return msgspec.msgpack.encode(JoinAnswer())
        if not result.ok or result.node is None:
            return msgspec.msgpack.encode(JoinAnswer(refused=f"{result.outcome}: {result.detail}"))
        self._reconcile_now.set()
        replica = self.group.replica
        return msgspec.msgpack.encode(
            JoinAnswer(
                cluster_id=self.cluster_id,
                replica_id=result.node.catalog_replica,
                configuration=self._configuration_record(replica).encoded(),
                catalog=self.state(),
            )
        )

    # -- keeping the node in line --------------------------------------------------------

    def _applied(self) -> None:
        self.service.changed()
        self._changed()
        if self.gossip is not None:
            self.gossip.set_seeds(self._gossip_seeds())
        self._reconcile_now.set()

    async def _reconcile(self) -> None:
        while not self.stopping.is_set():
            self._reconcile_now.clear()
            try:
                await self._register()
                self._change_voters()
            except (NotCatalogLeader, NotLeader, ConfigurationRefused, TransportError) as error:
                _log.debug("reconciling: %s", error)
            try:
                async with asyncio.timeout(RECONCILE_S):
                    await self._reconcile_now.wait()
            except TimeoutError:
                pass

    async def _register(self) -> None:
        """Make the catalog say where this node really is."""
        group = self.group
        assert group is not None and self.cluster_id is not None
        state = group.catalog.state()
        if group.replica.core.is_leader and not state.cluster_id:
            await group.catalog.found_cluster(self.cluster_id)
        if state.nodes.get(self.boot.node) != self._own_record():
            answer = await self.service.ask(NodeRequest(self._own_record()))
            if answer.result is not None and answer.result.outcome == "store_changed":
                self.fatal(Hopeless(f"node {self.boot.node!r}: {answer.result.detail}. {ANOTHER_NAME}"))
                return
        if not self._ready and self.boot.node in self.state().nodes:
            self._ready = True
            self._changed()
            self.boot.ready()

    def _configuration_record(self, replica: Replica) -> ConfigurationRecord:
        nodes = replica.nodes
        configuration = replica.configuration
        return ConfigurationRecord(
            voters=tuple((member, nodes[member]) for member in configuration.voters),
            learners=tuple((member, nodes[member]) for member in configuration.learners),
        )

    def _change_voters(self) -> None:
        """As the leader of group 0: every node follows it, up to three vote. One step at a time."""
        group = self.group
        assert group is not None
        replica = group.replica
        if not replica.core.is_leader or group.committed_index < replica.log.last_index:
            return  # a step is taken when all before it is committed; the next tick looks again
        record = self._configuration_record(replica)
        members = set(replica.configuration.members())
        for node in group.catalog.state().nodes.values():
            if node.catalog_replica not in members:
                learner = (node.catalog_replica, node.node)
                self._propose(replica, ConfigurationRecord(record.voters, (*record.learners, learner)))
                return
        if len(record.voters) >= MAX_CATALOG_VOTERS:
            return
        for learner in record.learners:
            if replica.match_index(learner[0]) >= group.committed_index:
                others = tuple(other for other in record.learners if other != learner)
                self._propose(replica, ConfigurationRecord((*record.voters, learner), others))
                return

    def _propose(self, replica: Replica, record: ConfigurationRecord) -> None:
        self.driver.propose_configuration(replica, record)
        _log.info("catalog voters %s, learners %s", record.voters, record.learners)
        asyncio.get_running_loop().call_later(0.02, self._reconcile_now.set)

    # -- the view that shards get --------------------------------------------------------

    def _changed(self) -> None:
        self._view_number += 1
        self.view.message = self._message()

        async def notify() -> None:
            async with self._view_changed:
                self._view_changed.notify_all()

        self.spawn(notify())

    def _message(self) -> ViewMessage:
        leader = self.group.replica.leader_node if self.group is not None else None
        return ViewMessage(
            cluster_id=self.cluster_id or b"",
            catalog=self.state(),
            statuses=self._statuses(),
            catalog_leader=leader or "",
        )

    async def _on_view(self, peer: Peer, payload: bytes) -> bytes:
        return msgspec.msgpack.encode(self._message()) if self._ready else b""

    async def _push_view(self, role: Role) -> None:
        """Bring one shard up to date, now and whenever something changes."""
        address = UnixAddress(self.boot.unix_name(role))
        pushed = -1
        while True:
            async with self._view_changed:
                while not self._ready or self._view_number == pushed:
                    await self._view_changed.wait()
                number = self._view_number
            try:
                payload = msgspec.msgpack.encode(self._message())
                await self.transport.call(address, "view", payload, timeout=PUSH_TIMEOUT_S)
                pushed = number
            except TransportError:
                await asyncio.sleep(JOIN_RETRY_S)  # the shard is starting; it asks by itself too

    # -- statistics ----------------------------------------------------------------------

    async def _on_stats(self, peer: Peer, payload: bytes) -> bytes:
        group = self.group
        core = group.replica.core if group is not None else None
        return msgspec.json.encode(
            {
                "role": "controller",
                "storage": self.storage.statistics(),
                "catalog": {
                    "term": core.term if core is not None else 0,
                    "leader": core.is_leader if core is not None else False,
                    "version": self.state().version,
                    "voters": len(core.configuration.voters) if core is not None else 0,
                },
                "gossip": dict(self._statuses()),
            }
        )


def run(boot: Boot) -> int:
    """The controller's process."""
    home = controller_home(boot.data_directory)
    return run_process(boot, home, lambda boot, storage: Controller(boot, storage=storage))
