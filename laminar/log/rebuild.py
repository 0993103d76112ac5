"""Logs made from what was replayed, and their files made to agree with them.

Segments are touched here for the first time, when what was read of the journal is certain (`recovery.py`).
"""

from __future__ import annotations

import logging

from laminar.log.aside import set_aside
from laminar.log.disk import Disk
from laminar.log.errors import BrokenChain, DiskError
from laminar.log.index import Loaded, load_segments
from laminar.log.log import Log
from laminar.log.pending import Recorder
from laminar.log.quarantine import document
from laminar.log.reading import Readers
from laminar.log.replayed import Replay, Replayed
from laminar.log.settings import StorageSettings
from laminar.log.state import LogEnd, LogFiles, LogStart
from laminar.log.tail import End, Tail, find_tail
from laminar.log.writer import Writer

_log = logging.getLogger("laminar.recovery")


def _ends_with(loaded: Loaded, replayed: Replayed) -> bool:
    """Whether the entry before the log's start is the one that the start names."""
    if not loaded.segments:
        return not loaded.short
    last = loaded.segments[-1]
    return last.last_index == replayed.base_last and last.last_term == replayed.base_term


class Rebuild:
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

    def run(self, replay: Replay) -> dict[int, Log]:
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
            writer.move_to_trash(self._files(replayed))
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

    def _files(self, replayed: Replayed) -> LogFiles:
        resources = self._readers.resources
        return LogFiles(resources, self._logs_directory, name=replayed.name, log_id=replayed.log_id)

    def _log(self, replayed: Replayed) -> Log:
        files = self._files(replayed)
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
        set_aside(self._disk, files, loaded, replayed.base_last, everything=replayed.found_loss)
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
            self._load_notes(log, loaded)
        try:
            log.append([each.frame for each in tail])
        except BrokenChain:
            log.recovering = True
            log.incarnation = replayed.incarnation + 1
        if start != replayed.start and log.last_index >= replayed.start.index:
            log.set_start(index=replayed.start.index, term=replayed.start.term, offset=replayed.start.offset)
        return log

    def _interval_log(self, files: LogFiles, replayed: Replayed) -> Log:
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
            self._load_notes(log, loaded)
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

    def _load_notes(self, log: Log, loaded: Loaded) -> None:
        """What was known of its damage, as far as it is still of the same entries, and the holes in it."""
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
        for hole in loaded.holes:
            if log.quarantine.add(hole):
                _log.error("%s: %s", log.name, hole.error(log.files.directory))
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
