"""Find the segments of a log on disk, when a process starts.

It decides which entries of a log exist and where they lie: by the names of the files, by the last entry that
the checkpoint names, and by the last row of each index file, the only one that is read. Other rows are read
on demand (`laminar.log.segment.segment`). If the last row is damaged, or is not that of the frame it names,
the index is rebuilt from the frames, in memory. Nothing is changed on disk.

Entries that the checkpoint names and no file holds are a *hole*. Inside a log, before an existing segment,
they keep their indexes and offsets, in placeholder rows, and reading them is an error. At the end of the log
nothing tells what they were: the log ends before them, and is `short`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.batch import HEADER_SIZE
from laminar.log.disk.disk import Disk
from laminar.log.format.checkpoint_state import LogStart
from laminar.log.format.index_entry import (
    ROW_SIZE,
    UNKNOWN_KIND,
    IndexEntry,
    is_header_of,
    row_is_whole,
    row_offset,
    unpack_row,
)
from laminar.log.segment.index_rebuild import header_row, missing_rows, read_damaged, whole_index
from laminar.log.segment.log_files import LogFiles
from laminar.log.segment.quarantine import Damage
from laminar.log.segment.segment import Segment
from laminar.log.segment.segment_file import SegmentFile, index_head

_ANY_SIZE = 1 << 62


@dataclass(slots=True)
class Loaded:
    """The segments of a log that a start has found on disk, and what was wrong with them.

    `segments` are those that the log has. `stale` are segments on disk whose entries were truncated or
    trimmed. `unreadable` are segments with entries that the log should have, none of which could be
    identified. `rebuilt` are those of `segments` whose index was rebuilt, so that it must be written. `holes`
    are the damaged ranges that loading found. `short` is set if entries that the checkpoint names are missing
    at the end, and `unknown` if some entries in `rebuilt` segments could not be identified.
    """

    segments: list[Segment] = field(default_factory=list)
    stale: list[SegmentFile] = field(default_factory=list)
    unreadable: list[SegmentFile] = field(default_factory=list)
    rebuilt: list[Segment] = field(default_factory=list)
    holes: list[Damage] = field(default_factory=list)
    short: bool = False
    unknown: bool = False


def load_segments(disk: Disk, files: LogFiles, *, last_index: int, goes_on: bool = False) -> Loaded:
    """Find a log's segments on disk: those with the entries after `files.start` up to `last_index`.

    `goes_on` tells that entries of the journal will be appended to the last segment: then it is kept even if
    all of its entries lie before the start.
    """
    loaded = Loaded()
    firsts = sorted(int(name[:-4]) for name in disk.list(files.directory) if _is_segment(name))
    files.made = bool(firsts) or disk.exists(files.directory)
    useful = [first for first in firsts if first <= last_index]
    for first in firsts:
        if first > last_index:
            loaded.stale.append(files.new_segment(first))
    for place, first in enumerate(useful):
        sealed = place + 1 < len(useful)
        last = useful[place + 1] - 1 if sealed else last_index
        file = files.new_segment(first, exists=True)
        if last <= files.start.index and not (goes_on and last == last_index):
            loaded.stale.append(file)
            continue
        before = _end_of(loaded, files.start)
        segment = _load(file, files.log_id, last, before)
        if segment is None:
            segment = _rebuilt_segment(file, last, before, sealed=sealed)
            if not segment.count or (first > before.index and segment.first_offset < before.next_offset):
                loaded.unreadable.append(file)
                loaded.short |= not sealed
                continue
            loaded.rebuilt.append(segment)
        if first > before.index + 1:
            _leave_hole(loaded, files, segment)
        loaded.segments.append(segment)
    for segment in loaded.segments:
        segment.file.holds_rows(segment.count)
    loaded.short |= _end_of(loaded, files.start).index < last_index
    loaded.unknown = any(UNKNOWN_KIND in _kinds(segment, files.start) for segment in loaded.rebuilt)
    loaded.holes = [
        hole
        for segment in loaded.segments
        for hole in (_holes_in(segment) if segment in loaded.rebuilt else _hole_at_end(segment))
        if hole.last_index > files.start.index
    ]
    return loaded


def _end_of(loaded: Loaded, start: LogStart) -> IndexEntry:
    """Return the index row of the last entry found so far; without one, a row for the log's start."""
    if loaded.segments:
        return loaded.segments[-1].last_row
    return IndexEntry(start.index, 0, start.offset, 0, 0, 0, start.time_ms, UNKNOWN_KIND, 0)


def _leave_hole(loaded: Loaded, files: LogFiles, following: Segment) -> None:
    """Add placeholder rows for the entries that are missing before an existing segment.

    They count as entries of the segment before them; at the log's start, of a segment of their own.
    """
    while loaded.segments and loaded.segments[-1] not in loaded.rebuilt:
        # All its rows are needed, as its index file is to be rewritten.
        old = loaded.segments.pop()
        segment = _rebuilt_segment(old.file, old.last_index, _end_of(loaded, files.start), sealed=True)
        if not segment.count:
            loaded.unreadable.append(old.file)
            continue
        loaded.segments.append(segment)
        loaded.rebuilt.append(segment)
    before = _end_of(loaded, files.start)
    if not loaded.segments:
        first_index = before.index + 1
        file = files.new_segment(first_index, exists=True)
        loaded.segments.append(Segment(first_index, file, first_offset=before.next_offset))
        loaded.rebuilt += loaded.segments
    segment = loaded.segments[-1]
    count = following.first_index - before.index - 1
    segment.hold(segment.tail + missing_rows(before, count, following.first_offset))


def _kinds(segment: Segment, start: LogStart) -> set[int]:
    first = max(segment.first_index, start.index + 1)
    return {segment.index_entry(index).kind for index in range(first, segment.last_index + 1)}


def _holes_in(segment: Segment) -> list[Damage]:
    """Return the damaged ranges of a segment: runs of entries that are not in its file.

    All rows must be in memory.
    """
    size = segment.file.data_size()
    runs: list[list[IndexEntry]] = []
    before = None
    for row in segment.rows(segment.first_index, segment.last_index):
        lost = (
            "unknown" if row.kind == UNKNOWN_KIND else "cut off" if row.position + row.size > size else None
        )
        if lost is not None:
            if lost != before:
                runs.append([row, row])
            runs[-1][1] = row
        before = lost
    return [_damage(segment, first, last) for first, last in runs]


def _hole_at_end(segment: Segment) -> list[Damage]:
    """Return the damaged range at the end of a segment, if an earlier start put placeholder rows there.

    The list has one range, or none.
    """
    last = first = segment.last_row
    while first.kind == UNKNOWN_KIND and first.index > segment.first_index:
        row = segment.index_entry(first.index - 1)
        if row.kind != UNKNOWN_KIND:
            break
        first = row
    return [_damage(segment, first, last)] if last.kind == UNKNOWN_KIND else []


def _damage(segment: Segment, first: IndexEntry, last: IndexEntry) -> Damage:
    return Damage(
        first_index=first.index,
        last_index=last.index,
        term=first.term if first.index == last.index else 0,
        first_offset=first.base_offset,
        next_offset=last.next_offset,
        segment=segment.first_index,
        position=first.position,
        size=max(last.position + last.size - first.position, 0),
    )


def _is_segment(name: str) -> bool:
    return name.endswith(".log") and name[:-4].isdigit()


def _load(file: SegmentFile, log_id: int, last: int, before: IndexEntry) -> Segment | None:
    """Return the segment up to entry `last`, with only its last row in memory; None if the index is wrong.

    `before` is the index entry of the last existing entry before the segment.
    """
    count = last - file.first_index + 1
    packed = file.read_rows(count - 1, 1)
    if len(packed) < ROW_SIZE or not row_is_whole(packed, 0):
        return None
    if file.read_head() != index_head(file.first_index, log_id):
        return None
    row = unpack_row(packed, 0, last)
    if not _lies_there(file, row):
        return None
    first_offset = before.next_offset
    if file.first_index != before.index + 1:
        # The log begins inside it, or a hole lies before it.
        first = file.read_rows(0, 1)
        if not row_is_whole(first, 0):
            return None
        first_offset = row_offset(first, 0)
        if file.first_index > before.index and first_offset < before.next_offset:
            return None
    if row.base_offset < first_offset or 0 < row.term < before.term:
        return None
    segment = Segment(file.first_index, file, first_offset=first_offset)
    segment.hold(packed, held_from=count - 1)
    if row.kind == UNKNOWN_KIND:
        segment.size = max(segment.size, file.data_size())  # a repair began to fill the hole at its end
    return segment


def _lies_there(file: SegmentFile, row: IndexEntry) -> bool:
    """Return whether the file is long enough for the row's frame, and holds no other entry's header there."""
    data = file.data()
    if row.position + row.size > data.size():
        return False
    if row.kind == UNKNOWN_KIND:
        return True
    header = read_damaged(data, HEADER_SIZE, row.position)
    # An intact header of another entry: the row is wrong. A damaged one: the row is what is known of it.
    return is_header_of(header, row) or header_row(header, row.position) is None


def _rebuilt_segment(file: SegmentFile, last: int, before: IndexEntry, *, sealed: bool) -> Segment:
    """Return the segment with rows rebuilt from its frames, as many as there are up to entry `last`.

    If a `sealed` segment is too short, rows of its index file are used also for entries beyond its end:
    another segment follows, so these entries certainly existed.
    """
    size = file.data().size()
    first_offset = before.next_offset if file.first_index > before.index else 0
    rows = whole_index(
        file,
        range(file.first_index, last + 1),
        size=size,
        hinted_size=_ANY_SIZE if sealed else size,
        offset=first_offset,
    )
    if rows:
        first_offset = row_offset(rows, 0)
    segment = Segment(file.first_index, file, first_offset=first_offset)
    if rows:
        segment.hold(rows)
    return segment
