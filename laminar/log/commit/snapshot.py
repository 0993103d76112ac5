"""The parts of one checkpoint, which the segment writer captures and `checkpoints` uses."""

from __future__ import annotations

from dataclasses import dataclass

from laminar.log.commit.journal import Written
from laminar.log.format.checkpoint_state import Checkpoint
from laminar.log.segment.log_files import LogFiles
from laminar.log.segment.segment_file import SegmentFile


@dataclass(slots=True, kw_only=True)
class Snapshot:
    """The content of one checkpoint (`checkpoint`, at `place`), and the files to sync before it is written.

    These are the segments in `dirty` and the `directories`, each with its log (None: several logs share the
    directory). `carried` are the ids of the failed logs; their records between `since` (the last durable
    checkpoint) and `place` are written again. `journal_bytes` are those since the last durable checkpoint.
    """

    checkpoint: Checkpoint
    place: Written
    since: Written
    journal_bytes: int
    dirty: dict[SegmentFile, LogFiles]
    directories: dict[str, LogFiles | None]
    carried: frozenset[int]
