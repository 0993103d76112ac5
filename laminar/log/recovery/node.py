"""A node's start: every journal recovered, and the logs dealt out anew when the number of shards changed.

Runs in a process of its own before any shard opens (docs/storage.md#recovery). Shards' homes carry the
number of a map; the map, written last, says which homes count. So a crash at any step leaves either the
old homes, untouched in meaning, or the new ones.
"""

from __future__ import annotations

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
from laminar.log.format.manifest import Manifest, ReplicaEntry
from laminar.log.format.settings import StorageSettings
from laminar.log.partition_log.readers import SegmentReader
from laminar.log.recovery.store import Recovered, recover_store

_log = logging.getLogger("laminar.recovery")

_STORE = re.compile(r"(\d+)-(\d+)")
ShardOf = Callable[[ReplicaEntry, int], int]


class ShardLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which homes count: those of `number`, one for each of `shards`.

    `made`: each of them is there. Not before the end of the first start, so that a home which is missing
    then was never used.
    """

    number: int
    shards: int
    made: bool = True


def shard_store(data_directory: str, shards: ShardLayout, shard: int) -> str:
    return os.path.join(data_directory, "shards", f"{shards.number}-{shard}")


def controller_store(data_directory: str) -> str:
    return os.path.join(data_directory, "controller")


def logs_directory(data_directory: str) -> str:
    return os.path.join(data_directory, "logs")


def trash_directory(data_directory: str) -> str:
    """Where the folders of deleted and replaced logs go (see `SegmentWriter.move_to_trash`)."""
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
    """Recover every home of a node, for `shards` shards from now on; returns the map to open homes by.

    `shard_of(entry, shards)` is the shard that owns a replica. Blocks. Raises `StorageError`; then nothing
    is lost, and it may be tried again.
    """
    assert shards > 0, f"a node with {shards} shards"
    node = _Node(disk, data_directory, settings or StorageSettings(), rng or random.SystemRandom())
    disk.make_directory(os.path.join(data_directory, "shards"))
    document = Document(disk, data_directory, "map")
    found = _read_map(disk, data_directory, document)
    current = found or ShardLayout(1, shards, made=False)
    _check_stores(disk, data_directory, current)
    # Also what was only read: it may have been in the page cache alone.
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


def _read_map(disk: Disk, data_directory: str, document: Document) -> ShardLayout | None:
    """The map; None before the first start has written one.

    One that is missing or damaged is told by the homes there: of one number alone, as while their number
    changes there are two, and without a gap. Raises `DamagedDocument` where they do not tell it: what counts
    is then for a person to say, and no home is touched.
    """
    problem = f"no map in {data_directory}"
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
            f"{problem}, and the homes in {directory} ({_names(found)}) do not tell it. Put the map back "
            "from a copy of the folder; nothing was changed"
        )
    known = ShardLayout(numbers.pop(), len(found))
    _log.critical(
        "%s; by the homes in %s it is number %d, of %d shards", problem, directory, known.number, known.shards
    )
    return known


def _stores(disk: Disk, data_directory: str) -> list[tuple[int, int]]:
    """(number, shard) of every home that is there, in order."""
    names = disk.list(os.path.join(data_directory, "shards"))
    return sorted((int(match[1]), int(match[2])) for match in map(_STORE.fullmatch, names) if match)


def _names(stores: list[tuple[int, int]]) -> str:
    return ", ".join(f"{number}-{shard}" for number, shard in stores) or "none"


def _check_stores(disk: Disk, data_directory: str, current: ShardLayout) -> None:
    """Raise `DamagedDocument` for a map that is an older copy: homes of another number hold the replicas, and
    of its own some are gone. All that are not its own would be removed.

    And where all homes are gone, and logs are there: no damage takes all, and what is lost once stays lost.
    """
    found = _stores(disk, data_directory)
    missing = {(current.number, shard) for shard in range(current.shards)} - set(found)
    others = [each for each in found if each[0] != current.number]
    directory = os.path.join(data_directory, "shards")
    if missing and any(
        _holds_replicas(disk, os.path.join(directory, f"{number}-{shard}")) for number, shard in others
    ):
        raise DamagedDocument(
            f"the map in {data_directory} is number {current.number}, of {current.shards} shards, and the "
            f"homes in {directory} ({_names(found)}) are of others: it is an older copy. Put the right one "
            "back. Where all homes are of one number, remove the files map-*: their names tell it then. "
            "Nothing was changed"
        )
    _refuse_without_stores(disk, data_directory, len(missing), current)


def _refuse_without_stores(disk: Disk, data_directory: str, missing: int, current: ShardLayout) -> None:
    directory, logs = os.path.join(data_directory, "shards"), logs_directory(data_directory)
    held = disk.list(logs) if disk.exists(logs) else []
    if missing == current.shards and held:
        names = f"{', '.join(held[:3])}{' and more' if held[3:] else ''}"
        raise DamagedDocument(
            f"{directory} has none of the {current.shards} homes {current.number}-0 and so on, and {logs} "
            f"holds {names}: a disk may not be mounted. Put the homes back as they were, no older copies. To "
            f"give up what they held, make an empty folder {current.number}-0 there. Nothing was changed"
        )


def _holds_replicas(disk: Disk, store: str) -> bool:
    """Whether a home's manifest names any, or cannot be read."""
    manifest = Manifest(disk, store)
    try:
        manifest.look()
    except DamagedDocument:
        return True
    return bool(manifest.entries)


class _Node:
    def __init__(
        self, disk: Disk, data_directory: str, settings: StorageSettings, rng: random.Random
    ) -> None:
        self._disk = disk
        self._data_directory = data_directory
        self._settings = settings
        self._rng = rng

    def begin_missing(self, stores: list[str]) -> None:
        """Begin those that a former start made, and that are gone, as homes without a manifest: no replica of
        theirs is born again.
        """
        for store in stores:
            documents = [Document(self._disk, store, name) for name in ("manifest", "checkpoint")]
            if self._disk.exists(store) and any(document.exists() for document in documents):
                continue
            _log.warning("%s is missing: replicas that it held, if it held any, are lost", store)
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
        """Homes of another map: left over from a change that did not finish, or that did.

        What was set aside in them stays, beside them.
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
        """Write the homes of the wanted map: durable checkpoints and manifests, that nobody reads yet.

        What an old home may lack may belong to any of the new ones.
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
            # What no manifest names yet is kept: data is deleted on an explicit word only.
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
