"""A shard: one event loop on one CPU core, with the partitions it owns.

It serves HTTP (on the shared port and on its own), drives its partitions' replicas, makes
new ones when the catalog says so, and passes on what belongs to others. It shares nothing
with other shards but the node's data folder, where each has its own home.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from laminar.http.errors import Problem
from laminar.http.server import HttpServer, ServerLimits
from laminar.log.disk import RealDisk
from laminar.log.document import Document
from laminar.log.errors import StorageClosed, StorageError
from laminar.log.manifest import ReplicaEntry
from laminar.log.node_recovery import Map, shard_home
from laminar.log.storage import Storage
from laminar.node.api.app import Api
from laminar.node.boot import CONTROLLER, Boot
from laminar.node.catalog_service import (
    CatalogAnswer,
    CatalogRequest,
    ConfirmRequest,
    MadeRequest,
    RemovedRequest,
    decode_answer,
    encode_request,
)
from laminar.node.partition import Partition
from laminar.node.process import Process, run_process
from laminar.node.replica import Replica, initial_frame
from laminar.node.transport import Address, Peer, TransportError, UnixAddress
from laminar.node.view import ViewMessage
from laminar.node.wire import ConfigurationRecord
from membership.records import PartitionRecord
from router import owner_shard, partition_hash

_log = logging.getLogger("laminar.shard")

CATALOG_TIMEOUT_S = 25.0
RETRY_S = 0.2
HAND_OVER_S = 1.0
VIEW_WAIT_S = 2.0
FIRST_TERM = 1

_view_decoder = msgspec.msgpack.Decoder(ViewMessage)


class Shard(Process):
    """One shard of a node. `run` ends when it is stopped or can't go on."""

    def __init__(self, boot: Boot, *, storage: Storage) -> None:
        super().__init__(boot, storage=storage)
        assert isinstance(boot.role, int)
        self.number = boot.role
        self.partitions: dict[tuple[str, int], Partition] = {}
        self.lost: list[ReplicaEntry] = []
        self._by_group: dict[bytes, Partition] = {}
        self._bringing_in_line = asyncio.Event()
        self._opened = False
        self._view_changed: list[asyncio.Future[None]] = []
        self._stood: set[bytes] = set()
        self._ready = False
        self.api = Api(self)
        self.http = HttpServer(self.api, ServerLimits(max_body_bytes=self.api.limits.max_body_bytes))
        self.methods = {"view": self._on_view}
        self.methods |= self.api.methods

    # -- life ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until stopped."""
        await self.listen()
        if self.cluster_id is None:
            await self._first_view()
        if self.stopping.is_set():
            await self.close()
            return
        await self._open_replicas()
        servers = []
        loop = asyncio.get_running_loop()
        for sock in (self.boot.http_shared, self.boot.http_own):
            if sock is not None:
                duplicate = sock.dup()  # a loop closes its server's socket; the supervisor's order stays
                duplicate.setblocking(False)
                servers.append(
                    await loop.create_server(self.http.protocol_factory, sock=duplicate, backlog=1024)
                )
        if not self.view.version:
            await self._first_view()
        self.spawn(self._keep_in_line())
        await self.stopping.wait()
        for server in servers:
            server.close()
        for partition in self.partitions.values():
            partition.stop_waiting()
        await self.driver.hand_over(timeout_s=HAND_OVER_S)
        await self.http.drain(timeout_s=self.boot.settings.drain_ms / 1000)
        await self.close()

    async def _first_view(self) -> None:
        """Wait for the controller to say what the cluster looks like: pushed to us, or asked for here."""
        address = UnixAddress(self.boot.unix_name(CONTROLLER))
        while self.view.message is None and not self.stopping.is_set():
            try:
                payload = await self.transport.call(address, "view", b"", timeout=2.0)
                if payload:
                    self._take_view(payload)
                    return
            except TransportError:
                pass
            await self.stopped_within(RETRY_S / 4)

    # -- the view ------------------------------------------------------------------------

    async def _on_view(self, peer: Peer, payload: bytes) -> bytes:
        self._take_view(payload)
        return b""

    def _take_view(self, payload: bytes) -> None:
        message = _view_decoder.decode(payload)
        if message.catalog.version < self.view.version:
            return
        self.view.message = message
        if self.cluster_id is None:
            self.cluster_id = message.cluster_id
        if not self._ready and self.boot.node in message.catalog.nodes:
            self._ready = True
            self.boot.ready()
        waiting, self._view_changed = self._view_changed, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
        self._bringing_in_line.set()

    async def refresh_view(self) -> None:
        """Return once the view is at least as new as the catalog was when this was called.

        A view may be old, so what is missing in it may exist all the same. Raises `Problem` while the
        catalog has no leader: then nobody can say.
        """
        try:
            answer = await self.ask_catalog(ConfirmRequest([]))
        except TransportError as error:
            raise Problem("no_leader", f"the catalog cannot be asked: {error}") from error
        if answer.error:
            raise Problem("no_leader", "the catalog has no leader now")
        loop = asyncio.get_running_loop()
        deadline = loop.time() + VIEW_WAIT_S
        while self.view.version < answer.version and loop.time() < deadline:
            await self.view_change(deadline - loop.time())

    @property
    def ready(self) -> bool:
        """Whether this shard knows its cluster and has opened its replicas."""
        return self._ready and self._opened

    async def view_change(self, timeout_s: float) -> bool:
        """Wait until the controller sends another view."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._view_changed.append(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        except TimeoutError:
            return False
        finally:
            if future in self._view_changed:
                self._view_changed.remove(future)
        return True

    # -- replicas ------------------------------------------------------------------------

    def address_of(self, node: str, replica: Replica) -> Address | None:
        """See Process."""
        machine = self._by_group.get(replica.group)
        if machine is None:
            return None
        return self.view.partition_address(node, machine.topic, machine.number)

    async def _open_replicas(self) -> None:
        """Open what the manifest names. One in `making` never sent a message: it is made anew."""
        entries = self.storage.manifest.entries
        unfinished = [entry for entry in entries if entry.state == "making"]
        if unfinished:
            for entry in unfinished:
                if entry.log_id in self.storage.logs:
                    await self.storage.delete_log(entry.log_id)
            await self.storage.write_manifest([entry for entry in entries if entry.state != "making"])
        for entry in self.storage.manifest.entries:
            await self._open(entry)
        for partition in self.partitions.values():
            replica = partition.replica
            if replica.configuration.voters == (replica.replica_id,):
                self.driver.campaign(replica)  # nobody else could: there is nothing to wait for
        self._opened = True

    async def _open(self, entry: ReplicaEntry) -> None:
        log = self.storage.logs.get(self.storage.resolve(entry.log_id))
        voted = entry.replica_id in self.storage.hard_states
        sure = voted and entry.replica_id not in self.storage.lost_hard_states
        if log is None or log.last_index == log.start.index or not sure:
            # In the manifest, but its files are gone: it may have voted and promised. It stays away.
            self.lost.append(entry)
            _log.error("%s/%d: this replica is lost, its files are missing", entry.topic, entry.partition)
            return
        if log.recovering:
            # It may have forgotten what it told others; until it can be brought back with a higher
            # incarnation it must not take part (CONSENSUS.md 3).
            self.lost.append(entry)
            _log.error("%s/%d: this replica's journal or tail is damaged", entry.topic, entry.partition)
            return
        partition = Partition(
            topic=entry.topic,
            number=entry.partition,
            driver=self.driver,
            log=log,
            refusal=lambda: self.storage.refusal,
        )
        name = f"{entry.topic}/{entry.partition}"
        try:
            replica = await self.open_replica(entry, name=name, machine=partition)
        except StorageError as error:
            # One log that cannot be read stays away alone; the shard's others serve.
            self.lost.append(entry)
            _log.error("%s: this replica is damaged: %s", name, error)
            return
        partition.replica = replica
        partition.committed(replica.core.committed_index)
        self.partitions[(entry.topic, entry.partition)] = partition
        self._by_group[entry.group] = partition
        self.driver.add(replica)

    async def _keep_in_line(self) -> None:
        """Make and remove replicas as the catalog says, whenever a view comes."""
        while True:
            await self._bringing_in_line.wait()
            self._bringing_in_line.clear()
            try:
                await self._make_missing()
                await self._remove_deleted()
            except TransportError as error:
                _log.debug("the catalog cannot be asked now: %s", error)
                asyncio.get_running_loop().call_later(RETRY_S, self._bringing_in_line.set)
            self._stand_where_first()

    def _mine(self, record: PartitionRecord) -> bool:
        return owner_shard(partition_hash(record.topic, record.number), self.boot.shards) == self.number

    async def ask_catalog(self, request: CatalogRequest) -> CatalogAnswer:
        """Ask the catalog's leader through this node's controller. Raises TransportError."""
        address = UnixAddress(self.boot.unix_name(CONTROLLER))
        payload = await self.transport.call(
            address, "catalog", encode_request(request), timeout=CATALOG_TIMEOUT_S
        )
        return decode_answer(payload)

    async def _make_missing(self) -> None:
        wanted: list[tuple[PartitionRecord, int]] = []
        for record in self.view.partitions().values():
            if record.state != "creating" or not self._mine(record):
                continue
            for replica in record.replicas:
                own = replica.node == self.boot.node and replica.store_id == self.boot.store_id
                if own and not replica.made:
                    wanted.append((record, replica.replica_id))
        if not wanted:
            return
        held = {entry.group: entry for entry in self.storage.manifest.entries}
        new = [(record, replica_id) for record, replica_id in wanted if record.group not in held]
        if new:
            # The copy of the catalog in the view passes through old states; only the leader's
            # confirmed word lets a replica be born (CONSENSUS.md 9).
            answer = await self.ask_catalog(ConfirmRequest([record.group for record, _ in new]))
            creating = set(answer.creating)
            await self._make([(record, replica) for record, replica in new if record.group in creating])
        made = {entry.group for entry in self.storage.manifest.entries if entry.state == "made"}
        groups = [record.group for record, _ in wanted if record.group in made]
        if groups:
            answer = await self.ask_catalog(MadeRequest(self.boot.node, self.boot.store_id, groups))
            if answer.error:
                asyncio.get_running_loop().call_later(RETRY_S, self._bringing_in_line.set)

    async def _make(self, new: Sequence[tuple[PartitionRecord, int]]) -> None:
        """`making` in the manifest, then the log with entry 1, then `made`; only then may a message leave."""
        if not new:
            return
        entries: list[ReplicaEntry] = []
        for record, replica_id in new:
            topic = self.view.topics().get(record.topic)
            log = self.storage.create_log(f"{record.topic}-{record.number}")
            entries.append(
                ReplicaEntry(
                    log_id=log.log_id,
                    replica_id=replica_id,
                    incarnation=1,
                    group=record.group,
                    topic=record.topic,
                    partition=record.number,
                    partition_hash=partition_hash(record.topic, record.number),
                    state="making",
                    created_ms=record.created_ms,
                    voters=[(replica.replica_id, replica.node) for replica in record.replicas],
                    settings=dict(topic.settings) if topic is not None else {},
                )
            )
        kept = self.storage.manifest.entries
        await self.storage.write_manifest([*kept, *entries])
        for entry in entries:
            first = initial_frame(
                ConfigurationRecord(voters=tuple((member, node) for member, node in entry.voters)),
                created_ms=entry.created_ms,
            )
            self.storage.logs[entry.log_id].append([first])
            self.storage.record_hard_state(entry.replica_id, term=FIRST_TERM, vote=0)
        await self.storage.sync()
        for entry in entries:
            entry.state = "made"
        await self.storage.write_manifest([*kept, *entries])
        for entry in entries:
            await self._open(entry)

    def _stand_where_first(self) -> None:
        """The first replica of a partition that has just become live stands for election at once."""
        for record in self.view.partitions().values():
            if record.state != "live" or record.group in self._stood:
                continue
            partition = self._by_group.get(record.group)
            if partition is None:
                continue
            self._stood.add(record.group)
            core = partition.replica.core
            fresh = core.term == FIRST_TERM and not core.leader_id
            if fresh and record.replicas[0].node == self.boot.node:
                self.driver.campaign(partition.replica)

    async def _remove_deleted(self) -> None:
        """Data goes only on an explicit tombstone that the catalog's leader confirms, and to the trash."""
        if self.view.message is None:
            return
        stones = self.view.message.catalog.tombstones
        candidates = [entry for entry in self.storage.manifest.entries if entry.group.hex() in stones]
        reported = [
            bytes.fromhex(group)
            for group, stone in stones.items()
            if owner_shard(partition_hash(stone.topic, stone.number), self.boot.shards) == self.number
            and any(replica.node == self.boot.node for replica in stone.replicas)
        ]
        if not reported:
            return
        answer = await self.ask_catalog(ConfirmRequest(reported))
        deleted = set(answer.deleted)
        gone = [entry for entry in candidates if entry.group in deleted]
        for entry in gone:
            self.driver.remove(entry.group, StorageClosed(f"topic {entry.topic!r} is deleted"))
            partition = self._by_group.pop(entry.group, None)
            if partition is None:
                continue
            # A topic of the same name may have been made since: what has its place now stays.
            if self.partitions.get((entry.topic, entry.partition)) is partition:
                del self.partitions[(entry.topic, entry.partition)]
        if gone:
            remaining = [entry for entry in self.storage.manifest.entries if entry not in gone]
            await self.storage.write_manifest(remaining)
            for entry in gone:
                if entry.log_id in self.storage.logs:
                    await self.storage.delete_log(entry.log_id)
        if deleted:
            await self.ask_catalog(RemovedRequest(self.boot.node, self.boot.store_id, sorted(deleted)))


def run(boot: Boot) -> int:
    """The shard's process."""
    assert isinstance(boot.role, int)
    payload = Document(RealDisk(), boot.data_directory, "map").read()
    assert payload is not None, f"no map of shards in {boot.data_directory}: recovery comes first"
    home = shard_home(boot.data_directory, msgspec.msgpack.decode(payload, type=Map), boot.role)
    return run_process(boot, home, lambda boot, storage: Shard(boot, storage=storage))
