"""Read a journal at a start, and sort its frames: valid, torn, or lost to damage.

It reads files and changes none; recovery decides by the result what to write. The rules are those of
docs/storage.md#recovery. An LSN that is missing at or below the `durable_lsn` of a later frame was durable
once, so its loss is damage. An LSN that is missing above every `durable_lsn` begins the torn tail, which is
dropped. If only the process ended, memory was kept, and only the very last frame can be torn: each whole
frame, and the end mark, prove that all before them were written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from laminar.log.commit.end_mark import End, read_end
from laminar.log.commit.journal import journal_name, journal_numbers
from laminar.log.disk.disk import Buffer, Disk, File
from laminar.log.disk.errors import DiskError, NewerFormat
from laminar.log.format.checkpoint_state import Checkpoint
from laminar.log.format.journal_codec import (
    BLOCK_SIZE,
    HEAD_SIZE,
    VERSION,
    FrameFlag,
    FrameHead,
    RecordKind,
    decode_frame,
    decode_records,
    newer_version,
)

_log = logging.getLogger("laminar.recovery")


@dataclass(slots=True)
class FoundFrame:
    """A whole frame of the journal, and its place. `stored` has its head and records, without padding."""

    head: FrameHead
    file_name: str
    position: int
    stored: memoryview

    def records(self) -> Iterator[tuple[RecordKind, int, memoryview]]:
        """Yield (kind, key, payload) of each record in the frame; see `decode_records`."""
        body = self.stored[HEAD_SIZE : HEAD_SIZE + self.head.length]
        return decode_records(body, self.head.records)


@dataclass(slots=True)
class ScanResult:
    """The frames of a journal, sorted by what recovery may use of them.

    `kept` are the frames to be replayed, in order. `votes_only` are whole frames after a torn one: of these
    only the hard states (terms and votes) are used. `unsure` are the frames of both lists that may not have
    been synced: recovery writes them again before anything relies on them. `highest_lsn` is the highest LSN
    that the journal is known to have had. `damaged` is set if durable records are missing;
    `votes_lost_before` is then the LSN below which hard states may be missing (0: none are missing).
    `memory_kept` is set if the machine was not restarted and no sync failed: then everything written is
    there, synced or not.
    """

    kept: list[FoundFrame] = field(default_factory=list)
    votes_only: list[FoundFrame] = field(default_factory=list)
    unsure: list[FoundFrame] = field(default_factory=list)
    highest_lsn: int = 0
    damaged: bool = False
    votes_lost_before: int = 0
    memory_kept: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """The content of a journal: all whole frames of its generation after the checkpoint, and the end mark.

    `short` is set if a journal file is missing, or is shorter than when its first frame was written, or ends
    before the place that the checkpoint names. That is damage and no power loss, because files are filled
    with zeros and synced before use.
    """

    frames: list[FoundFrame]
    end: End | None
    short: bool


def read_journal(disk: Disk, store: str, checkpoint: Checkpoint) -> Found:
    """Return the whole frames of a journal after its checkpoint.

    Raises:
        NewerFormat: A newer program wrote a frame.
    """
    frames: list[FoundFrame] = []
    highest_lsn = checkpoint.lsn
    numbers = [number for number in journal_numbers(disk, store) if number >= checkpoint.journal_file]
    short = checkpoint.journal_file not in numbers
    for number in numbers:
        start = checkpoint.journal_position if number == checkpoint.journal_file else 0
        name = journal_name(number)
        file = disk.open(os.path.join(store, name))
        try:
            size = file.size()
            data = memoryview(_read_all(file, start))
        finally:
            file.close()
        least = max(start, checkpoint.journal_size) if number == checkpoint.journal_file else 0
        position = 0
        while position < len(data):
            head = decode_frame(data, position, generation=checkpoint.generation, seed=checkpoint.seed)
            if head is None:
                of = newer_version(data, position, generation=checkpoint.generation, seed=checkpoint.seed)
                if of:
                    raise NewerFormat(os.path.join(store, name), of, known=VERSION)
                position += BLOCK_SIZE
                continue
            end = position + head.stored_size
            # A reused file may still end in frames of its former use: their LSNs are lower.
            if head.lsn > highest_lsn:
                highest_lsn = head.lsn
                stored = data[position : position + HEAD_SIZE + head.length]
                frames.append(FoundFrame(head, name, start + position, stored))
                least = max(least, head.file_size)
            position = end
        if size < least:
            _log.error("%s/%s: the file has %d bytes, and had at least %d before", store, name, size, least)
            short = True
    mark = read_end(disk, store, generation=checkpoint.generation, seed=checkpoint.seed)
    return Found(frames, mark, short)


def _read_all(file: File, start: int) -> Buffer:
    """Return the bytes of a file from `start` on, with zeros in place of unreadable blocks.

    So such a block holds no frame. An error instead would keep the whole store directory from opening because
    of one bad sector, perhaps in unused room.
    """
    size = max(file.size() - start, 0)
    try:
        return file.pread(size, start)
    except DiskError as error:
        if not error.is_damage:
            raise
    data = bytearray(size)
    for at in range(0, size, BLOCK_SIZE):
        block = min(BLOCK_SIZE, size - at)
        try:
            data[at : at + block] = file.pread(block, start + at)
        except DiskError as error:
            if not error.is_damage:
                raise
            _log.error("%s: the block at %d cannot be read: %s", file.path, start + at, error)
    return data


def classify_frames(found: Found, checkpoint: Checkpoint, *, same_boot: bool = False) -> ScanResult:
    """Decide which of the frames found are valid, and whether any are missing. Pure: it reads no file.

    `same_boot` tells that the machine was not restarted since the checkpoint's generation began.
    """
    frames, end = found.frames, found.end
    scan = ScanResult(highest_lsn=max([checkpoint.lsn, *(frame.head.lsn for frame in frames)]))
    durable_lsn = max([checkpoint.lsn, *(frame.head.durable_lsn for frame in frames)])
    if end is not None:
        scan.highest_lsn = max(scan.highest_lsn, end.lsn)
        durable_lsn = max(durable_lsn, end.durable_lsn)
    scan.memory_kept = same_boot and (end is None or not end.failed)
    # Frames up to here were certainly written, and none of them may be missing.
    written_lsn = durable_lsn
    if scan.memory_kept:
        written_lsn = max([written_lsn, *(frame.head.lsn for frame in frames), end.lsn if end else 0])
    if found.short and checkpoint.generation > 0:
        scan.damaged = True
        scan.votes_lost_before = scan.highest_lsn + 1
    expected = checkpoint.lsn + 1
    torn = False
    for place, frame in enumerate(frames):
        lsn = frame.head.lsn
        assert lsn >= expected, f"LSN {lsn} where {expected} was expected"
        if lsn > expected:
            if expected > written_lsn:
                # A vote too many does no harm; a missing one would let a replica vote twice in a
                # term.
                late = frames[place:]
                scan.votes_only = [each for each in late if each.head.flags & FrameFlag.HARD_STATE]
                torn = True
                break
            scan.damaged = True
            # A twin has the hard states of the frame before it. And a frame with hard states is
            # lost for good only with its twin, so two frames must be missing.
            unknown = lsn - expected - bool(frame.head.flags & FrameFlag.TWIN)
            if unknown >= 2 and frame.head.hard_state_lsn >= expected:
                scan.votes_lost_before = lsn
        scan.kept.append(frame)
        expected = lsn + 1
    if end is not None and not torn and expected <= written_lsn:
        # The end of the journal is lost, and only the end mark reveals it.
        scan.damaged = True
        if written_lsn + 1 - expected >= 2 and end.hard_state_lsn >= expected:
            scan.votes_lost_before = written_lsn + 1
    scan.unsure = [frame for frame in [*scan.kept, *scan.votes_only] if frame.head.lsn > durable_lsn]
    return scan
