"""A report of what a folder of logs holds, in numbers, from documents, names and the ends of segments.

Few bytes are read, whatever the size of the logs: the largest part is the journal after the checkpoint, of a
store directory that no process has open. None are changed. Records that are only in the journal are counted,
and not part of the logs' numbers. `verification` reports whether all is intact.
"""

from __future__ import annotations

import os
from typing import Any

from laminar.batch import HEADER_SIZE, BatchError, verify_header
from laminar.log.commit.journal import journal_name, journal_numbers
from laminar.log.disk.disk import ReadOnlyDisk
from laminar.log.disk.errors import DiskError
from laminar.log.format.index_entry import ROW_SIZE, IndexEntry, row_is_whole, unpack_row
from laminar.log.recovery.journal_scan import read_journal
from laminar.log.segment.frame_scan import row_of
from laminar.log.segment.segment_file import INDEX_HEAD_SIZE
from laminar.log.tools.folder_scan import Folder, LogPlace, SegmentPlace, StorePlace, scan_folder, size_of

Description = dict[str, Any]


def inspect(path: str, *, disk: ReadOnlyDisk | None = None) -> Description:
    """Return a report on the folder as plain values, ready to be encoded as JSON.

    Times are in ms since the epoch, sizes in bytes; a number that is not known is None. `live` in the report
    tells that a process has the folder open, so that the numbers may be of different moments.

    Raises:
        NotALogFolder: The path is not that of a folder of logs, a log or a segment.
        DiskError: A file cannot be read.
    """
    disk = disk or ReadOnlyDisk()
    folder = scan_folder(disk, os.path.abspath(path))
    return {
        "path": folder.path,
        "kind": folder.kind,
        "live": folder.live,
        "stores": [_store(disk, folder, store) for store in folder.stores],
        "logs": [_log(disk, log) for log in folder.logs],
    }


def _store(disk: ReadOnlyDisk, folder: Folder, store: StorePlace) -> Description:
    numbers = journal_numbers(disk, store.directory)
    sizes = [size_of(disk, os.path.join(store.directory, journal_name(number))) or 0 for number in numbers]
    found: Description = {
        "store": os.path.relpath(store.directory, folder.path),
        "live": store.live,
        "journal_files": len(numbers),
        "journal_bytes": sum(sizes),
        "replicas": len(store.entries),
        "checkpoint": None,
        "records_behind_checkpoint": None,
    }
    checkpoint = store.checkpoint
    if checkpoint is not None:
        found["checkpoint"] = {
            "generation": checkpoint.generation,
            "lsn": checkpoint.lsn,
            "journal_file": checkpoint.journal_file,
            "journal_position": checkpoint.journal_position,
            "logs": len(checkpoint.logs),
            "recovering": sorted(state.name for state in checkpoint.logs if state.recovering),
            "lost_votes": len(checkpoint.lost),
        }
        if not store.live:
            frames = read_journal(disk, store.directory, checkpoint).frames
            found["records_behind_checkpoint"] = sum(frame.head.records for frame in frames)
    return found


def _log(disk: ReadOnlyDisk, log: LogPlace) -> Description:
    segments = [_segment(disk, segment) for segment in log.segments]
    filled = [segment for segment in segments if segment["first_offset"] is not None]
    state, entry = log.state, log.entry
    ended = [segment for segment in filled if segment["next_offset"] is not None]
    start_offset = state.start.offset if state is not None else None
    if start_offset is None and filled:
        start_offset = filled[0]["first_offset"]
    return {
        "log": log.name,
        "log_id": None if log.log_id is None else f"{log.log_id:016x}",
        "directory": log.directory,
        "topic": entry.topic if entry is not None else None,
        "partition": entry.partition if entry is not None else None,
        "in_checkpoint": state is not None,
        "recovering": state.recovering if state is not None else False,
        "size_bytes": sum(segment["size_bytes"] or 0 for segment in segments),
        "first_index": filled[0]["first_index"] if filled else None,
        "last_index": ended[-1]["last_index"] if ended else (state.end_index if state is not None else None),
        "start_offset": start_offset,
        "end_offset": ended[-1]["next_offset"]
        if ended
        else (state.end_offset if state is not None else None),
        "first_term": filled[0]["first_term"] if filled else None,
        "last_term": ended[-1]["last_term"] if ended else None,
        "first_time": filled[0]["first_time"] if filled else None,
        "last_time": ended[-1]["last_time"] if ended else None,
        "segments": segments,
    }


def _segment(disk: ReadOnlyDisk, place: SegmentPlace) -> Description:
    first, last = (None, None) if place.size is None else _ends(disk, place, place.size)
    return {
        "segment": os.path.basename(place.path),
        "size_bytes": place.size,
        "index_bytes": place.index_size,
        "key_index_bytes": place.key_index_size,
        "first_index": place.first_index,
        "last_index": None if last is None else last.index,
        "first_offset": None if first is None else first.base_offset,
        "next_offset": None if last is None else last.next_offset,
        "first_term": None if first is None else first.term,
        "last_term": None if last is None else last.term,
        "first_time": None if first is None else first.append_time_ms,
        "last_time": None if last is None else last.append_time_ms,
    }


def _ends(disk: ReadOnlyDisk, place: SegmentPlace, size: int) -> tuple[IndexEntry | None, IndexEntry | None]:
    """Return the first and the last index entry of a segment; None for each that cannot be read.

    The first is read from the frame's header. The last is found from the index's last row on, by the headers
    of the frames after it.
    """
    try:
        file = disk.open(place.path)
    except DiskError as error:
        if error.is_missing:
            return None, None  # trimmed meanwhile
        raise
    try:

        def row_at(position: int) -> IndexEntry | None:
            try:
                return row_of(verify_header(file.pread(HEADER_SIZE, position)), position)
            except BatchError:
                return None

        first = row_at(0)
        last = _last_row(disk, place) or first
        while last is not None and last.position + last.size < size:
            following = row_at(last.position + last.size)
            if following is None or following.index != last.index + 1:
                break
            last = following
        return first, last
    finally:
        file.close()


def _last_row(disk: ReadOnlyDisk, place: SegmentPlace) -> IndexEntry | None:
    """Return the index entry in the index file's last row; None unless it is intact."""
    count = ((place.index_size or 0) - INDEX_HEAD_SIZE) // ROW_SIZE
    if count <= 0:
        return None
    try:
        file = disk.open(place.index_path)
    except DiskError as error:
        if error.is_missing:
            return None
        raise
    try:
        row = file.pread(ROW_SIZE, INDEX_HEAD_SIZE + (count - 1) * ROW_SIZE)
    finally:
        file.close()
    if not row_is_whole(row, 0):
        return None
    return unpack_row(row, 0, place.first_index + count - 1)
