"""The parts of one checkpoint, which the segment writer captures and `checkpoints` uses."""

from __future__ import annotations

from dataclasses import dataclass

from laminar.log.commit.journal import Written
from laminar.log.format.checkpoint_state import Checkpoint
from laminar.log.segment.log_files import LogFiles
from laminar.log.segment.segment_file import SegmentFile


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The content of one checkpoint, and the files to sync before it is written.

    `checkpoint` is the content; it covers the journal up to `place`. `dirty` are the segments to sync and
    `directories` the directories, each with its log (None: several logs share the directory). `since` is the
    place of the last durable checkpoint, and `journal_bytes` is the size of the journal from there on.
    `carried` are the ids of the failed logs, whose records from `since` to `place` are written again.
    """

    checkpoint: Checkpoint
    place: Written
    since: Written
    journal_bytes: int
    dirty: dict[SegmentFile, LogFiles]
    directories: dict[str, LogFiles | None]
    carried: frozenset[int]
