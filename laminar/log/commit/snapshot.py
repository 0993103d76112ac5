"""What one checkpoint consists of: captured by the segment writer, used by `checkpoints`."""

from __future__ import annotations

from dataclasses import dataclass

from laminar.log.commit.journal import Written
from laminar.log.format.checkpoint_state import Checkpoint
from laminar.log.segment.log_files import LogFiles
from laminar.log.segment.segment_file import SegmentFile


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The content of one checkpoint (`checkpoint`, at `place`), and what it must sync before.

    `carried` are the failed logs; their records between `since` (the last durable checkpoint) and `place`
    are written again.
    """

    checkpoint: Checkpoint
    place: Written
    since: Written
    journal_bytes: int
    dirty: dict[SegmentFile, LogFiles]
    directories: dict[str, LogFiles | None]
    carried: frozenset[int]
