"""The state of one log's files: the segment writer's view of the log.

The writer's thread updates it with each change that it applies to the files. So a checkpoint is a copy of
these states, and holds nothing of the loop's state, which is ahead of the files. The loop only asks it for
new segment files.
"""

from __future__ import annotations

import os

from laminar.log.disk.errors import StorageError
from laminar.log.disk.open_files import Resources
from laminar.log.format.checkpoint_state import LogStart, LogState, directory_name
from laminar.log.format.flush_policy import COMMIT, FlushPolicy
from laminar.log.segment.segment_file import SegmentFile


class LogFiles:
    """The state of one log's files: where it begins and ends on disk, its policy and recovery state.

    Fields have the meaning that they have in `LogState`. The segment writer's thread changes them.
    """

    __slots__ = (
        "directory",
        "disk",
        "end_index",
        "end_offset",
        "end_position",
        "end_term",
        "failure",
        "incarnation",
        "least_term",
        "log_id",
        "made",
        "name",
        "policy",
        "power_lost",
        "recovering",
        "resources",
        "segment",
        "start",
        "unsynced",
    )

    def __init__(self, resources: Resources, logs_directory: str, *, name: str, log_id: int) -> None:
        self.resources = resources
        self.disk = resources.files.disk
        self.directory = os.path.join(logs_directory, directory_name(name, log_id))
        self.name = name
        self.log_id = log_id
        # Whether the directory exists. Set by the writer; durable with the next checkpoint.
        self.made = False
        self.start = LogStart()
        self.end_index = 0
        self.end_term = 0
        self.end_offset = 0
        self.end_position = 0
        self.segment = 0
        self.recovering = False
        self.incarnation = 0
        self.policy: FlushPolicy = COMMIT
        self.power_lost = False
        self.least_term = 0
        # Whether the journal says that entries may be acknowledged before they are synced.
        self.unsynced = False
        # A failed write or sync of a segment; from then on its records stay in the journal.
        self.failure: StorageError | None = None

    def new_segment(self, first_index: int, *, exists: bool = False) -> SegmentFile:
        """Return the files of a segment of this log: none yet, or with `exists`, those on disk."""
        return SegmentFile(
            self.resources, self.directory, first_index=first_index, log_id=self.log_id, exists=exists
        )

    def state(self) -> LogState:
        """Return a copy of the state, for a checkpoint to record."""
        return LogState(
            log_id=self.log_id,
            name=self.name,
            start=self.start,
            end_index=self.end_index,
            end_term=self.end_term,
            end_offset=self.end_offset,
            segment=self.segment,
            end_position=self.end_position,
            recovering=self.recovering,
            incarnation=self.incarnation,
            policy=int(self.policy.is_interval),
            interval_ms=self.policy.interval_ms,
            interval_records=self.policy.interval_records,
            unsynced=self.unsynced,
            power_lost=self.power_lost,
            least_term=self.least_term,
        )
