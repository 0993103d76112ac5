"""Recovery of one store directory, from its newest checkpoint and the journal after it.

The order is that of docs/storage.md#recovery: read the journal; write again what may have been only in the
page cache; replay in memory; change segments; sync; begin a new generation with a checkpoint. Until that
checkpoint is durable, a recovery that is interrupted can be repeated: what it reads still leads to the same
result. It runs before there is a loop.

This module keeps the order. `journal_scan.py` classifies the journal's frames, `replay.py` applies them in
memory, and `rebuild.py` makes the logs from them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
from dataclasses import dataclass

from laminar.log.commit.journal import Journal, journal_name, journal_numbers
from laminar.log.commit.segment_writer import SegmentWriter
from laminar.log.disk.disk import Disk, Lock
from laminar.log.disk.document import Document
from laminar.log.disk.errors import DamagedDocument, DiskError
from laminar.log.format.checkpoint_state import Checkpoint, HardState, decode_checkpoint
from laminar.log.format.journal_codec import BLOCK_SIZE
from laminar.log.format.manifest import Manifest
from laminar.log.format.settings import StorageSettings
from laminar.log.partition_log.changes import ChangeQueue
from laminar.log.partition_log.log import Log
from laminar.log.partition_log.readers import SegmentReader
from laminar.log.recovery.journal_scan import FoundFrame, ScanResult, classify_frames, read_journal
from laminar.log.recovery.rebuild import Rebuild
from laminar.log.recovery.replay import Replay
from laminar.log.recovery.salvage import preserve_store

_log = logging.getLogger("laminar.recovery")

# The checkpoint of a store directory in which nothing was ever written.
_NONE = Checkpoint(generation=0, seed=0, lsn=0, journal_file=0, journal_position=0, logs=[], hard_states={})


@dataclass(slots=True)
class Recovered:
    """The parts of a recovered store directory, from which a `Storage` is made.

    The directory is locked, everything in it is durable, and a new generation of the journal is open.
    """

    store: str
    lock: Lock
    manifest: Manifest
    changes: ChangeQueue
    readers: SegmentReader
    journal: Journal
    writer: SegmentWriter
    logs: dict[int, Log]
    hard_states: dict[int, HardState]
    lost_hard_states: set[int]

    def close(self) -> None:
        """Close all files and release the lock, for a caller that wanted only the recovery."""
        self.readers.close()
        self.journal.close()
        for log in self.logs.values():
            log.close()
        self.lock.close()


def recover_store(
    disk: Disk,
    store: str,
    logs_directory: str,
    *,
    settings: StorageSettings,
    rng: random.Random,
    readers: SegmentReader,
    forget: bool = False,
) -> Recovered:
    """Recover one store directory, which stays locked; make a new one if it is missing. Blocks.

    A store directory whose manifest is damaged is refused. With `forget`, for callers that can ask the
    catalog, it is recovered as an empty one instead: a copy of its content is preserved, and its new manifest
    is `Unknown`, which says that replicas may be missing. The same happens if there is no manifest although
    something was recorded here. `rng` draws the random part of the new generation.

    Raises:
        DiskError: The recovery failed; it may be retried.
        DamagedDocument: The manifest is damaged, and `forget` is not set.
    """
    disk.make_directory(store)
    disk.make_directory(logs_directory)
    lock = disk.lock(os.path.join(store, "lock"))
    try:
        manifest, forgotten = _read_manifest(disk, store, forget=forget)
        checkpoint, all_lost = _NONE, False
        if not forgotten:
            checkpoint, all_lost = _read_checkpoint(disk, store, manifest)
        found = read_journal(disk, store, checkpoint)
        scan = classify_frames(found, checkpoint, same_boot=checkpoint.boot_id == disk.boot_id())
        _write_again(disk, store, scan.unsure)
        replay = Replay(checkpoint)
        replay.run(scan)
        if all_lost:
            replay.lost |= {entry.replica_id for entry in manifest.entries}
        changes = ChangeQueue(settings.recent_bytes)
        writer = _new_generation(disk, store, logs_directory, settings, rng, checkpoint, scan)
        rebuild = Rebuild(disk, logs_directory, settings, changes, readers, writer)
        logs = rebuild.run(replay)
        if forgotten:
            manifest.replace(manifest.entries, set_aside=True)
        elif not manifest.written:
            # From now on a missing manifest means that it was lost. On a full disk it is
            # written with the first replica instead.
            with contextlib.suppress(DiskError):
                manifest.replace([])
    except BaseException:
        lock.close()
        raise
    return Recovered(
        store,
        lock,
        manifest,
        changes,
        readers,
        writer.journal,
        writer,
        logs,
        dict(replay.hard_states),
        set(replay.lost),
    )


def _read_manifest(disk: Disk, store: str, *, forget: bool) -> tuple[Manifest, bool]:
    """Return the manifest, and whether it was lost: then the store directory's content must not be used.

    If it was lost, a copy of the content is preserved, and a new manifest that is `Unknown` is written,
    before anything is removed.
    """
    manifest = Manifest(disk, store)
    problem = "a former start found it lost, and was interrupted"
    try:
        manifest.load()
    except DamagedDocument as error:
        if not forget:
            raise
        problem = str(error)
    else:
        if not manifest.written and forget and _holds_something(disk, store):
            problem = "it is missing"
        elif manifest.set_aside:
            return manifest, False
    aside = preserve_store(disk, store)
    manifest.replace([], known=False, set_aside=False)
    _log.critical(
        "%s: no manifest can be read: %s. So it is unknown which replicas were here: they are lost. Its "
        "manifest, checkpoints and journal are kept in %s, and the logs' folders stay where they are",
        store,
        problem,
        aside,
    )
    return manifest, True


def _holds_something(disk: Disk, store: str) -> bool:
    """Return whether a store directory without a manifest has ever held a log or a vote."""
    try:
        payload = Document(disk, store, "checkpoint").read()
    except DamagedDocument:
        return True
    if payload is None:
        return not _never_used(disk, store)
    checkpoint = decode_checkpoint(payload)
    frames = read_journal(disk, store, checkpoint).frames
    return bool(checkpoint.logs or checkpoint.hard_states) or any(frame.head.records for frame in frames)


def _read_checkpoint(disk: Disk, store: str, manifest: Manifest) -> tuple[Checkpoint, bool]:
    """Return the newest whole checkpoint, and whether all replicas are lost because there is none.

    The second is false for a store directory in which nothing was ever written.
    """
    document, problem = Document(disk, store, "checkpoint"), "it is missing"
    try:
        payload = document.read()
    except DamagedDocument as error:
        payload, problem = None, str(error)
    if payload is not None:
        return decode_checkpoint(payload), False
    is_new = not manifest.written or not (manifest.known or manifest.entries or document.exists())
    if is_new and _never_used(disk, store):
        return _NONE, False
    aside = preserve_store(disk, store)
    _log.critical(
        "%s: no checkpoint can be read: %s. Its %d replicas are lost; checkpoints and journal are kept in %s",
        store,
        problem,
        len(manifest.entries),
        aside,
    )
    return _NONE, True


def _never_used(disk: Disk, store: str) -> bool:
    """Return whether no journal file holds more than the first, empty frame of a generation.

    Then nothing was ever recorded: the first start was interrupted.
    """
    for number in journal_numbers(disk, store):
        file = disk.open(os.path.join(store, journal_name(number)))
        try:
            rest = bytes(file.pread(file.size(), BLOCK_SIZE))
        finally:
            file.close()
        if rest.count(0) != len(rest):
            return False
    return True


def _write_again(disk: Disk, store: str, unsure: list[FoundFrame]) -> None:
    """Write again, and sync, frames that may have been read from the page cache only.

    A sync alone would not do: after a failed sync their pages may count as clean, and would not be written.
    """
    by_file: dict[str, list[FoundFrame]] = {}
    for frame in unsure:
        by_file.setdefault(frame.file_name, []).append(frame)
    for name, frames in by_file.items():
        file = disk.open(os.path.join(store, name))
        try:
            for frame in frames:
                file.pwritev([frame.stored], frame.position)
            file.sync()
        finally:
            file.close()
    disk.sync_directory(store)


def _new_generation(
    disk: Disk,
    store: str,
    logs_directory: str,
    settings: StorageSettings,
    rng: random.Random,
    checkpoint: Checkpoint,
    scan: ScanResult,
) -> SegmentWriter:
    number = max([checkpoint.journal_file, *journal_numbers(disk, store)]) + 1
    journal = Journal(
        disk,
        store,
        settings,
        generation=checkpoint.generation + 1,
        seed=rng.getrandbits(32),
        number=number,
        lsn=scan.highest_lsn,
    )
    place = journal.open_generation()
    return SegmentWriter(
        disk, store=store, logs_directory=logs_directory, journal=journal, place=place, settings=settings
    )
