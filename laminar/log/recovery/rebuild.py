"""Make the logs of a storage from the replayed journal, and make their files agree with them.

This is the last step of a recovery, and the only one that changes segments. When it begins, all frames that
were read from the journal are durable (`store.py`).
"""

from __future__ import annotations

import logging

from laminar.log.commit.segment_writer import SegmentWriter
from laminar.log.disk.disk import Disk
from laminar.log.disk.errors import BrokenChain, DiskError
from laminar.log.format.checkpoint_state import LogEnd, LogStart
from laminar.log.format.settings import StorageSettings
from laminar.log.partition_log.changes import ChangeQueue
from laminar.log.partition_log.log import Log
from laminar.log.partition_log.readers import SegmentReader
from laminar.log.recovery.replay import Replay, Replayed
from laminar.log.recovery.salvage import preserve_damaged_tail
from laminar.log.segment.loading import Loaded, load_segments
from laminar.log.segment.log_files import LogFiles
from laminar.log.segment.quarantine import document

_log = logging.getLogger("laminar.recovery")


class Rebuild:
    """The step of recovery that makes the logs, and makes their files agree with them; `run` it once."""

    def __init__(
        self,
        disk: Disk,
        logs_directory: str,
        settings: StorageSettings,
        changes: ChangeQueue,
        readers: SegmentReader,
        writer: SegmentWriter,
    ) -> None:
        self._disk = disk
        self._logs_directory = logs_directory
        self._settings = settings
        self._changes = changes
        self._readers = readers
        self._writer = writer

    def run(self, replay: Replay) -> dict[int, Log]:
        """Return all logs, by log id; all their entries are durable and in the new generation's checkpoint.

        Raises:
            StorageError: A segment or the checkpoint cannot be written; recovery may be retried.
        """
        writer, changes = self._writer, self._changes
        logs = {log_id: self._log(replayed) for log_id, replayed in replay.logs.items()}
        writer.hard_states = dict(replay.hard_states)
        writer.lost = set(replay.lost)
        writer.replaced = dict(replay.replaced)
        writer.apply_recovered([action for _, _, action in changes.take(changes.pending_bytes)])
        for log in logs.values():
            # `_log` may have changed these without an action for the writer.
            log.files.recovering, log.files.incarnation = log.recovering, log.incarnation
            log.files.power_lost, log.files.least_term = log.power_lost, log.least_term
        for replayed in replay.gone:
            writer.move_to_trash(self._files(replayed))
        writer.checkpoint()
        failed = [log for log in logs.values() if log.files.failure is not None]
        if failed:
            raise failed[0].files.failure or AssertionError
        changes.written = changes.recorded
        changes.evict_written()
        changes.touched.clear()
        changes.counted = changes.recorded
        return logs

    def _files(self, replayed: Replayed) -> LogFiles:
        resources = self._readers.resources
        return LogFiles(resources, self._logs_directory, name=replayed.name, log_id=replayed.log_id)

    def _log(self, replayed: Replayed) -> Log:
        files = self._files(replayed)
        files.policy = replayed.policy
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
        preserve_damaged_tail(self._disk, files, loaded, replayed.base_last, everything=replayed.found_loss)
        damaged = replayed.found_loss or loaded.short or loaded.unknown
        # A log that was recovering for another reason than a power loss stays so.
        only_power = (replayed.power_lost or not replayed.recovering) and not damaged
        log = Log(
            files,
            self._changes,
            self._readers,
            segment_size_bytes=self._settings.segment_size_bytes,
            start=start,
            segments=loaded.segments,
            recovering=replayed.recovering or damaged or replayed.lost_power,
            power_lost=(replayed.recovering or replayed.lost_power) and only_power,
            # A new incarnation even if it was recovering already: what it has acknowledged since may be
            # lost too.
            incarnation=replayed.incarnation + (damaged or replayed.lost_power),
            least_term=replayed.least_term,
        )
        self._writer.adopt(files, loaded, LogEnd(log.last_index, log.last_term, log.next_offset))
        if loaded.segments:
            self._load_notes(log, loaded)
        try:
            log.append([each.frame for each in tail])
        except BrokenChain:
            log.recovering, log.power_lost = True, False
            log.incarnation = replayed.incarnation + 1
        if start != replayed.start and log.last_index >= replayed.start.index:
            log.set_start(index=replayed.start.index, term=replayed.start.term, offset=replayed.start.offset)
        return log

    def _load_notes(self, log: Log, loaded: Loaded) -> None:
        """Load the record of a log's damage, drop what does not fit its entries, and add the holes found."""
        problem = log.quarantine.load(self._disk, log.files.directory)
        if problem is not None:
            _log.warning("%s: the record of its damage is lost: %s", log.name, problem)
        before = log.quarantine.encode()
        for damage in log.quarantine:
            inside = log.start.index < damage.first_index and damage.last_index <= log.last_index
            row = log.index_entry(damage.first_index) if inside else None
            if row is None or (row.term, row.position) != (damage.term, damage.position):
                log.quarantine.clear(damage.first_index)
        for first, sealed in list(log.quarantine.sealed.items()):
            if log.term(sealed.last_index) != sealed.last_term:
                log.quarantine.forget_verified(first)
        unsealed = log.quarantine.unsealed
        if unsealed is not None and log.term(unsealed.last_index) != unsealed.last_term:
            log.quarantine.forget_verified(unsealed.segment)
        for hole in loaded.holes:
            if log.quarantine.add(hole):
                _log.error("%s: %s", log.name, hole.error(log.files.directory))
        if log.quarantine.encode() == before:
            return
        # Entries that the journal has written again are intact again, so the document must not keep their
        # damage for a later start.
        try:
            document(self._disk, log.files.directory).write(log.quarantine.encode())
        except DiskError as error:
            _log.warning("%s: the record of its damage cannot be rewritten: %s", log.name, error)

    def _load(self, files: LogFiles, start: LogStart, last_index: int, goes_on: bool) -> Loaded:
        files.start = start
        return load_segments(self._disk, files, last_index=last_index, goes_on=goes_on)
