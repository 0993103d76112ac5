"""Snapshots of a partition's derived state, stored beside its log, so that a start replays only what follows.

A snapshot is a document in the log's folder, replaced from time to time and at an orderly shutdown. It holds
the state as of an entry that is committed and durable here, so nothing in it can be rolled back. A snapshot
only saves time: if it is missing, damaged, of another version, or not of this log's entries, it is ignored
and the log is replayed from its start.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import msgspec

from laminar.log.disk.document import Document
from laminar.log.disk.errors import StorageError
from laminar.log.partition_log.log import Log
from laminar.log.storage import Storage
from laminar.node.consensus.log_start import LogStartRecord
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.derived_state import DerivedState
from laminar.node.partition.state.state import PartitionState

_log = logging.getLogger("laminar.derived")

NAME = "derived"
VERSION = 1
# A new snapshot is due when this many bytes of log, and this multiple of the last snapshot's size, follow the
# last one. So about the larger of both is replayed after a crash.
REPLAYED_BYTES = 8 << 20
REPLAYED_SIZES = 4
# At an orderly end a snapshot is written only if this many bytes of log follow the last one. Fewer are
# replayed faster than a snapshot, with its three syncs, is written.
WORTH_BYTES = 64 << 10


class StateSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The derived state after entry `index` of term `term`.

    `configurations` holds the last Raft configuration up to that entry, as (index of its entry,
    configuration). `start` is the last `log_start` entry up to that entry, with its index and without the
    state in it; it is stored because the log's start may not have been moved yet.
    """

    version: int
    index: int
    term: int
    configurations: list[tuple[int, ConfigurationRecord]]
    start: tuple[int, LogStartRecord] | None
    state: DerivedState


class _Versioned(msgspec.Struct):
    version: int


_decoder = msgspec.msgpack.Decoder(StateSnapshot)
_version_decoder = msgspec.msgpack.Decoder(_Versioned)


def read(log: Log) -> StateSnapshot | None:
    """Return the stored snapshot, or None if the log must be replayed from its start.

    Blocks while it reads a file.
    """
    try:
        payload = Document(log.files.disk, log.files.directory, NAME).read()
        if payload is None:
            return None
        if _version_decoder.decode(payload).version != VERSION:
            return None
        derived = _decoder.decode(payload)
    except (StorageError, msgspec.DecodeError) as error:
        _log.warning(
            "the snapshot of %s cannot be read; its log is replayed from the start: %s", log.name, error
        )
        return None
    if not log.start.index <= derived.index <= log.last_index or log.term(derived.index) != derived.term:
        return None
    return derived


def snapshot_of(log: Log, tables: PartitionState) -> StateSnapshot | None:
    """Return a snapshot of the state at the commit index, or None if that is not possible now.

    It is not possible if that entry is not durable here yet, if damaged entries were left out of the state,
    or if a batch here was stamped with a higher commit index. The state can be rolled back to the commit
    index but no further, so a snapshot of an older state is not possible either.
    """
    index = tables.committed_index
    if tables.left_out:
        return None
    if not max(log.start.index, tables.stamped_index) <= index <= log.durable_index:
        return None
    term = log.term(index)
    if not term:
        return None
    return StateSnapshot(
        version=VERSION,
        index=index,
        term=term,
        configurations=tables.configurations_up_to(index)[-1:],
        start=tables.last_start_up_to(index),
        state=tables.state_at(index),
    )


class SnapshotWriter:
    """The writer of snapshots for the partitions of one process."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._sizes: WeakKeyDictionary[Partition, int] = WeakKeyDictionary()

    def due(self, partition: Partition) -> bool:
        """Return whether the log has grown enough since the last snapshot to be worth a new one."""
        size = self._sizes.get(partition, 0)
        return partition.state.underived_bytes >= max(REPLAYED_BYTES, REPLAYED_SIZES * size)

    async def write(self, partition: Partition) -> None:
        """Replace the snapshot of a partition, if a new one is possible now (`snapshot_of`).

        If the disk fails, the previous snapshot is kept and the error is only logged. If encoding the state
        fails, which is a bug, the partition's replica is stopped.
        """
        log = partition.log
        try:
            derived = snapshot_of(log, partition.state)
            if derived is None:
                return
            payload = msgspec.msgpack.encode(derived)
        except Exception as error:  # noqa: BLE001  # stops this partition's replica
            partition.stop(error)
            return
        partition.state.underived_bytes = 0
        self._sizes[partition] = len(payload)
        try:
            await self._storage.write_log_document(log, NAME, payload)
        except StorageError as error:
            _log.warning(
                "the snapshot of %s cannot be written; the previous one is kept: %s", log.name, error
            )
