"""The log's storage: segments, index, the shard's journal, checkpoints, recovery, the disk's door.

`open_log` and `open_folder` are the door for a user's own program: logs without server or cluster. `Storage`
and `Log` are what a node's driver uses; `recover_node` runs once at its start, before any loop.
"""

from __future__ import annotations

from laminar.log.disk import Disk, File, RealDisk
from laminar.log.errors import (
    AppendRefused,
    BrokenChain,
    DamagedDocument,
    DamagedRange,
    DiskError,
    EntriesGone,
    FolderInUse,
    NotALogFolder,
    OffsetOutOfRange,
    RecordsLost,
    RepairRefused,
    StorageClosed,
    StorageError,
)
from laminar.log.library import LogFolder, open_folder, open_log
from laminar.log.local import AppendReceipt, LocalLog
from laminar.log.log import Log
from laminar.log.manifest import Manifest, ReplicaEntry
from laminar.log.node_recovery import Map, controller_home, logs_directory, recover_node, shard_home
from laminar.log.policy import COMMIT, FlushPolicy
from laminar.log.resources import raise_open_file_limit
from laminar.log.rows import Row
from laminar.log.settings import StorageSettings
from laminar.log.state import HardState, LogStart
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
    "EntriesGone",
    "File",
    "FlushPolicy",
    "FolderInUse",
    "HardState",
    "LocalLog",
    "Log",
    "LogFolder",
    "LogStart",
    "Manifest",
    "Map",
    "NotALogFolder",
    "OffsetOutOfRange",
    "RealDisk",
    "RecordsLost",
    "RepairRefused",
    "ReplicaEntry",
    "Row",
    "Storage",
    "StorageClosed",
    "StorageError",
    "StorageSettings",
    "controller_home",
    "logs_directory",
    "open_folder",
    "open_log",
    "raise_open_file_limit",
    "recover_node",
    "shard_home",
]
