"""The segments of a log found at a start, by their names, the checkpoint, and the last row of each.

It decides which entries of a log are there and where they lie, behind the checkpoint; it changes nothing
on disk. Other rows are read when they are wanted (`laminar.log.segment_rows`). Where the last row of an
index file does not hold, or is not that of the frame it names, the file is made anew from the frames.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.log.disk import Disk
from laminar.log.rows import (
    HEADER_SIZE,
    ROW_SIZE,
    UNKNOWN_KIND,
    Row,
    is_header_of,
    row_is_whole,
    row_offset,
    unpack_row,
)
from laminar.log.segment import SegmentFile, index_head
from laminar.log.segment_rows import Segment
from laminar.log.state import LogFiles
from laminar.log.walk import header_row, missing_rows, read_damaged, whole_index


@dataclass(slots=True)
class Loaded:
    """The segments of a log up to `last_index`.

    `stale` are segments on disk that belong to entries cut or dropped since. `short` says that entries the
    checkpoint names are missing at the end; `unknown` that some inside could not be identified.
    """

    segments: list[Segment] = field(default_factory=list)
    stale: list[SegmentFile] = field(default_factory=list)
    made_anew: list[Segment] = field(default_factory=list)
    short: bool = False
    unknown: bool = False


def load_segments(disk: Disk, files: LogFiles, *, last_index: int, goes_on: bool = False) -> Loaded:
    """Rows of the entries behind `files.start` up to `last_index`, as far as the segments hold them.

    `goes_on`: the last segment is to be continued, so it counts even if all it holds lies before the start.
    """
    loaded = Loaded()
    firsts = sorted(int(name[:-4]) for name in disk.list(files.directory) if _is_segment(name))
    files.made = bool(firsts) or disk.exists(files.directory)
    useful = [first for first in firsts if first <= last_index]
    for first in firsts:
        if first > last_index:
            loaded.stale.append(files.new_segment(first))
    for place, first in enumerate(useful):
        last = useful[place + 1] - 1 if place + 1 < len(useful) else last_index
        file = files.new_segment(first, exists=True)
        if last <= files.start.index and not (goes_on and last == last_index):
            loaded.stale.append(file)
            continue
        before = loaded.segments[-1] if loaded.segments else None
        if before is None and first > files.start.index + 1:
            break
        segment = _load(file, files.log_id, last, before)
        if segment is None:
            segment = _made_anew(file, last, before)
            if not segment.count:
                loaded.short = True
                loaded.stale.append(file)
                break
            if segment.last_index < last and place + 1 < len(useful):
                segment.hold(segment.tail + missing_rows(segment.last_row, last - segment.last_index))
            kinds = (segment.row(index).kind for index in range(first, segment.last_index + 1))
            loaded.unknown |= any(kind == UNKNOWN_KIND for kind in kinds)
            loaded.made_anew.append(segment)
        file.holds_rows(segment.count)
        loaded.segments.append(segment)
    end = loaded.segments[-1].last_index if loaded.segments else files.start.index
    loaded.short |= end < last_index
    return loaded


def _is_segment(name: str) -> bool:
    return name.endswith(".log") and name[:-4].isdigit()


def _load(file: SegmentFile, log_id: int, last: int, before: Segment | None) -> Segment | None:
    """The segment up to entry `last`, with its last row only; None where the index file does not hold it."""
    count = last - file.first_index + 1
    packed = file.read_rows(count - 1, 1)
    if len(packed) < ROW_SIZE or not row_is_whole(packed, 0):
        return None
    if file.read_head() != index_head(file.first_index, log_id):
        return None
    row = unpack_row(packed, 0, last)
    if not _lies_there(file, row):
        return None
    if before is not None:
        first_offset = before.next_offset
    else:
        first = file.read_rows(0, 1)
        if not row_is_whole(first, 0):
            return None
        first_offset = row_offset(first, 0)
    if row.base_offset < first_offset or (before is not None and 0 < row.term < before.last_term):
        return None
    segment = Segment(file.first_index, file, first_offset=first_offset)
    segment.hold(packed, held_from=count - 1)
    return segment


def _lies_there(file: SegmentFile, row: Row) -> bool:
    """Whether the frame that the row names lies in the file, as far as its header can tell."""
    data = file.data()
    if row.position + row.size > data.size():
        return False
    if row.kind == UNKNOWN_KIND:
        return True
    header = read_damaged(data, HEADER_SIZE, row.position)
    # A whole header of another entry: the row is wrong. A damaged one: the row is what is known of it.
    return is_header_of(header, row) or header_row(header, row.position) is None


def _made_anew(file: SegmentFile, last: int, before: Segment | None) -> Segment:
    """The segment with rows from its frames, as many as there are up to entry `last`."""
    first_offset = before.next_offset if before is not None else 0
    wanted = range(file.first_index, last + 1)
    rows = whole_index(file, wanted, size=file.data().size(), offset=first_offset)
    if rows:
        first_offset = row_offset(rows, 0)
    segment = Segment(file.first_index, file, first_offset=first_offset)
    if rows:
        segment.hold(rows)
    return segment
