"""A node's start: recover every journal, and reassign logs if the shards changed.

It runs in a process of its own before any shard opens (docs/storage.md#recovery). The names of the shards'
store directories have the number of a layout; the layout document, which is written last, says which number
counts. So after a crash at any step either the old store directories count, with all that they held, or the
new ones.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import random
import re
from collections.abc import Callable

import msgspec

from laminar.log.commit.journal import Journal
from laminar.log.commit.segment_writer import SegmentWriter
from laminar.log.disk.disk import Disk
from laminar.log.disk.document import Document
from laminar.log.disk.errors import DamagedDocument
from laminar.log.format.journal_codec import BLOCK_SIZE
from laminar.log.format.manifest import Manifest, ReplicaEntry
from laminar.log.format.settings import StorageSettings
from laminar.log.partition_log.readers import SegmentReader
from laminar.log.recovery.store import Recovered, recover_store

_log = logging.getLogger("laminar.recovery")

# The document with the shard layout, in the data folder.
LAYOUT_DOCUMENT = "layout"
_STORE = re.compile(r"(\d+)-(\d+)")
ShardOf = Callable[[ReplicaEntry, int], int]


class ShardLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """The shard layout of a data folder: its number, and how many shards (store directories) it has.

    `made` is set at the end of the first start, when each of these directories was made. Before, a missing
    directory is one that was never used; afterwards, one that was lost.
    """

    number: int
    shards: int
    made: bool = True


def shard_store(data_directory: str, shards: ShardLayout, shard: int) -> str:
    """Return the path of a shard's store directory, `shards/{number}-{shard}`."""
    return os.path.join(data_directory, "shards", f"{shards.number}-{shard}")


def controller_store(data_directory: str) -> str:
    """Return the path of the controller's store directory."""
    return os.path.join(data_directory, "controller")


def logs_directory(data_directory: str) -> str:
    """Return the path of the directory that holds the logs of all shards."""
    return os.path.join(data_directory, "logs")


def trash_directory(data_directory: str) -> str:
    """Return the path of the trash, where deleted and replaced logs go."""
    return os.path.join(data_directory, "trash")


def recover_node(
    disk: Disk,
    data_directory: str,
    *,
    shards: int,
    shard_of: ShardOf,
    settings: StorageSettings | None = None,
    rng: random.Random | None = None,
) -> ShardLayout:
    """Recover every store directory of a node that starts with `shards` shards; return the layout.

    If the number of shards has changed, the replicas are distributed to a new layout: `shard_of(entry,
    shards)` returns the shard that owns a replica. Blocks.

    Raises:
        DamagedDocument: The layout or the controller's manifest is lost or an older copy: an operator must
            decide.
        StorageError: The recovery failed; it may be retried, and nothing is lost by this attempt.
    """
    assert shards > 0, f"a node with {shards} shards"
    node = _Node(disk, data_directory, settings or StorageSettings(), rng or random.SystemRandom())
    disk.make_directory(os.path.join(data_directory, "shards"))
    document = Document(disk, data_directory, LAYOUT_DOCUMENT)
    found = _read_layout(disk, data_directory, document)
    current = found or ShardLayout(1, shards, made=False)
    _check_stores(disk, data_directory, current)
    # Written again even if it was read: what was read may have been in the page cache only.
    document.write(msgspec.msgpack.encode(current))
    node.remove_stores(lambda number: number != current.number)
    if disk.exists(controller_store(data_directory)):
        node.recover(controller_store(data_directory)).close()
    stores = [shard_store(data_directory, current, shard) for shard in range(current.shards)]
    if current.made:
        node.begin_missing(stores)
    if shards == current.shards or not current.made:
        for store in stores:
            node.recover(store, forget=True).close()
    if not current.made:
        current = ShardLayout(current.number, current.shards)
        document.write(msgspec.msgpack.encode(current))
    if shards == current.shards:
        return current
    wanted = ShardLayout(current.number + 1, shards)
    recovered = [node.recover(store, forget=True) for store in stores]
    try:
        node.deal(recovered, wanted, shard_of)
    finally:
        for recovered_store in recovered:
            recovered_store.close()
    document.write(msgspec.msgpack.encode(wanted))
    node.remove_stores(lambda number: number != wanted.number)
    return wanted


def _read_layout(disk: Disk, data_directory: str, document: Document) -> ShardLayout | None:
    """Return the layout; None before the first start has written one.

    If the document is missing or damaged, the layout is derived from the names of the store directories.
    These must all have one layout number (there are two while the number of shards changes), and no shard may
    be missing among them.

    Raises:
        DamagedDocument: The names do not tell the layout, so an operator must say which one is valid.
            Nothing was changed.
    """
    problem = f"no layout in {data_directory}"
    try:
        payload = document.read()
    except DamagedDocument as error:
        payload, problem = None, str(error)
    if payload is not None:
        return msgspec.msgpack.decode(payload, type=ShardLayout)
    directory = os.path.join(data_directory, "shards")
    found = _stores(disk, data_directory)
    if not found and not document.exists():
        return None
    numbers = {number for number, _ in found}
    if len(numbers) != 1 or [shard for _, shard in found] != list(range(len(found))):
        raise DamagedDocument(
            f"{problem}, and the store directories in {directory} ({_names(found)}) do not tell the "
            "layout. Put the files layout-* back from a copy of the folder; nothing was changed"
        )
    known = ShardLayout(numbers.pop(), len(found))
    _log.critical(
        "%s; by the store directories in %s it is number %d, of %d shards",
        problem,
        directory,
        known.number,
        known.shards,
    )
    return known


def _stores(disk: Disk, data_directory: str) -> list[tuple[int, int]]:
    """Return (number, shard) of every existing store directory, in order."""
    names = disk.list(os.path.join(data_directory, "shards"))
    return sorted((int(match[1]), int(match[2])) for match in map(_STORE.fullmatch, names) if match)


def _names(stores: list[tuple[int, int]]) -> str:
    return ", ".join(f"{number}-{shard}" for number, shard in stores) or "none"


def _check_stores(disk: Disk, data_directory: str, current: ShardLayout) -> None:
    """Refuse a layout document that is an older copy, and one whose store directories are all missing.

    The document is an older copy if some of its store directories are missing and directories of another
    layout hold replicas: going on would remove those. If all directories are missing but there are logs, a
    disk is probably not mounted: going on would declare all replicas lost, which cannot be undone.

    Raises:
        DamagedDocument: In both cases; nothing was changed.
    """
    found = _stores(disk, data_directory)
    missing = {(current.number, shard) for shard in range(current.shards)} - set(found)
    others = [each for each in found if each[0] != current.number]
    directory = os.path.join(data_directory, "shards")
    if missing and any(
        _holds_replicas(disk, os.path.join(directory, f"{number}-{shard}")) for number, shard in others
    ):
        raise DamagedDocument(
            f"the layout in {data_directory} is number {current.number}, of {current.shards} shards, and the "
            f"store directories in {directory} ({_names(found)}) are of other layouts: it is an older copy. "
            "Put the right one back. If all store directories are of one number, remove the files "
            "layout-*: the directories then tell the layout. Nothing was changed"
        )
    _refuse_without_stores(disk, data_directory, len(missing), current)


def _refuse_without_stores(disk: Disk, data_directory: str, missing: int, current: ShardLayout) -> None:
    directory, logs = os.path.join(data_directory, "shards"), logs_directory(data_directory)
    held = disk.list(logs) if disk.exists(logs) else []
    if missing == current.shards and held:
        names = f"{', '.join(held[:3])}{' and more' if held[3:] else ''}"
        raise DamagedDocument(
            f"{directory} has none of the {current.shards} store directories {current.number}-0 and so on, "
            f"and {logs} holds {names}: a disk may not be mounted. Put them back as they were, no older "
            f"copies. To accept the loss of what they held, make an empty folder {current.number}-0 there. "
            "Nothing was changed"
        )


def _holds_replicas(disk: Disk, store: str) -> bool:
    """Return whether a store directory's manifest names any replica, or cannot be read."""
    manifest = Manifest(disk, store)
    try:
        manifest.read()
    except DamagedDocument:
        return True
    return bool(manifest.entries)


class _Node:
    def __init__(
        self, disk: Disk, data_directory: str, settings: StorageSettings, rng: random.Random
    ) -> None:
        self._disk = disk
        self._data_directory = data_directory
        # A journal made here gets only the empty frame that opens its generation: the process that opens the
        # store directory begins a generation of its own. A larger file would be written and read for nothing.
        self._settings = dataclasses.replace(settings, first_journal_file_bytes=BLOCK_SIZE)
        self._rng = rng

    def begin_missing(self, stores: list[str]) -> None:
        """Make the store directories that were lost, each with a manifest that is `Unknown`.

        Such a manifest says that replicas may be missing from it. It prevents that a lost replica is created
        again as a new one.
        """
        for store in stores:
            documents = [Document(self._disk, store, name) for name in ("manifest", "checkpoint")]
            if self._disk.exists(store) and any(document.exists() for document in documents):
                continue
            _log.warning("%s is missing: the replicas in it, if any, are lost", store)
            self._disk.make_directory(store)
            Manifest(self._disk, store).replace([], known=False)

    def recover(self, store: str, *, forget: bool = False) -> Recovered:
        return recover_store(
            self._disk,
            store,
            logs_directory(self._data_directory),
            settings=self._settings,
            rng=self._rng,
            readers=SegmentReader(self._disk, self._settings),
            forget=forget,
        )

    def remove_stores(self, unwanted: Callable[[int], bool]) -> None:
        """Remove the store directories whose layout number is `unwanted`, because the layout has changed.

        Copies that recovery preserved in them (`damaged-...`) are moved to the directory above and kept.
        """
        directory = os.path.join(self._data_directory, "shards")
        for name in self._disk.list(directory):
            found = _STORE.fullmatch(name)
            if found and unwanted(int(found[1])):
                store = os.path.join(directory, name)
                kept = [each for each in self._disk.list(store) if each.startswith("damaged-")]
                for each in kept:
                    self._disk.rename(os.path.join(store, each), f"{store}-{each}")
                if kept:
                    self._disk.sync_directory(directory)
                self._disk.remove_tree(store)
        self._disk.sync_directory(directory)

    def deal(self, old: list[Recovered], wanted: ShardLayout, shard_of: ShardOf) -> None:
        """Write the store directories of the wanted layout: distribute the old ones' replicas and logs.

        The new directories are not used until the layout document names them. If the manifest of an old
        directory may lack replicas, these may belong to any new one: then all new manifests are `Unknown`.
        """
        known = all(store.manifest.known for store in old)
        entries: list[list[ReplicaEntry]] = [[] for _ in range(wanted.shards)]
        writers = [
            self._new_store(shard_store(self._data_directory, wanted, s)) for s in range(wanted.shards)
        ]
        for store in old:
            logs = dict(store.writer.logs)
            hard_states = dict(store.writer.hard_states)
            lost = set(store.writer.lost)
            for entry in store.manifest.entries:
                shard = shard_of(entry, wanted.shards)
                assert 0 <= shard < wanted.shards, f"{entry} belongs to shard {shard} of {wanted.shards}"
                entry = msgspec.structs.replace(
                    entry, log_id=store.writer.replaced.get(entry.log_id, entry.log_id)
                )
                entries[shard].append(entry)
                writer = writers[shard]
                if entry.log_id in logs:
                    writer.logs[entry.log_id] = logs.pop(entry.log_id)
                if entry.replica_id in hard_states:
                    writer.hard_states[entry.replica_id] = hard_states.pop(entry.replica_id)
                if entry.replica_id in lost:
                    lost.discard(entry.replica_id)
                    writer.lost.add(entry.replica_id)
            # What no manifest names yet is kept: data is deleted on an explicit request only.
            writers[0].logs |= logs
            writers[0].hard_states |= hard_states
            writers[0].lost |= lost
        for shard, writer in enumerate(writers):
            manifest = Manifest(self._disk, shard_store(self._data_directory, wanted, shard))
            manifest.replace(entries[shard], known=known)
            writer.checkpoint()
            writer.journal.close()

    def _new_store(self, store: str) -> SegmentWriter:
        self._disk.make_directory(store)
        journal = Journal(
            self._disk,
            store,
            self._settings,
            generation=1,
            seed=self._rng.getrandbits(32),
            number=1,
            lsn=0,
        )
        place = journal.open_generation()
        return SegmentWriter(
            self._disk,
            store=store,
            logs_directory=logs_directory(self._data_directory),
            journal=journal,
            place=place,
            settings=self._settings,
        )
