"""Coming back: one shard's home, from its newest checkpoint and the journal behind it.

STORAGE.md 3 in its order: read in memory, make certain what was only read, then touch segments, sync,
and begin a new generation with a checkpoint. Until that checkpoint is durable nothing that was read
before is changed in a way that a second crash could not repeat. It runs before there is a loop.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field

from laminar.log.codec import BLOCK_SIZE, MARK, ONE, PAIR, START, RecordKind
from laminar.log.disk import Disk, Lock
from laminar.log.document import Document
from laminar.log.errors import BrokenChain, DamagedDocument
from laminar.log.index import Loaded, load_segments
from laminar.log.journal import Journal, journal_name, journal_numbers
from laminar.log.log import Log
from laminar.log.manifest import Manifest
from laminar.log.pending import Recorder
from laminar.log.reading import Readers
from laminar.log.replay import FoundFrame, Verdict, judge, scan
from laminar.log.rows import HEADER
from laminar.log.settings import StorageSettings
from laminar.log.state import Checkpoint, HardState, LogEnd, LogFiles, LogStart, LogState, decode_checkpoint
from laminar.log.writer import Writer

_OPENS_SEGMENT = 1


@dataclass(slots=True)
class Recovered:
    """A home whose logs are as durable as they ever were, with a new generation open."""

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

    def move_start(self, start: LogStart) -> None:
        if start.index > self.last_index:
            self.tail.clear()
            self.base_last, self.base_term = start.index, start.term
        self.start = start


class _Replay:
    """All records of a journal, applied in memory."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.logs = {state.log_id: _from_state(state) for state in checkpoint.logs}
        self.gone: list[_Replayed] = []
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
                log.recovering = True

    def _apply(self, kind: RecordKind, key: int, payload: memoryview) -> None:
        if kind is RecordKind.HARD_STATE:
            self.hard_states[key] = HardState(*PAIR.unpack(payload))
        elif kind is RecordKind.CREATED:
            self.logs[key] = _Replayed(key, bytes(payload).decode(), LogStart(), 0, 0)
        elif kind is RecordKind.RESET:
            self._replace(key, *ONE.unpack(payload))
        elif key in self.logs:
            self._apply_to_log(kind, self.logs[key], payload)
        # Else: a log whose creation fell into a gap. Its replica is in the manifest and finds itself lost.

    def _apply_to_log(self, kind: RecordKind, log: _Replayed, payload: memoryview) -> None:
        if kind is RecordKind.FULL:
            if not log.full(payload):
                log.recovering = True
        elif kind is RecordKind.TRUNCATE:
            log.cut(PAIR.unpack(payload)[0])
        elif kind is RecordKind.LOG_START:
            log.move_start(LogStart(*START.unpack(payload)))
        elif kind is RecordKind.MARK:
            recovering, log.incarnation, _ = MARK.unpack(payload)
            log.recovering = bool(recovering)
        elif kind is RecordKind.DELETED:
            self.gone.append(self.logs.pop(log.log_id))

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
    try:
        payload = Document(disk, home, "checkpoint").read()
    except DamagedDocument:
        payload = None
    if payload is not None:
        return decode_checkpoint(payload), False
    return none, manifest.exists() or not _never_used(disk, home)


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
        for replayed in replay.gone:
            files = LogFiles(self._disk, self._logs_directory, name=replayed.name, log_id=replayed.log_id)
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

    def _log(self, replayed: _Replayed) -> Log:
        files = LogFiles(self._disk, self._logs_directory, name=replayed.name, log_id=replayed.log_id)
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
        log = Log(
            files,
            self._recorder,
            self._readers,
            segment_size_bytes=self._settings.segment_size_bytes,
            start=start,
            segments=loaded.segments,
            recovering=replayed.recovering or loaded.short or loaded.unknown,
            incarnation=replayed.incarnation,
        )
        self._writer.adopt(files, loaded, LogEnd(log.last_index, log.last_term, log.next_offset))
        try:
            log.append([each.frame for each in tail])
        except BrokenChain:
            log.recovering = True
        if start != replayed.start and log.last_index >= replayed.start.index:
            log.set_start(index=replayed.start.index, term=replayed.start.term, offset=replayed.start.offset)
        return log

    def _load(self, files: LogFiles, start: LogStart, last_index: int, goes_on: bool) -> Loaded:
        files.start = start
        return load_segments(self._disk, files, last_index=last_index, goes_on=goes_on)
