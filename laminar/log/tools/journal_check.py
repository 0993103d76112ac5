"""Verify every byte of a journal that no process has open.

A file holds frames of one generation back to back, each padded with zeros to the next boundary. After the
last frame comes *room*, which is unused: zeros, or, in a reused file, the rest of older frames. Frames before
the checkpoint are checked too, although no start will read them. Nothing is changed. `journal_scan` decides
what a start does with a journal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from laminar.batch import BatchError, verify
from laminar.log.commit.end_mark import NAME, decode_end, read_end, read_slots
from laminar.log.commit.journal import journal_name, journal_numbers
from laminar.log.disk.disk import Disk
from laminar.log.format.checkpoint_state import Checkpoint
from laminar.log.format.journal_codec import (
    BLOCK_SIZE,
    HEAD_SIZE,
    FrameHead,
    RecordKind,
    decode_frame,
    decode_records,
    frame_marks,
)
from laminar.log.segment.index_rebuild import read_damaged


@dataclass(frozen=True, slots=True)
class JournalFinding:
    """A fault of the journal: `size` wrong bytes of a file from `position` on, described by `what`.

    A `size` of 0 means that bytes are missing there. With `note` the bytes may be unused, so that nothing is
    lost.
    """

    file: str
    position: int
    size: int
    what: str
    note: bool = False


def check_journal(disk: Disk, store: str, checkpoint: Checkpoint) -> Iterator[JournalFinding]:
    """Yield the faults of the journal, from the checkpoint's file on, and of the end mark."""
    numbers = [number for number in journal_numbers(disk, store) if number >= checkpoint.journal_file]
    if checkpoint.journal_file not in numbers:
        missing = os.path.join(store, journal_name(checkpoint.journal_file))
        yield JournalFinding(missing, 0, 0, "the journal file that the checkpoint names is missing")
    lsn: int | None = None
    for number in numbers:
        path = os.path.join(store, journal_name(number))
        file = disk.open(path)
        try:
            data = memoryview(read_damaged(file, file.size(), 0))
        finally:
            file.close()
        frames = _live_frames(data, checkpoint, lsn)
        end = 0
        for position, head in frames:
            if position > end:
                yield JournalFinding(path, end, position - end, "no whole frame where one was")
            elif lsn is not None and head.lsn != lsn + 1:
                what = f"frames {lsn + 1} to {head.lsn - 1} of the journal are missing before this one"
                yield JournalFinding(path, position, head.stored_size, what)
            yield from _inside(path, data, position, head)
            lsn, end = head.lsn, position + head.stored_size
        known = checkpoint.journal_position if number == checkpoint.journal_file else 0
        if end < known:
            what = "no whole frame where the checkpoint says that there are some"
            yield JournalFinding(path, end, known - end, what)
            end = known
        yield from _room(path, data, end, checkpoint, lsn)
    yield from _check_end_mark(disk, store, checkpoint, lsn)


def _check_end_mark(
    disk: Disk, store: str, checkpoint: Checkpoint, lsn: int | None
) -> Iterator[JournalFinding]:
    """Check the end mark, and whether the journal reaches as far as the mark says."""
    path = os.path.join(store, NAME)
    for number, slot in enumerate(read_slots(disk, store)):
        end = decode_end(slot)
        whole = bytes(len(slot)) if end is None else end.encode()
        if len(slot) != BLOCK_SIZE or slot != whole:
            what = "the end mark is damaged, or torn by a power loss"
            yield JournalFinding(path, number * BLOCK_SIZE, BLOCK_SIZE, what)
    last = read_end(disk, store, generation=checkpoint.generation, seed=checkpoint.seed)
    reached = max(checkpoint.lsn, lsn or 0)
    if last is not None and reached < last.durable_lsn:
        what = f"the journal ends with frame {reached}, and frame {last.durable_lsn} was durable"
        yield JournalFinding(path, 0, 0, what)


def _live_frames(data: memoryview, checkpoint: Checkpoint, lsn: int | None) -> list[tuple[int, FrameHead]]:
    """Return (position, head) of the whole frames of a file, up to the first whose LSN does not rise.

    Such a frame is left from a former use of the file. `lsn` is the last LSN of the file before, or None.
    """
    found: list[tuple[int, FrameHead]] = []
    position = 0
    while position < len(data):
        head = decode_frame(data, position, generation=checkpoint.generation, seed=checkpoint.seed)
        if head is None:
            position += BLOCK_SIZE
            continue
        if lsn is not None and head.lsn <= lsn:
            break
        lsn = head.lsn
        found.append((position, head))
        position += head.stored_size
    return found


def _inside(path: str, data: memoryview, position: int, head: FrameHead) -> Iterator[JournalFinding]:
    """Check the padding of an intact frame, and the batches in it."""
    end = position + HEAD_SIZE + head.length
    padding = bytes(data[end : position + head.stored_size])
    if padding.count(0) != len(padding):
        yield JournalFinding(path, end, len(padding), f"the padding of frame {head.lsn} is not zero")
    at = position + HEAD_SIZE
    for kind, _, payload in decode_records(data[at:end], head.records):
        if kind is RecordKind.FULL:
            try:
                verify(payload)
            except BatchError as error:
                what = f"frame {head.lsn} holds a batch that is not whole: {error}"
                yield JournalFinding(path, position, head.stored_size, what)


def _room(
    path: str, data: memoryview, position: int, checkpoint: Checkpoint, lsn: int | None
) -> Iterator[JournalFinding]:
    """Check the unused room after the last frame, which begins at `position`.

    It should hold zeros. Other bytes are a note, as a former use may have left them, unless they look like
    the next frame.
    """
    rest = bytes(data[position:])
    if rest.count(0) == len(rest):
        return
    # Two of three fields are enough to recognise a next frame: so damage to one of them does not hide it.
    expected = None if lsn is None else lsn + 1
    former = decode_frame(data, position, generation=checkpoint.generation, seed=checkpoint.seed)
    if former is None and frame_marks(data, position, generation=checkpoint.generation, lsn=expected) >= 2:
        what = "the last frame is damaged, or torn by a power loss: then nothing in it was acknowledged"
        yield JournalFinding(path, position, BLOCK_SIZE, what)
        return
    first = len(rest) - len(rest.lstrip(b"\0"))
    what = "unused room is not zero: left from a former use of the file, or a byte that carries no meaning"
    yield JournalFinding(path, position + first, len(rest.rstrip(b"\0")) - first, what, note=True)
