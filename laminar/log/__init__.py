"""The storage of logs: segments, index, the shard's journal, checkpoints, recovery.

`open_log` and `open_folder` are for a user's own program: logs without server or cluster. `Storage` and `Log`
are for a node's driver. `recover_node` runs once at a node's start, before any event loop.
"""

from __future__ import annotations

from laminar.log.disk.disk import Disk, File, RealDisk
from laminar.log.disk.errors import (
    AppendRefused,
    BrokenChain,
    DamagedDocument,
    DamagedRange,
    DiskError,
    EntriesTrimmed,
    FolderInUse,
    NotALogFolder,
    OffsetOutOfRange,
    RecordsLost,
    RepairRefused,
    StorageClosed,
    StorageError,
)
from laminar.log.disk.open_files import raise_open_file_limit
from laminar.log.format.checkpoint_state import HardState, LogStart
from laminar.log.format.flush_policy import COMMIT, FlushPolicy
from laminar.log.format.index_entry import IndexEntry
from laminar.log.format.manifest import Manifest, ReplicaEntry
from laminar.log.format.settings import StorageSettings
from laminar.log.library.folder import LogFolder, open_folder, open_log
from laminar.log.library.local_log import AppendReceipt, LocalLog
from laminar.log.partition_log.log import Log
from laminar.log.recovery.node import ShardLayout, controller_store, logs_directory, recover_node, shard_store
from laminar.log.storage import Storage

__all__ = [
    "COMMIT",
    "AppendReceipt",
    "AppendRefused",
    "BrokenChain",
    "DamagedDocument",
    "DamagedRange",
    "Disk",
    "DiskError",
    "EntriesTrimmed",
    "File",
    "FlushPolicy",
    "FolderInUse",
    "HardState",
    "IndexEntry",
    "LocalLog",
    "Log",
    "LogFolder",
    "LogStart",
    "Manifest",
    "NotALogFolder",
    "OffsetOutOfRange",
    "RealDisk",
    "RecordsLost",
    "RepairRefused",
    "ReplicaEntry",
    "ShardLayout",
    "Storage",
    "StorageClosed",
    "StorageError",
    "StorageSettings",
    "controller_store",
    "logs_directory",
    "open_folder",
    "open_log",
    "raise_open_file_limit",
    "recover_node",
    "shard_store",
]
