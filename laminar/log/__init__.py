"""The log's storage: segments, index, the shard's journal, checkpoints, recovery, the disk's door.

`Storage` and `Log` are what a driver uses; `recover_node` runs once at a start, before any loop.
"""

from __future__ import annotations

from laminar.log.disk import Disk, File, RealDisk
from laminar.log.errors import (
    BrokenChain,
    DamagedDocument,
    DamagedRange,
    DiskError,
    EntriesGone,
    StorageClosed,
    StorageError,
)
from laminar.log.log import Log
from laminar.log.manifest import Manifest, ReplicaEntry
from laminar.log.node_recovery import Map, controller_home, logs_directory, recover_node, shard_home
from laminar.log.rows import Row
from laminar.log.settings import StorageSettings
from laminar.log.state import HardState, LogStart
from laminar.log.storage import Storage

__all__ = [
    "BrokenChain",
    "DamagedDocument",
    "DamagedRange",
    "Disk",
    "DiskError",
    "EntriesGone",
    "File",
    "HardState",
    "Log",
    "LogStart",
    "Manifest",
    "Map",
    "RealDisk",
    "ReplicaEntry",
    "Row",
    "Storage",
    "StorageClosed",
    "StorageError",
    "StorageSettings",
    "controller_home",
    "logs_directory",
    "recover_node",
    "shard_home",
]
