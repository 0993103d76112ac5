"""Coming back: one shard's home, from its newest checkpoint and the journal behind it.

STORAGE.md 3 in its order: read in memory, make certain what was only read, then touch segments, sync,
and begin a new generation with a checkpoint. Until that checkpoint is durable nothing that was read
before is changed in a way that a second crash could not repeat. It runs before there is a loop.
"""

from __future__ import annotations

import logging
import os
import random
import re
from dataclasses import dataclass, field

from laminar.log.codec import BLOCK_SIZE, CARRIED, MARK, ONE, PAIR, POLICY, START, Marked, RecordKind
from laminar.log.disk import Disk, Lock
from laminar.log.document import Document
from laminar.log.errors import BrokenChain, DamagedDocument, DiskError
from laminar.log.index import Loaded, load_segments
from laminar.log.journal import Journal, journal_name, journal_numbers
from laminar.log.log import Log
from laminar.log.manifest import Manifest
from laminar.log.pending import Recorder
from laminar.log.policy import COMMIT, FlushPolicy
from laminar.log.quarantine import document
from laminar.log.reading import Readers
from laminar.log.replay import FoundFrame, Verdict, judge, scan
from laminar.log.rows import HEADER
from laminar.log.segment import segment_name
from laminar.log.settings import StorageSettings
from laminar.log.state import Checkpoint, HardState, LogEnd, LogFiles, LogStart, LogState, decode_checkpoint
from laminar.log.tail import End, Tail, find_tail
from laminar.log.writer import Writer

_log = logging.getLogger("laminar.recovery")

_OPENS_SEGMENT = 1
_COPY_BYTES = 1 << 20


@dataclass(slots=True)
class Recovered:
    """A home whose logs are as durable as they ever were, with a new generation open."""

    home: str
    lock: Lock
    manifest: Manifest
    recorder: Recorder
    readers: Readers
    journal: Journal
    writer: Writer
    logs: dict[int, Log]
    hard_states: dict[int, HardState]
    lost_hard_states: set[int]

    def close(self) -> None:
        """For a caller who wanted recovery only."""
        self.readers.close()
        self.journal.close()
        self.writer.close()
        for log in self.logs.values():
            log.close()
        self.lock.close()


@dataclass(slots=True)
class _Tail:
    """One frame of a log's tail, from the journal."""

    index: int
    term: int
    prev_term: int
    base_offset: int
    opens_segment: bool
    frame: memoryview


@dataclass(slots=True)
class _Replayed:
    """One log while the journal is replayed: what of its segments still counts, and what comes behind."""

    log_id: int
    name: str
    start: LogStart
    base_last: int
    base_term: int | None
    recovering: bool = False
    incarnation: int = 0
    tail: list[_Tail] = field(default_factory=list)
    # Of an `interval` log: `base_last` is synced; what comes behind is found in the segments, but never an
    # entry that a truncation named since.
    policy: FlushPolicy = COMMIT
    boot_id: bytes = b""
    power_lost: bool = False
    # This very recovery found that something may be gone: a new incarnation, also of one that is marked.
    found_loss: bool = False
    cut_entries: set[tuple[int, int]] = field(default_factory=set)
    start_unsynced: bool = False

    @property
    def last_index(self) -> int:
        return self.tail[-1].index if self.tail else self.base_last

    def full(self, frame: memoryview) -> bool:
        """A batch. Returns whether it continues the log, as far as that is known without the segments."""
        index: int
        _, flags, index, term, prev_term, base_offset, *_ = HEADER.unpack_from(frame)
        if not self.start.index < index <= self.last_index + 1:
            return False
        chained = index == self.last_index + 1
        # Behind a gap a truncation may be missing: what comes later stands.
        self.cut(index)
        before = self.tail[-1].term if self.tail else self.base_term
        if before is not None and before != prev_term:
            return False
        self.tail.append(_Tail(index, term, prev_term, base_offset, bool(flags & _OPENS_SEGMENT), frame))
        return chained

    def cut(self, index: int) -> None:
        while self.tail and self.tail[-1].index >= index:
            self.tail.pop()
        if index <= self.base_last:
            self.base_last = index - 1
            # Known again when the segments are read.
            self.base_term = self.start.term if self.base_last == self.start.index else None

    def truncate(self, index: int, term: int) -> None:
        if self.policy.is_interval:
            self.cut_entries.add((index, term))
        self.cut(index)

    def synced(self, index: int, term: int) -> None:
        """The segments are durable up to there, and what was cut before cannot come back."""
        self.cut_entries.clear()
        if index > self.base_last:
            self.base_last, self.base_term = index, term
            self.start_unsynced = False

    def change_policy(self, interval_ms: int, interval_records: int, index: int, term: int) -> None:
        self.policy = FlushPolicy(interval_ms=interval_ms, interval_records=interval_records)
        self.boot_id = b""
        self.tail.clear()
        self.cut_entries.clear()
        self.base_last, self.base_term = index, term
        self.start_unsynced = False

    def marked(self, why: int, incarnation: int, boot_id: bytes) -> None:
        self.recovering, self.power_lost = why != Marked.NO, why == Marked.POWER_LOST
        self.incarnation = incarnation
        self.boot_id = boot_id if any(boot_id) else b""

    def move_start(self, start: LogStart) -> None:
        if start.index > self.last_index:
            self.tail.clear()
            self.base_last, self.base_term = start.index, start.term
            self.start_unsynced = self.policy.is_interval
        self.start = start


class _Replay:
    """All records of a journal, applied in memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.logs = {state.log_id: _from_state(state) for state in checkpoint.logs}
        self.gone: list[_Replayed] = []
        self._checkpoint_lsn = checkpoint.lsn
        self.hard_states = dict(checkpoint.hard_states)
        self.lost = set(checkpoint.lost)
        self.replaced = dict(checkpoint.replaced)

    def run(self, verdict: Verdict) -> None:
        if verdict.votes_lost_before:
            self.lost |= self.hard_states.keys()
        known_again: set[int] = set()
        for frame in verdict.kept:
            for kind, key, payload in frame.records():
                self._apply(kind, key, payload)
                if kind is RecordKind.HARD_STATE:
                    # A promise that comes behind the gap is the newest one. Before the gap it may not be.
                    if frame.head.lsn >= verdict.votes_lost_before:
                        known_again.add(key)
                    elif verdict.votes_lost_before:
                        self.lost.add(key)
        self.lost -= known_again
        for frame in verdict.votes_only:
            for kind, key, payload in frame.records():
                assert kind is RecordKind.HARD_STATE, f"a twin holds {kind!r}"
                self._apply(kind, key, payload)
        if verdict.damaged:
            for log in self.logs.values():
                log.found_loss = True

    def _apply(self, kind: RecordKind, key: int, payload: memoryview) -> None:
        if kind is RecordKind.HARD_STATE:
            self.hard_states[key] = HardState(*PAIR.unpack(payload))
        elif kind is RecordKind.CREATED:
            self.logs[key] = _Replayed(key, bytes(payload).decode(), LogStart(), 0, 0)
        elif kind is RecordKind.RESET:
            self._replace(key, *ONE.unpack(payload))
        elif kind is RecordKind.CARRIED:
            # From an older checkpoint on, the originals were read already.
            lsn, carried = CARRIED.unpack_from(payload)
            if lsn == self._checkpoint_lsn:
                self._apply(RecordKind(carried), key, payload[CARRIED.size :])
        elif key in self.logs:
            self._apply_to_log(kind, self.logs[key], payload)
        # Else: a log whose creation fell into a gap. Its replica is in the manifest and finds itself lost.

    def _apply_to_log(self, kind: RecordKind, log: _Replayed, payload: memoryview) -> None:
        if kind is RecordKind.FULL:
            if not log.full(payload):
                log.found_loss = True
        elif kind is RecordKind.TRUNCATE:
            log.truncate(*PAIR.unpack(payload))
        elif kind is RecordKind.LOG_START:
            log.move_start(LogStart(*START.unpack(payload)))
        elif kind is RecordKind.MARK:
            log.marked(*MARK.unpack(payload))
        elif kind is RecordKind.SYNCED:
            log.synced(*PAIR.unpack(payload))
        elif kind is RecordKind.POLICY:
            log.change_policy(*POLICY.unpack(payload))
        elif kind is RecordKind.DELETED:
            self.gone.append(self.logs.pop(log.log_id))
            if payload:
                (replica_id,) = ONE.unpack(payload)
                self.hard_states.pop(replica_id, None)
                self.lost.discard(replica_id)

    def _replace(self, new: int, old: int) -> None:
        if old in self.logs:
            self.gone.append(self.logs.pop(old))
        self.replaced = {key: new if to == old else to for key, to in self.replaced.items()}
        self.replaced[old] = new


def _from_state(state: LogState) -> _Replayed:
    return _Replayed(
        state.log_id,
        state.name,
        state.start,
        state.end_index,
        state.end_term,
        state.recovering,
        state.incarnation,
        policy=FlushPolicy(interval_ms=state.interval_ms, interval_records=state.interval_records),
        boot_id=state.boot_id,
        power_lost=state.power_lost,
    )


def recover_home(
    disk: Disk,
    home: str,
    logs_directory: str,
    *,
    settings: StorageSettings,
    rng: random.Random,
    readers: Readers,
) -> Recovered:
    """Recover one home; it stays locked. Makes a new one where there is none. Blocks.

    Raises `DiskError`; then it may be tried again from the start.
    """
    disk.make_directory(home)
    disk.make_directory(logs_directory)
    lock = disk.lock(os.path.join(home, "lock"))
    try:
        manifest = Manifest(disk, home)
        manifest.load()
        checkpoint, all_lost = _read_checkpoint(disk, home, manifest)
        frames, file_missing = scan(disk, home, checkpoint)
        verdict = judge(frames, checkpoint, file_missing=file_missing and checkpoint.generation > 0)
        _write_again(disk, home, verdict.unsure)
        replay = _Replay(checkpoint)
        replay.run(verdict)
        if all_lost:
            replay.lost |= {entry.replica_id for entry in manifest.entries}
        recorder = Recorder(settings.recent_bytes)
        writer = _new_generation(disk, home, logs_directory, settings, rng, checkpoint, verdict)
        rebuild = _Rebuild(disk, logs_directory, settings, recorder, readers, writer)
        logs = rebuild.run(replay)
    except BaseException:
        lock.close()
        raise
    return Recovered(
        home,
        lock,
        manifest,
        recorder,
        readers,
        writer.journal,
        writer,
        logs,
        dict(replay.hard_states),
        set(replay.lost),
    )


def _read_checkpoint(disk: Disk, home: str, manifest: Manifest) -> tuple[Checkpoint, bool]:
    """The newest whole checkpoint, and whether all that a home must have held is gone with it."""
    none = Checkpoint(
        generation=0, seed=0, lsn=0, journal_file=0, journal_position=0, logs=[], hard_states={}
    )
    problem = "it is missing"
    try:
        payload = Document(disk, home, "checkpoint").read()
    except DamagedDocument as error:
        payload, problem = None, str(error)
    if payload is not None:
        return decode_checkpoint(payload), False
    if not manifest.exists() and _never_used(disk, home):
        return none, False
    aside = _set_home_aside(disk, home)
    _log.critical(
        "%s: no checkpoint can be read: %s. Its %d replicas are lost; checkpoints and journal are kept in %s",
        home,
        problem,
        len(manifest.entries),
        aside,
    )
    return none, True


def _set_home_aside(disk: Disk, home: str) -> str:
    """Copy what a person may still make sense of, before the new generation deletes it; returns where to.

    Copies, durable before anything is deleted: a crash in between finds all of it again.
    """
    numbers = [int(name[8:]) for name in disk.list(home) if re.fullmatch(r"damaged-\d+", name)]
    aside = os.path.join(home, f"damaged-{max(numbers, default=0) + 1}")
    disk.make_directory(aside)
    names = [name for name in disk.list(home) if name.startswith(("checkpoint-", "journal-"))]
    for name in names:
        set_aside(disk, os.path.join(home, name), os.path.join(aside, name))
    disk.sync_directory(aside)
    return aside


def set_aside(disk: Disk, path: str, copy_path: str, position: int = 0) -> None:
    """Copy what can be read of a file from `position` on; durable but for the name."""
    source, copy = disk.open(path), disk.open(copy_path, create=True)
    try:
        copy.truncate(0)
        size = max(source.size() - position, 0)
        for at in range(0, size, _COPY_BYTES):
            piece = min(_COPY_BYTES, size - at)
            try:
                copy.pwritev([source.pread(piece, position + at)], at)
            except DiskError as error:
                if not error.is_damage:
                    raise
        copy.sync()
    finally:
        source.close()
        copy.close()


def _never_used(disk: Disk, home: str) -> bool:
    """Whether no journal file holds more than its opening frame: then the first start ended early."""
    for number in journal_numbers(disk, home):
        file = disk.open(os.path.join(home, journal_name(number)))
        try:
            rest = bytes(file.pread(file.size(), BLOCK_SIZE))
        finally:
            file.close()
        if rest.count(0) != len(rest):
            return False
    return True


def _write_again(disk: Disk, home: str, unsure: list[FoundFrame]) -> None:
    """Make certain what may have been read from the page cache only.

    A former sync may have failed and left its pages clean, so a sync alone would not write them.
    """
    by_file: dict[str, list[FoundFrame]] = {}
    for frame in unsure:
        by_file.setdefault(frame.file_name, []).append(frame)
    for name, frames in by_file.items():
        file = disk.open(os.path.join(home, name))
        try:
            for frame in frames:
                file.pwritev([frame.stored], frame.position)
            file.sync()
        finally:
            file.close()
    disk.sync_directory(home)


def _new_generation(
    disk: Disk,
    home: str,
    logs_directory: str,
    settings: StorageSettings,
    rng: random.Random,
    checkpoint: Checkpoint,
    verdict: Verdict,
) -> Writer:
    number = max([checkpoint.journal_file, *journal_numbers(disk, home)]) + 1
    journal = Journal(
        disk,
        home,
        settings,
        generation=checkpoint.generation + 1,
        seed=rng.getrandbits(32),
        number=number,
        lsn=verdict.highest_lsn,
    )
    place = journal.open_generation()
    return Writer(
        disk, home=home, logs_directory=logs_directory, journal=journal, place=place, settings=settings
    )


def _ends_with(loaded: Loaded, replayed: _Replayed) -> bool:
    """Whether the entry before the log's start is the one that the start names."""
    if not loaded.segments:
        return not loaded.short
    last = loaded.segments[-1]
    return last.last_index == replayed.base_last and last.last_term == replayed.base_term


class _Rebuild:
    """Logs made from what was replayed, and their files made to agree with them."""

    def __init__(
        self,
        disk: Disk,
        logs_directory: str,
        settings: StorageSettings,
        recorder: Recorder,
        readers: Readers,
        writer: Writer,
    ) -> None:
        self._disk = disk
        self._logs_directory = logs_directory
        self._settings = settings
        self._recorder = recorder
        self._readers = readers
        self._writer = writer

    def run(self, replay: _Replay) -> dict[int, Log]:
        """All logs, durable, under a checkpoint of the new generation."""
        writer, recorder = self._writer, self._recorder
        logs = {log_id: self._log(replayed) for log_id, replayed in replay.logs.items()}
        writer.hard_states = dict(replay.hard_states)
        writer.lost = set(replay.lost)
        writer.replaced = dict(replay.replaced)
        writer.apply_recovered([action for _, _, action in recorder.take(recorder.pending_bytes)])
        for log in logs.values():
            # Marks made on the way, and logs without any action.
            log.files.recovering, log.files.incarnation = log.recovering, log.incarnation
            log.files.power_lost = log.power_lost
        for replayed in replay.gone:
            files = LogFiles(
                self._readers.resources, self._logs_directory, name=replayed.name, log_id=replayed.log_id
            )
            writer.move_to_trash(files)
        writer.checkpoint()
        failed = [log for log in logs.values() if log.files.failure is not None]
        if failed:
            raise failed[0].files.failure or AssertionError
        recorder.written = recorder.recorded
        recorder.forget_written()
        recorder.touched.clear()
        for log in logs.values():
            log.durable_up_to(recorder.recorded)
        return logs

    def _files(self, replayed: _Replayed) -> LogFiles:
        resources = self._readers.resources
        return LogFiles(resources, self._logs_directory, name=replayed.name, log_id=replayed.log_id)

    def _log(self, replayed: _Replayed) -> Log:
        files = LogFiles(
            self._readers.resources, self._logs_directory, name=replayed.name, log_id=replayed.log_id
        )
        if replayed.policy.is_interval:
            return self._interval_log(files, replayed)
        start, tail = replayed.start, replayed.tail
        opener = max(
            (at for at, each in enumerate(tail) if each.opens_segment and each.index <= start.index + 1),
            default=None,
        )
        if start.index >= replayed.last_index:
            loaded, tail, opener = self._load(files, start, -1, False), [], None
        elif opener is not None:
            # All segments on disk lie before the one that holds the start.
            loaded, tail = self._load(files, start, -1, False), tail[opener:]
            start = LogStart(tail[0].index - 1, tail[0].prev_term, tail[0].base_offset)
        else:
            goes_on = bool(tail) and not tail[0].opens_segment
            loaded = self._load(files, start, replayed.base_last, goes_on)
        if loaded.short:
            self._keep_damaged_end(files, loaded, replayed.base_last)
        found_loss = replayed.found_loss or loaded.short or loaded.unknown
        log = Log(
            files,
            self._recorder,
            self._readers,
            segment_size_bytes=self._settings.segment_size_bytes,
            start=start,
            segments=loaded.segments,
            recovering=replayed.recovering or found_loss,
            incarnation=replayed.incarnation + found_loss,
        )
        self._writer.adopt(files, loaded, LogEnd(log.last_index, log.last_term, log.next_offset))
        if loaded.segments:
            self._load_notes(log)
        try:
            log.append([each.frame for each in tail])
        except BrokenChain:
            log.recovering = True
            log.incarnation = replayed.incarnation + 1
        if start != replayed.start and log.last_index >= replayed.start.index:
            log.set_start(index=replayed.start.index, term=replayed.start.term, offset=replayed.start.offset)
        return log

    def _keep_damaged_end(self, files: LogFiles, loaded: Loaded, base_last: int) -> None:
        """Entries that a checkpoint names are missing at the end: what lies there is no torn tail.

        It cannot be served, as nobody knows what it was, and the leader sends it anew; the bytes are kept
        beside the log's files for a person to look at.
        """
        ends = [
            (file.first_index, 0)
            for file in loaded.stale
            if file.first_index <= base_last and file.first_index > files.start.index
        ]
        if loaded.segments:
            ends.append((loaded.segments[-1].first_index, loaded.segments[-1].size))
        for first_index, position in ends:
            path = os.path.join(files.directory, segment_name(first_index))
            copy = f"{path}.{position}.damaged"
            try:
                if self._disk.exists(path):
                    set_aside(self._disk, path, copy, position)
            except DiskError as error:
                _log.warning("%s: the damaged end of %s cannot be kept: %s", files.name, path, error)
            else:
                _log.error(
                    "%s: entries up to %d were durable, but %s cannot be told apart from position %d on; "
                    "its bytes from there are kept in %s",
                    files.name,
                    base_last,
                    path,
                    position,
                    copy,
                )
        if files.made:
            self._disk.sync_directory(files.directory)

    def _interval_log(self, files: LogFiles, replayed: _Replayed) -> Log:
        """What is known to be synced, and behind it what of the segments continues it."""
        start = replayed.start
        loaded = self._load(files, start, replayed.base_last, True)
        files.policy = replayed.policy
        if replayed.start_unsynced and not _ends_with(loaded, replayed):
            # The entries before the start were never synced: what lies in their place may be anything.
            loaded.stale += [segment.file for segment in loaded.segments]
            loaded.segments, loaded.made_anew, loaded.unknown = [], [], False
            loaded.short = True
        tail = Tail() if loaded.short else self._find_tail(files, start, loaded, replayed.cut_entries)
        loaded.stale = [file for file in loaded.stale if file.first_index not in tail.opened]
        if loaded.segments and loaded.segments[-1].last_index <= start.index:
            last = loaded.segments[-1]
            if tail.kept.get(last.file, last.size) == last.size:
                # Nothing behind the start goes on in it.
                loaded.stale.append(loaded.segments.pop().file)
                tail.kept.pop(last.file, None)
        power_lost = bool(replayed.boot_id) and replayed.boot_id != self._disk.boot_id()
        damaged = loaded.short or loaded.unknown or tail.broken
        if power_lost:
            # It explains everything behind what was synced; before the start nothing matters any more.
            damaged = (loaded.short or loaded.unknown) and replayed.base_last > start.index
        damaged = damaged or replayed.found_loss or bool(replayed.tail)
        marked = replayed.recovering and not replayed.power_lost
        log = Log(
            files,
            self._recorder,
            self._readers,
            segment_size_bytes=self._settings.segment_size_bytes,
            start=start,
            segments=loaded.segments,
            recovering=replayed.recovering or damaged or power_lost,
            power_lost=(replayed.recovering or power_lost) and not damaged and not marked,
            # Also of one that is marked: what it has acknowledged since may be gone too.
            incarnation=replayed.incarnation + (damaged or power_lost),
        )
        self._writer.adopt(files, loaded, LogEnd(log.last_index, log.last_term, log.next_offset), tail)
        if loaded.segments:
            self._load_notes(log)
        files.found = dict(tail.opened)
        log.append(tail.frames)
        return log

    def _find_tail(self, files: LogFiles, start: LogStart, loaded: Loaded, cut: set[tuple[int, int]]) -> Tail:
        end = End(start.index, start.term, start.offset, start.time_ms)
        last = loaded.segments[-1] if loaded.segments else None
        if last is not None:
            row = last.last_row
            end = End(row.index, row.term, row.next_offset, row.append_time_ms)
        return find_tail(
            files,
            end=end,
            last=last.file if last is not None else None,
            position=last.size if last is not None else 0,
            firsts={file.first_index for file in loaded.stale},
            cut=cut,
        )

    def _load_notes(self, log: Log) -> None:
        """What was known of its damage, as far as it is still of the same entries."""
        problem = log.quarantine.load(self._disk, log.files.directory)
        if problem is not None:
            _log.warning("%s: notes of damage are lost: %s", log.name, problem)
        before = log.quarantine.encode()
        for damage in log.quarantine:
            inside = log.start.index < damage.first_index and damage.last_index <= log.last_index
            row = log.row(damage.first_index) if inside else None
            if row is None or (row.term, row.position) != (damage.term, damage.position):
                log.quarantine.lift(damage.first_index)
        for first, sealed in list(log.quarantine.sealed.items()):
            if log.term(sealed.last_index) != sealed.last_term:
                del log.quarantine.sealed[first]
        if log.quarantine.encode() == before:
            return
        # What the journal writes again is whole again: a later start must not think otherwise.
        try:
            document(self._disk, log.files.directory).write(log.quarantine.encode())
        except DiskError as error:
            _log.warning("%s: notes of damage cannot be renewed: %s", log.name, error)

    def _load(self, files: LogFiles, start: LogStart, last_index: int, goes_on: bool) -> Loaded:
        files.start = start
        return load_segments(self._disk, files, last_index=last_index, goes_on=goes_on)
