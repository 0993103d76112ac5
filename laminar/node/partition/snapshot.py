"""What a partition derived from its log up to an entry, kept beside it: a start replays only what follows.

A document in the log's folder, replaced now and then and at an orderly end. It holds the state as of an entry
that is committed and durable here, so nothing in it can be rolled back. It is a shortcut and no source of
truth: one that is missing, damaged, of another version, or not of this log's entries is passed over, and the
log is replayed from its start. It knows what is stored, not who asks for it.
"""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

import msgspec

from laminar.log.disk.document import Document
from laminar.log.disk.errors import DamagedDocument, DiskError, StorageError
from laminar.log.partition_log.log import Log
from laminar.log.storage import Storage
from laminar.node.consensus.log_start import LogStartRecord
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.derived_state import DerivedState
from laminar.node.partition.state.state import Tables

_log = logging.getLogger("laminar.derived")

NAME = "derived"
VERSION = 1
# So much of a log, and so many times the size of what is written, is replayed at most after a crash.
REPLAYED_BYTES = 8 << 20
REPLAYED_SIZES = 4
# At an orderly end less than this is not worth three syncs.
WORTH_BYTES = 64 << 10


class Derived(msgspec.Struct, frozen=True, kw_only=True):
    """The state behind entry `index` of `term`; `configurations` by the index of the entry that set each.

    `start` is the last `log_start` entry up to there, stateless: the log may not have followed it yet.
    """

    version: int
    index: int
    term: int
    configurations: list[tuple[int, ConfigurationRecord]]
    start: tuple[int, LogStartRecord] | None
    state: DerivedState


class _Versioned(msgspec.Struct):
    version: int


_decoder = msgspec.msgpack.Decoder(Derived)
_version_decoder = msgspec.msgpack.Decoder(_Versioned)


def read(log: Log) -> Derived | None:
    """What may be built upon; None where the log must be replayed from its start. Blocks shortly."""
    try:
        payload = Document(log.files.disk, log.files.directory, NAME).read()
        if payload is None:
            return None
        if _version_decoder.decode(payload).version != VERSION:
            return None
        derived = _decoder.decode(payload)
    except (DamagedDocument, DiskError, msgspec.DecodeError) as error:
        _log.warning("%s is replayed from its start: %s", log.name, error)
        return None
    if not log.start.index <= derived.index <= log.last_index or log.term(derived.index) != derived.term:
        return None
    return derived


def derived_of(log: Log, tables: Tables) -> Derived | None:
    """The state as of the last committed entry; None while that is not durable here, or its state not known.

    The way back from a state ends at what is known as committed, so it is that entry or none.
    """
    index = tables.committed_index
    if tables.left_out:
        return None
    if not max(log.start.index, tables.stamped_index) <= index <= log.durable_index:
        return None
    term = log.term(index)
    if not term:
        return None
    return Derived(
        version=VERSION,
        index=index,
        term=term,
        configurations=tables.configurations_up_to(index)[-1:],
        start=tables.last_start_up_to(index),
        state=tables.state_at(index),
    )


class DerivedKeeper:
    """Writes the documents of one process's partitions, when enough has come behind the last."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._sizes: WeakKeyDictionary[Partition, int] = WeakKeyDictionary()

    def due(self, partition: Partition) -> bool:
        """Whether so much has come since the last document that it is worth a new one."""
        size = self._sizes.get(partition, 0)
        return partition.tables.underived_bytes >= max(REPLAYED_BYTES, REPLAYED_SIZES * size)

    async def write(self, partition: Partition) -> None:
        """Replace the document of a partition. On a disk that fails the former one stands."""
        log = partition.log
        try:
            derived = derived_of(log, partition.tables)
            if derived is None:
                return
            payload = msgspec.msgpack.encode(derived)
        except Exception as error:  # noqa: BLE001  # stops this partition's replica
            partition.stop(error)
            return
        partition.tables.underived_bytes = 0
        self._sizes[partition] = len(payload)
        try:
            await self._storage.write_log_document(log, NAME, payload)
        except StorageError as error:
            _log.warning("%s: its derived state cannot be kept: %s", log.name, error)
