"""Recovery of the catalog of a cluster that lost a majority of its controllers' disks, from one copy.

Run on a data folder whose node is stopped, by an operator's decision (docs/consensus.md#accepting-a-loss).
The copy of group 0 in that folder gets a configuration with itself as the only voter, and the cluster a new
*epoch*, which the folder's identity keeps and every handshake names. Nodes of different epochs do not talk.
So if the lost voters come back, no vote passes between them and the recovered cluster, and they end when they
learn of the new epoch. The epoch is written before the configuration: a crash between the two leaves a folder
that has no majority, as before.

Each other folder that survived joins the epoch (`take_into`) and keeps its partitions; its own copy of the
catalog then follows that of the first folder.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from laminar.batch import Kind, body_of, build_control, kind_of, stamp
from laminar.log.disk.disk import Disk
from laminar.log.disk.errors import DamagedRange
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.partition_log.log import Log
from laminar.log.recovery.node import controller_store, logs_directory
from laminar.log.storage import Storage
from laminar.node.consensus.raft_wire import ConfigurationRecord, configuration_record
from laminar.node.consensus.replica import TERMS_PASSED
from laminar.node.runtime.data_folder import open_stopped

_READ_BYTES = 4 << 20


class Refused(Exception):
    """This folder's catalog cannot be recovered; the text says why."""


class CatalogCopy(msgspec.Struct, frozen=True):
    """The state of one folder's copy of the catalog, by which an operator chooses the copy to recover from.

    Of several copies the best one has the highest `last_term`, then the highest `last_index`.
    """

    node: str
    cluster: str
    epoch: str
    replica: int
    voters: list[str]
    learners: list[str]
    last_term: int
    last_index: int


class StoppedNode:
    """An open folder of a node that does not run. `close` it."""

    def __init__(self, disk: Disk, directory: str) -> None:
        """Lock the folder.

        Raises:
            IdentityError: the node runs.
            StorageError: of the disk.
        """
        self._disk = disk
        self._directory = directory
        self.folder = open_stopped(disk, directory)
        if not self.folder.identity.cluster_id:
            self.folder.close()
            raise Refused(f"{directory} belongs to no cluster yet")

    def close(self) -> None:
        """Release the folder."""
        self.folder.close()

    def take_into(self, epoch: bytes) -> None:
        """Record a new epoch: this folder's node joins a cluster that was recovered from another folder.

        Raises:
            Refused: the folder is of that epoch, or a later one, already.
        """
        mine = self.folder.identity.epoch
        if epoch[:8] <= mine[:8]:
            raise Refused(f"this folder is of epoch {mine.hex() or 'none'} already, not before {epoch.hex()}")
        self.folder.record_epoch(epoch)

    async def describe(self) -> CatalogCopy:
        """Return the state of this folder's copy of the catalog.

        Raises:
            Refused: the folder has no usable copy.
        """
        async with self._catalog() as (_, entry, log, known):
            identity = self.folder.identity
            return CatalogCopy(
                node=identity.node,
                cluster=identity.cluster_id.hex(),
                epoch=identity.epoch.hex(),
                replica=entry.replica_id,
                voters=[node for _, node in known.voters],
                learners=[node for _, node in known.learners],
                last_term=log.last_term,
                last_index=log.last_index,
            )

    async def recover(self) -> bytes:
        """Make this folder's copy the cluster's catalog and return the new epoch. Durable on return.

        Raises:
            Refused: this copy can't be recovered from, or the cluster needs no recovery.
        """
        identity = self.folder.identity
        count = int.from_bytes(identity.epoch[:8]) + 1
        epoch = count.to_bytes(8) + secrets.token_bytes(8)
        async with self._catalog() as (storage, entry, log, known):
            if known.nodes().get(entry.replica_id) != identity.node:
                raise Refused(f"node {identity.node} is no member of the catalog's group: {known}")
            if known.voters == ((entry.replica_id, identity.node),):
                raise Refused("this node is the catalog's only voter: it leads by itself when it is started")
            self.folder.record_epoch(epoch)
            term = max(storage.hard_states[entry.replica_id].term, log.last_term) + TERMS_PASSED
            storage.record_hard_state(entry.replica_id, term=term, vote=entry.replica_id)
            log.append([_decision(entry, identity.node, log, term=term)])
            if log.recovering:
                log.set_recovering(recovering=False, incarnation=log.incarnation)
            await storage.sync()
        return epoch

    @asynccontextmanager
    async def _catalog(self) -> AsyncIterator[tuple[Storage, ReplicaEntry, Log, ConfigurationRecord]]:
        """Recover the controller's store; yield it with group 0's manifest entry, log and configuration."""
        store = controller_store(self._directory)
        storage = Storage.open(self._disk, store, logs_directory(self._directory))
        try:
            entry = next((each for each in storage.manifest.entries if each.topic == ""), None)
            log = storage.logs.get(storage.resolve(entry.log_id)) if entry is not None else None
            if entry is None or log is None or entry.replica_id not in storage.hard_states:
                raise Refused("this folder has no copy of the catalog that could go on")
            yield storage, entry, log, await _configuration(entry, log)
        finally:
            await storage.close()


async def _configuration(entry: ReplicaEntry, log: Log) -> ConfigurationRecord:
    """Return the newest configuration in the log, committed or not."""
    newest = ConfigurationRecord(voters=tuple((replica_id, node) for replica_id, node in entry.voters))
    index = log.first_index
    while index <= log.last_index:
        try:
            frames = await log.read(index, log.last_index, max_bytes=_READ_BYTES)
        except DamagedRange as damage:
            index = damage.last_index + 1
            continue
        for frame in frames:
            if kind_of(frame) == Kind.CONFIGURATION:
                newest = configuration_record(body_of(frame))
        index += len(frames)
    return newest


def _decision(entry: ReplicaEntry, node: str, log: Log, *, term: int) -> bytearray:
    """Return the encoded log entry that makes this replica the only voter."""
    alone = ConfigurationRecord(voters=((entry.replica_id, node),))
    frame = build_control(Kind.CONFIGURATION, alone.encoded())
    stamp(
        frame,
        index=log.last_index + 1,
        term=term,
        prev_term=log.last_term,
        base_offset=log.next_offset,
        append_time_ms=max(int(time.time() * 1000), log.last_append_time_ms),
        committed_index=log.start.index,
        opens_segment=log.segment_full or log.last_index == log.start.index,
    )
    return frame
