"""Verify every byte of a folder of logs, and report the place of everything that is wrong.

It reads segments frame by frame, compares each index row with its frame, and reads both copies of each
document and the journal's frames (`journal_check`). It changes nothing. After the checkpoint a crash may have
left bytes that the next start writes again or removes: what is wrong there is a *note*, not damage. In a
folder that is in use only the entries that the checkpoint covers do not change; the rest is not verified.

The rule that must hold over all segments of a log (laminarmq's P9): each segment begins with the entry whose
index is its name, where the segment before it ended, by index, term and offset. Inside, each frame follows
the one before it, and row k of the index is that of frame k.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from laminar.log.commit.end_mark import NAME
from laminar.log.commit.journal import journal_name, journal_numbers
from laminar.log.disk.disk import File, ReadOnlyDisk
from laminar.log.disk.document import Document
from laminar.log.disk.errors import DiskError, NotALogFolder
from laminar.log.format.index_entry import ROW_SIZE, row_is_whole
from laminar.log.key_index.layout import KeyIndexError
from laminar.log.key_index.lookup import KeyIndex
from laminar.log.segment.frame_scan import Gap, IntactFrame, scan_frames
from laminar.log.segment.index_rebuild import packed, read_damaged
from laminar.log.segment.segment_file import INDEX_HEAD_SIZE, index_head
from laminar.log.tools.folder_scan import Folder, LogPlace, SegmentPlace, scan_folder, size_of
from laminar.log.tools.journal_check import check_journal

_COPY = re.compile(r"(.+)-\d+\.[ab]")
# A document that is in use is read up to this number of times, with pauses, before it counts as damaged.
_PATIENCE = 20
_PAUSE_S = 0.02
# What is wrong in a log that is in use is read again this number of times before it counts.
_LOOKS = 2
Progress = Callable[[int], None]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that was found: `size` wrong bytes of a file from `position` on, described by `what`.

    A `size` of 0 means that bytes are missing there. `severity` is "damage", or "note" for a fault that the
    next start corrects by itself or that has no consequence. `first_offset` and `next_offset` are those of
    the damaged records; None if they are not known.
    """

    file: str
    position: int
    size: int
    what: str
    severity: str = "damage"
    first_offset: int | None = None
    next_offset: int | None = None


class Verified(msgspec.Struct, kw_only=True):
    """The result of a verification: its findings, and the number of files and bytes that were read.

    `unverified` has a line for each part that was not verified, with the reason. `live` is set if a process
    has the folder open.
    """

    path: str
    kind: str
    live: bool
    findings: list[Finding]
    unverified: list[str]
    files: int
    bytes: int
    segments: int = 0
    """Segments of which something was read."""

    @property
    def damaged(self) -> bool:
        """Whether any finding is damage."""
        return any(finding.severity == "damage" for finding in self.findings)

    @property
    def verdict(self) -> Literal["damaged", "whole", "in part", "nothing"]:
        """The result in a word: "damaged" if there is damage, "whole" if everything was read and is intact.

        If parts could not be verified it is "in part", or "nothing" if no segment was read.
        """
        if self.damaged:
            return "damaged"
        if not self.unverified:
            return "whole"
        return "in part" if self.segments else "nothing"


@dataclass(slots=True)
class _Chain:
    """The last entry of a log that was read, with which the next frame is compared.

    `offset` is the offset after the entry. A value is None if it is unknown, as after a gap.
    """

    index: int | None = None
    term: int | None = None
    offset: int | None = None
    time_ms: int | None = None


def total_bytes(path: str, *, disk: ReadOnlyDisk | None = None) -> int:
    """Return about how many bytes `verify` will read: the total for a display of its progress."""
    disk = disk or ReadOnlyDisk()
    folder = scan_folder(disk, os.path.abspath(path))
    segments = [segment for log in folder.logs for segment in log.segments]
    journals = [
        os.path.join(store.directory, journal_name(number))
        for store in folder.stores
        if not store.live
        for number in journal_numbers(disk, store.directory)
    ]
    journals += [os.path.join(store.directory, NAME) for store in folder.stores if not store.live]
    files = ((each.size, each.index_size, each.key_index_size) for each in segments)
    return sum(size or 0 for sizes in files for size in sizes) + sum(
        size_of(disk, path) or 0 for path in journals
    )


def verify(
    path: str, *, disk: ReadOnlyDisk | None = None, progress: Progress = lambda size: None
) -> Verified:
    """Verify every byte of a folder of logs, a log or a segment; return the result. Blocks.

    `progress` is called with the number of bytes read since its last call. Raises as `inspect` does.
    """
    disk = disk or ReadOnlyDisk()
    folder = scan_folder(disk, os.path.abspath(path))
    return _Verification(disk, folder, progress).run()


@dataclass(slots=True)
class _Verification:
    disk: ReadOnlyDisk
    folder: Folder
    progress: Progress
    findings: list[Finding] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    files: int = 0
    read_bytes: int = 0
    segments: int = 0

    def run(self) -> Verified:
        folder = self.folder
        if folder.kind == "node":
            self._documents(folder.path)
        for store in folder.stores:
            self._documents(store.directory)
            if not store.known:
                what = "the manifest was lost: which replicas were here is asked of the catalog by the node"
                self._found(store.directory, 0, 0, what, severity="note")
            if store.checkpoint is not None and not store.live:
                for number in journal_numbers(self.disk, store.directory):
                    self._journal(os.path.join(store.directory, journal_name(number)))
                if self.disk.exists(os.path.join(store.directory, NAME)):
                    self._journal(os.path.join(store.directory, NAME))
                self.findings += [
                    Finding(
                        file=each.file,
                        position=each.position,
                        size=each.size,
                        what=each.what,
                        severity="note" if each.note else "damage",
                    )
                    for each in check_journal(self.disk, store.directory, store.checkpoint)
                ]
            else:
                why = "it is being written" if store.live else "no checkpoint tells its generation"
                self.unverified.append(f"{store.directory}: the journal, as {why}")
        for log in folder.logs:
            self._documents(log.directory)
            self._log(log)
            if folder.live:
                self._confirm_findings(log)
        return Verified(
            path=folder.path,
            kind=folder.kind,
            live=folder.live,
            findings=self.findings,
            unverified=self.unverified,
            files=self.files,
            bytes=self.read_bytes,
            segments=self.segments,
        )

    def _found(self, file: str, position: int, size: int, what: str, **more: int | str | None) -> None:
        self.findings.append(
            msgspec.convert({"file": file, "position": position, "size": size, "what": what, **more}, Finding)
        )

    def _read(self, size: int) -> None:
        self.read_bytes += size
        self.progress(size)

    # Documents

    def _documents(self, directory: str) -> None:
        """Check every copy of every document in a directory."""
        for name in sorted({found[1] for found in map(_COPY.fullmatch, self.disk.list(directory)) if found}):
            copies = self._copies(Document(self.disk, directory, name))
            self.files += len(copies)
            numbers = [number for number, _, _ in copies]
            # Copies with two numbers: a crash interrupted `Document.write`, and the next write removes the
            # older.
            cut_short = len(set(numbers)) > 1 and any(isinstance(payload, bytes) for _, _, payload in copies)
            severity = "note" if cut_short else "damage"
            for _, file, payload in copies:
                path = os.path.join(directory, file)
                size = size_of(self.disk, path) or 0
                self._read(size)
                if isinstance(payload, str):
                    self._found(path, 0, size, f"this copy of the {name} {payload}", severity=severity)
            if copies and numbers.count(numbers[0]) == 1 and not self.folder.live:
                path = os.path.join(directory, copies[0][1])
                self._found(path, 0, 0, f"the {name} has one copy instead of two", severity=severity)

    def _copies(self, document: Document) -> list[tuple[int, str, bytes | str]]:
        """Return all copies of a document, in the form of `Document.copies`.

        If a process has the folder open, and may be replacing the document, the copies are read again until
        all are whole, for a moment at most.
        """
        for _ in range(_PATIENCE if self.folder.live else 1):
            try:
                copies = document.copies()
            except DiskError as error:
                if not error.is_missing:
                    raise
                copies = []  # replaced meanwhile
            if copies and all(isinstance(payload, bytes) for _, _, payload in copies):
                break
            time.sleep(_PAUSE_S if self.folder.live else 0)
        return copies

    def _journal(self, path: str) -> None:
        self.files += 1
        self._read(size_of(self.disk, path) or 0)

    # Logs

    def _confirm_findings(self, log: LogPlace) -> None:
        """Read a log with findings again, and keep only those that are found again.

        The process that has the log open may have changed the bytes while they were read.
        """
        for _ in range(_LOOKS):
            findings = {each for each in self.findings if os.path.dirname(each.file) == log.directory}
            findings |= {each for each in self.findings if each.file == log.directory}
            if not findings:
                return
            time.sleep(_PAUSE_S)
            again = _Verification(self.disk, self.folder, lambda size: None)
            try:
                places = scan_folder(self.disk, log.directory).logs
            except (DiskError, NotALogFolder):
                places = []  # the log is gone
            for place in places:
                again._documents(place.directory)
                again._log(place)
            lasting = findings & set(again.findings)
            self.findings = [each for each in self.findings if each not in findings or each in lasting]

    def _log(self, log: LogPlace) -> None:
        chain = _Chain()
        state = log.state
        if state is None and self.folder.kind in ("node", "logs") and log.segments:
            if self.folder.live:
                self.unverified.append(f"{log.directory}: no checkpoint names it yet")
                return
            self._found(log.directory, 0, 0, "no checkpoint names this log", severity="note")
        whole = self.folder.kind != "segment"
        if state is not None and state.segment and whole:
            firsts = [segment.first_index for segment in log.segments if segment.size is not None]
            if not any(first <= state.start.index + 1 for first in firsts) or state.segment not in firsts:
                if self.folder.live:
                    what = "segments that the checkpoint names were removed meanwhile"
                    self.unverified.append(f"{log.directory}: {what}")
                else:
                    self._found(log.directory, 0, 0, "segments that the checkpoint names are missing")
        after_checkpoint = 0
        for place in log.segments:
            limit = None
            if state is None and self.folder.kind in ("node", "logs"):
                limit = 0
            elif state is not None:
                if place.first_index > state.segment or not state.segment:
                    limit = 0
                elif place.first_index == state.segment:
                    limit = state.end_position
            if limit is not None and self.folder.live:
                # What lies after the checkpoint may still change.
                if limit == 0:
                    after_checkpoint += 1
                    continue
                place.size = min(place.size or 0, limit)
            self._segment(log, place, chain, limit)
            self.segments += place.size is not None
            if limit and state is not None and chain.index is not None and not self.folder.live:
                end = (state.end_index, state.end_term, state.end_offset)
                if chain.index < end[0]:
                    what = f"the segment ends with entry {chain.index}, the checkpoint says {end[0]}"
                    self._found(place.path, place.size or 0, 0, what)
        if after_checkpoint:
            self.unverified.append(
                f"{log.directory}: {after_checkpoint} segments, as they are after the checkpoint"
            )

    def _segment(self, log: LogPlace, place: SegmentPlace, chain: _Chain, limit: int | None) -> None:
        self.files += 2
        if place.size is None:
            self._found(place.path, 0, 0, "the segment of this index is missing", severity="note")
            return
        if chain.index is not None and place.first_index != chain.index + 1:
            what = f"begins with entry {place.first_index}, the segment before ends with {chain.index}"
            self._found(place.path, 0, 0, what)
            chain.index = chain.term = chain.offset = None
        try:
            file = self.disk.open(place.path)
        except DiskError as error:
            if error.is_missing and self.folder.live:
                self.unverified.append(f"{place.path}: trimmed meanwhile")
                return
            raise
        try:
            self._frames(log, place, chain, limit, file)
        finally:
            file.close()
        if place.key_index_size is not None:
            self._key_index(log, place, chain)

    def _frames(
        self, log: LogPlace, place: SegmentPlace, chain: _Chain, limit: int | None, file: File
    ) -> None:
        assert place.size is not None
        index_file = self._index(log, place, "note" if limit == 0 else "damage")
        rows = memoryview(index_file)[INDEX_HEAD_SIZE:]
        slot = 0
        settled = 0
        done = 0
        for found in scan_frames(file, size=place.size, first_index=place.first_index, hints=rows):
            unsettled = limit is not None and (found.row.position if found.row else done) >= limit
            severity = "note" if unsettled else "damage"
            if isinstance(found, Gap):
                self._hole(place, found, chain, severity)
                count = 0 if found.last_index is None else found.last_index - found.first_index + 1
                self._skip_rows(place, rows, slot, count, found)
                end = found.position + found.size
            else:
                self._follows(place, found, chain, severity)
                self._row(place, rows, slot, found, severity)
                count = 1
                end = found.row.position + found.row.size
            slot += count
            if not unsettled:
                settled = slot
            self._read(end - done)
            done = end
        self._read(place.size - done)
        have = len(rows) // ROW_SIZE
        if len(rows) > slot * ROW_SIZE and not self.folder.live:
            position = INDEX_HEAD_SIZE + slot * ROW_SIZE
            size = len(rows) - slot * ROW_SIZE
            unsettled = limit is not None and slot >= settled and limit < (place.size or 0)
            what = "the index has rows for entries that the segment does not have"
            self._found(place.index_path, position, size, what, severity="note" if unsettled else "damage")
        if have < settled and place.index_size is not None:
            what = f"the index ends after {have} rows of {settled}; it is rebuilt at the next start"
            self._found(place.index_path, len(rows) + INDEX_HEAD_SIZE, 0, what)

    def _hole(self, place: SegmentPlace, hole: Gap, chain: _Chain, severity: str) -> None:
        offsets: dict[str, int | None] = {}
        if hole.row is not None:
            offsets = {"first_offset": hole.row.base_offset, "next_offset": hole.row.next_offset}
        last = hole.last_index
        entries = (
            f"entry {hole.first_index}" if last == hole.first_index else f"entries from {hole.first_index} on"
        )
        self._found(
            place.path, hole.position, hole.size, f"{entries}: {hole.why}", severity=severity, **offsets
        )
        chain.index, chain.term = last, hole.row.term if hole.row is not None else None
        chain.offset = hole.row.next_offset if hole.row is not None else None

    def _follows(self, place: SegmentPlace, found: IntactFrame, chain: _Chain, severity: str) -> None:
        """Check that an intact frame continues its log after `chain`, and set `chain` to its entry.

        All that does not fit becomes one finding.
        """
        header, row = found.header, found.row
        index = place.first_index if chain.index is None and row.position == 0 else chain.index
        if chain.index is not None:
            index = chain.index + 1
        wrong = []
        if index is not None and header.index != index:
            wrong.append(f"index {header.index} instead of {index}")
        if chain.term is not None and header.prev_term != chain.term:
            wrong.append(f"previous term {header.prev_term} instead of {chain.term}")
        if chain.offset is not None and header.base_offset != chain.offset:
            wrong.append(f"offset {header.base_offset} instead of {chain.offset}")
        if header.term < header.prev_term:
            wrong.append(f"term {header.term} after {header.prev_term}")
        if chain.time_ms is not None and header.append_time_ms < chain.time_ms:
            wrong.append(f"append time {header.append_time_ms} after {chain.time_ms}")
        if header.opens_segment and row.position:
            wrong.append("it opens a segment, but is not the first frame of its file")
        if wrong:
            what = f"entry {header.index} does not follow the one before: {', '.join(wrong)}"
            self._found(place.path, row.position, row.size, what, severity=severity)
        chain.index, chain.term = header.index, header.term
        chain.offset, chain.time_ms = header.next_offset, header.append_time_ms

    # Indexes

    def _key_index(self, log: LogPlace, place: SegmentPlace, chain: _Chain) -> None:
        """Verify a segment's key index; `chain` names the last entry of the segment.

        A fault of it is only a note: searches then scan the segment, and the key index is built again.
        """
        self.files += 1
        self._read(place.key_index_size or 0)
        path, what = place.key_index_path, ""
        try:
            index = KeyIndex(self.disk.open(path))
            index.check()
        except DiskError as error:
            if not error.is_missing:
                raise
            return  # removed meanwhile
        except KeyIndexError as error:
            what = str(error)
        else:
            found = index.covered
            ends = (found.last_index, found.last_term, found.next_offset)
            if found.first_index != place.first_index or log.log_id not in (None, found.log_id):
                what = "it is that of another segment"
            elif ends != (chain.index, chain.term, chain.offset) and chain.index is not None:
                what = f"it is of a segment that ends with entry {found.last_index} of term {found.last_term}"
        if what:
            self._found(path, 0, place.key_index_size or 0, f"the key index: {what}", severity="note")

    def _index(self, log: LogPlace, place: SegmentPlace, severity: str) -> bytes:
        """Return the bytes of the index file, after checking its head."""
        if place.index_size is None:
            if place.size and not self.folder.live:
                what = "the index is missing; it is rebuilt at the next start"
                self._found(place.index_path, 0, 0, what, severity=severity)
            return bytes(INDEX_HEAD_SIZE)
        try:
            file = self.disk.open(place.index_path)
        except DiskError as error:
            if error.is_missing:
                return bytes(INDEX_HEAD_SIZE)
            raise
        try:
            data = bytes(read_damaged(file, file.size(), 0))
        finally:
            file.close()
        self._read(len(data))
        if log.log_id is not None and data[:INDEX_HEAD_SIZE] != index_head(place.first_index, log.log_id):
            self._found(
                place.index_path, 0, INDEX_HEAD_SIZE, "the head of the index is not that of this segment"
            )
        return data

    def _row(
        self, place: SegmentPlace, rows: memoryview, slot: int, found: IntactFrame, severity: str
    ) -> None:
        stored = rows[slot * ROW_SIZE : (slot + 1) * ROW_SIZE]
        if len(stored) == ROW_SIZE and stored != packed(found.row):
            position = INDEX_HEAD_SIZE + slot * ROW_SIZE
            how = "disagrees with its frame" if row_is_whole(stored, 0) else "is not whole"
            what = f"the row of entry {found.row.index} {how}"
            self._found(place.index_path, position, ROW_SIZE, what, severity=severity)

    def _skip_rows(self, place: SegmentPlace, rows: memoryview, slot: int, count: int, hole: Gap) -> None:
        """Check the index rows of frames that cannot be read: each row's own checksum must be right."""
        for each in range(slot, min(slot + count, len(rows) // ROW_SIZE)):
            if not row_is_whole(rows, each):
                position = INDEX_HEAD_SIZE + each * ROW_SIZE
                what = f"the row of entry {hole.first_index + each - slot} is not whole"
                self._found(place.index_path, position, ROW_SIZE, what)
