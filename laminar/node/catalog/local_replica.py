"""This node's replica of group 0 (the catalog): its creation, its opening, its exclusion from elections.

A founder creates it with itself as the only voter, a joining node as the cluster's answer says; later starts
open it. A node can't serve without this replica, so a start waits until damage in its log is repaired from
the other controllers. Their addresses may be in the damaged part, so there are other ways to find them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from laminar.batch import Kind
from laminar.log.disk.errors import DamagedRange
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.partition_log.log import Log
from laminar.log.storage import Storage
from laminar.node.catalog import controller_addresses
from laminar.node.catalog.group import CatalogGroup
from laminar.node.consensus.driver import Driver
from laminar.node.consensus.peer_repair import PeerRepair
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.consensus.replica import Replica, initial_frame
from laminar.node.host.clock import Clock
from laminar.node.host.fork import Unrecoverable
from laminar.node.runtime.boot import Boot
from laminar.node.runtime.join import JoinAnswer
from laminar.node.runtime.replica_factory import BadTerm, ReplicaFactory, recovering_text
from membership.replicated import UnknownCodeVersion

_log = logging.getLogger("laminar.controller")

MEND_CHECK_S = 1.0
CATALOG_NAME = "catalog"
ANOTHER_NAME = (
    "Start it on the data folder it had; if that is lost, on an empty one under a new name (--node)"
)


class LocalReplica:
    """Opens, creates and stops this node's replica of group 0; `group` is None until the replica is open.

    `on_applied`, `on_led` and `on_match` say that the catalog changed, that this replica began or ceased to
    lead, and that a member acknowledged more; `on_fatal` ends the process.
    """

    def __init__(
        self,
        boot: Boot,
        *,
        addresses: controller_addresses.AddressBook,
        clock: Clock,
        storage: Storage,
        driver: Driver,
        repairs: PeerRepair,
        factory: ReplicaFactory,
        stopping: asyncio.Event,
        on_applied: Callable[[], None],
        on_led: Callable[[bool], None],
        on_match: Callable[[], None],
        on_fatal: Callable[[Exception], None],
    ) -> None:
        self._boot = boot
        self._addresses = addresses
        self._clock = clock
        self._storage = storage
        self._driver = driver
        self._repairs = repairs
        self._factory = factory
        self._stopping = stopping
        self._on_applied = on_applied
        self._on_led = on_led
        self._on_match = on_match
        self._on_fatal = on_fatal
        self.group: CatalogGroup | None = None
        # The replica must not campaign, because it has forgotten that its group has other members.
        self.campaign_inhibited = False
        # Why the replica has stopped; None while it runs.
        self.failure: Exception | None = None
        self._is_driven = False

    async def open(self) -> None:
        """Open the replica in the data folder, or found a new cluster.

        Raises:
            Unrecoverable: the folder has no usable replica of the catalog.
        """
        entry = next((entry for entry in self._storage.manifest.entries if entry.topic == ""), None)
        if entry is None:
            if not self._boot.founding:
                raise Unrecoverable(
                    f"this node's part of the catalog is gone from its data folder. {ANOTHER_NAME}"
                )
            entry = await self._found()
        if self._boot.founding:
            # Also if a crash came after the replica was made and before this. From now on a folder without
            # the replica has lost it, and may not found the cluster again.
            assert self._boot.cluster_id is not None
            await self._boot.join_cluster(self._boot.cluster_id, self._boot.epoch)
            _log.info("a new cluster: %s", self._boot.cluster_id.hex())
        await self._start(entry)

    async def join(self, answer: JoinAnswer) -> None:
        """Create the replica that the cluster has assigned to this node in its answer."""
        record = msgspec.msgpack.decode(answer.configuration, type=ConfigurationRecord)
        log = self._storage.create_log(CATALOG_NAME)
        entry = self._entry(log.log_id, answer.cluster_id, replica_id=answer.replica_id, record=record)
        await self._storage.sync()  # a manifest never names a log that the journal does not know
        await self._storage.write_manifest([entry])
        await self._boot.join_cluster(answer.cluster_id, answer.epoch)
        await self._start(entry)

    async def _found(self) -> ReplicaEntry:
        """Make group 0 of a new cluster: this node is its only voter until others join."""
        assert self._boot.cluster_id is not None
        record = ConfigurationRecord(voters=((1, self._boot.node),))
        log = self._storage.create_log(CATALOG_NAME)
        entry = self._entry(log.log_id, self._boot.cluster_id, replica_id=1, record=record)
        created_ms = self._clock.wall_ms()
        log.append([initial_frame(record, created_ms=created_ms)])
        self._storage.record_hard_state(1, term=1, vote=0)
        await self._storage.sync()
        await self._storage.write_manifest([entry])
        return entry

    def _entry(
        self, log_id: int, group: bytes, *, replica_id: int, record: ConfigurationRecord
    ) -> ReplicaEntry:
        return ReplicaEntry(
            log_id=log_id,
            replica_id=replica_id,
            incarnation=1,
            group=group,
            topic="",
            partition=0,
            partition_hash=0,
            state="made",
            created_ms=self._clock.wall_ms(),
            voters=list(record.voters),
            settings={},
        )

    async def _start(self, entry: ReplicaEntry) -> None:
        log = self._storage.logs.get(self._storage.resolve(entry.log_id))
        if log is None or promises_are_lost(self._storage, entry, log):
            # It may have given votes and acknowledgements that it has forgotten
            # (docs/consensus.md#identities).
            raise Unrecoverable(f"this node's part of the catalog is damaged. {ANOTHER_NAME}")
        if log.recovering:
            _log.warning("%s", recovering_text(CATALOG_NAME, log))
        remembered = controller_addresses.read(log)
        self._addresses.remembered, self._addresses.folders = remembered.addresses, remembered.folders
        had_others = self._boot.has_peers or any(
            node != self._boot.node for node in self._addresses.remembered
        )
        self._repairs.keep(entry, log)
        group = CatalogGroup(
            driver=self._driver,
            log=log,
            on_applied=self._on_applied,
            on_led=self._on_led,
            on_failed=self._failed,
            wait_for_repair=lambda: self._repairs.wait_for_progress(entry.group),
        )
        replica = await self._open_replica(entry, log, group)
        if replica is None:
            return
        group.replica = replica
        # Waiters for contact with a node check again after each message.
        replica.on_match = self._on_match
        self.group = group
        group.committed(replica.core.committed_index)
        await group.applied_or_stalled(replica.core.committed_index)
        if group.stalled:
            await self._seek_others()
        if had_others and _forgot_others(replica):
            _log.warning(
                "this node's catalog has forgotten which nodes joined it; it waits until one of them leads"
            )
            self.campaign_inhibited = True
            replica.core.inhibit_campaign(True, now_ms=self._clock.monotonic_ms())
        self._is_driven = True
        self._driver.add(replica)
        self._repairs.attach_replica(replica)
        if replica.configuration.voters == (replica.replica_id,):
            self._driver.campaign(replica)

    def _failed(self, error: Exception) -> None:
        """Stop the replica after a failure of its log, or a bug; gossip and views go on.

        The log is recovered by a restart of the controller (`laminar.node.host.failed_logs`). A failure
        before the replica was driven ends the process.
        """
        if isinstance(error, UnknownCodeVersion):
            # A restart of the same program would stop at the same entry.
            self._on_fatal(Unrecoverable(str(error)))
            return
        if self.group is None or (self.failure is None and not self._is_driven):
            self._on_fatal(error)  # the replica was not fully opened yet
            return
        self.failure = error
        self._driver.stop_replica(self.group.replica, error)

    async def _open_replica(self, entry: ReplicaEntry, log: Log, group: CatalogGroup) -> Replica | None:
        """Return the replica of group 0, after waiting for repairs; None if the process is to stop before.

        Raises:
            Unrecoverable: the durable term is out of range.
            DamagedRange: a needed entry is damaged, and no other controller can be found.
        """
        while not self._stopping.is_set():
            try:
                return await self._factory.open(
                    entry,
                    name=CATALOG_NAME,
                    machine=group,
                    # A damaged command can be applied later, once repaired. A configuration is needed now: it
                    # says which replicas vote.
                    past_damage=lambda index: log.index_entry(index).kind in (Kind.COMMAND, Kind.NOOP),
                )
            except BadTerm as error:
                raise Unrecoverable(f"{error}. {ANOTHER_NAME}") from error
            except DamagedRange:
                if not self._addresses.remembered and not self._boot.settings.join:
                    raise
                await self._seek_others()
            try:
                async with asyncio.timeout(MEND_CHECK_S):
                    await self._repairs.wait_for_progress(entry.group)
            except TimeoutError:
                continue
        return None

    async def _seek_others(self) -> None:
        """Find controllers through `--join`, unless some are remembered: the damaged catalog names none."""
        if not self._addresses.remembered:
            found = await self._boot.environment.find_controllers(
                self._boot.settings.join,
                secrets=self._boot.secrets,
                certificates=self._boot.certificates,
            )
            self._addresses.remembered = {str(address): address for address in found}

    def resume_campaigning(self) -> None:
        """Let a barred replica campaign again if a leader has sent it a configuration with other members."""
        group = self.group
        if group is not None and self.campaign_inhibited and not _forgot_others(group.replica):
            self.campaign_inhibited = False
            group.replica.core.inhibit_campaign(False, now_ms=self._clock.monotonic_ms())
            self._driver.process_ready(group.replica)


def _forgot_others(replica: Replica) -> bool:
    """Return whether the replica lost the end of its log, and is the only voter by the remaining entries.

    A founder's log begins with one voter. If others have joined since, no other replica would be asked
    whether this log is the latest (`laminar.node.consensus.lost_majority`), and it would lead a second group
    of the same name.
    """
    return replica.core.recovering and replica.configuration.voters == (replica.replica_id,)


def promises_are_lost(storage: Storage, entry: ReplicaEntry, log: Log) -> bool:
    """Return whether a replica of group 0 may have forgotten votes or acknowledgements that it gave."""
    if entry.replica_id in storage.lost_hard_states:
        return True
    # A learner that has just joined also has no entries or no term, but its log is not marked as recovering.
    empty = entry.replica_id not in storage.hard_states or log.last_index == log.start.index
    return log.recovering and empty
