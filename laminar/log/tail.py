"""The tail of an `interval` log: what its segments hold behind the last point known to be synced.

No journal record says how far it reaches. So the frames are walked, and one is kept only if all of it is
whole, it continues the one before (index, previous term, offset, time), and no later truncation names it as
the first entry that it cut: such a one may be left over from before. A frame that opens a segment begins a
file of its own. This reads and changes nothing; recovery writes what is kept again and cuts the rest.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from laminar.batch import BatchError, Header, verify
from laminar.log.disk import Buffer
from laminar.log.rows import HEADER, HEADER_SIZE
from laminar.log.segment import SegmentFile
from laminar.log.state import LogFiles
from laminar.log.walk import read_damaged

_OPENS_SEGMENT = 1
_MAGIC = b"LMNB"


@dataclass(slots=True)
class End:
    """Where a log ends so far."""

    index: int
    term: int
    offset: int
    time_ms: int


@dataclass(slots=True)
class Tail:
    """Frames that continue a log, in order; the segments that begin among them, by first index; and up to
    where each segment that was walked counts.

    `broken`: what follows is no whole frame, although a later one is there. No torn write leaves that.
    """

    frames: list[Buffer] = field(default_factory=list)
    opened: dict[int, SegmentFile] = field(default_factory=dict)
    kept: dict[SegmentFile, int] = field(default_factory=dict)
    broken: bool = False


def find_tail(
    files: LogFiles,
    *,
    end: End,
    last: SegmentFile | None,
    position: int,
    firsts: Set[int],
    cut: Set[tuple[int, int]],
) -> Tail:
    """Frames behind `end`, which lies in the segment `last` just before `position`. `firsts` are the first
    indexes of all segments in the directory. Raises `DiskError`.
    """
    tail = Tail()
    damaged = False
    if last is not None:
        damaged = _walk(last, position, end, cut, tail, head=None)
    while end.index + 1 in firsts:
        first = end.index + 1
        segment = files.new_segment(first, exists=True)
        # A log without a segment may begin with any frame.
        damaged = _walk(segment, 0, end, cut, tail, head=last is not None or bool(tail.opened))
        if end.index < first:
            del tail.kept[segment]
            segment.close()
            break
        tail.opened[first] = segment
    tail.broken = damaged and any(first > end.index + 1 for first in firsts)
    return tail


def _walk(
    segment: SegmentFile, position: int, end: End, cut: Set[tuple[int, int]], tail: Tail, *, head: bool | None
) -> bool:
    """Take frames from `position` on, and move `end`. Returns whether other bytes than a frame come next.

    `head`: this is a file's first frame, and whether it must say so; None for a place inside.
    """
    tail.kept[segment] = position
    file = segment.data()
    data = memoryview(read_damaged(file, max(file.size() - position, 0), position)).toreadonly()
    at = 0
    while at + HEADER_SIZE <= len(data):
        opens = None if at else head
        if bytes(data[at : at + len(_MAGIC)]) != _MAGIC:
            return True
        body_length = HEADER.unpack_from(data, at)[7]
        frame = data[at : at + HEADER_SIZE + body_length]
        try:
            header = verify(frame)
        except BatchError:
            return True
        if (header.index, header.term) in cut or not _continues(header, end):
            return False
        opening = bool(HEADER.unpack_from(frame)[1] & _OPENS_SEGMENT)
        if opening if opens is None else opens and not opening:
            return False
        tail.frames.append(frame)
        end.index, end.term = header.index, header.term
        end.offset, end.time_ms = header.base_offset + header.count, header.append_time_ms
        at += len(frame)
        tail.kept[segment] = position + at
    return at < len(data)


def _continues(header: Header, end: End) -> bool:
    """Whether a whole frame is the next of its log."""
    return (
        header.index == end.index + 1
        and header.prev_term == end.term
        and header.base_offset == end.offset
        and header.term >= end.term
        and header.append_time_ms >= end.time_ms
    )
