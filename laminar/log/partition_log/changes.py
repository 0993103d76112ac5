"""The queue of changes that wait for the journal, and the cache of frames that are not in segments yet.

The loop's thread only. Every recorded change gets a running number; "durable up to n" and "written up to n"
are then plain comparisons, and no completion can be mistaken for that of an older entry at the same index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from laminar.log.disk.disk import Buffer
from laminar.log.format.checkpoint_state import LogStart
from laminar.log.format.flush_policy import FlushPolicy
from laminar.log.format.journal_codec import RECORD
from laminar.log.segment.log_files import LogFiles
from laminar.log.segment.segment_file import SegmentFile


@dataclass(slots=True, init=False)
class Write:
    """Action: write a batch into a segment: `frame` at byte `position`, and its packed index `row`."""

    files: LogFiles
    segment: SegmentFile
    index: int
    position: int
    frame: Buffer
    row: bytes

    # Written out: where it is compiled, it takes an eighth of the time of a generated one.
    def __init__(
        self, files: LogFiles, segment: SegmentFile, index: int, position: int, frame: Buffer, row: bytes
    ) -> None:
        self.files = files
        self.segment = segment
        self.index = index
        self.position = position
        self.frame = frame
        self.row = row


@dataclass(frozen=True, slots=True)
class Create:
    """Action: create a log, which has no files before its first entry."""

    files: LogFiles


@dataclass(frozen=True, slots=True)
class Truncate:
    """Action: remove entry `index` and all after it.

    The segments in `removed` are deleted. Of `segment`, which is then the last (None: no entry is left), the
    bytes below `position` and the first `rows` index rows stay. `end_term` is the term of the last entry that
    is left, and `end_offset` the offset after it.
    """

    files: LogFiles
    index: int
    end_term: int
    end_offset: int
    segment: SegmentFile | None
    position: int
    rows: int
    removed: tuple[SegmentFile, ...]


@dataclass(frozen=True, slots=True)
class MoveLogStart:
    """Action: trim a log to begin after the entry that `start` names; delete the segments in `removed`."""

    files: LogFiles
    start: LogStart
    removed: tuple[SegmentFile, ...]


@dataclass(frozen=True, slots=True)
class Delete:
    """Action: move a log to the trash; delete the term and vote of `replica_id` (0: none), too."""

    files: LogFiles
    replica_id: int


@dataclass(frozen=True, slots=True)
class Replace:
    """Action: replace the log `old` by the log `files`; the files of `old` are moved to the trash."""

    files: LogFiles
    old: LogFiles


@dataclass(frozen=True, slots=True)
class SetRecovering:
    """Action: change a log's recovery state, incarnation and least term; see `Log.set_recovering`."""

    files: LogFiles
    recovering: bool
    power_lost: bool
    incarnation: int
    least_term: int


@dataclass(frozen=True, slots=True)
class Unsynced:
    """Action: note that entries of an `interval` log may now be acknowledged before they are synced."""

    files: LogFiles


@dataclass(frozen=True, slots=True)
class Policy:
    """Action: change the flush policy of a log."""

    files: LogFiles
    policy: FlushPolicy


@dataclass(frozen=True, slots=True)
class Vote:
    """Action: change a replica's hard state (its term and vote)."""

    replica_id: int
    term: int
    vote: int


Action: TypeAlias = (
    Write | Create | Truncate | MoveLogStart | Delete | Replace | SetRecovering | Vote | Unsynced | Policy
)
Pending: TypeAlias = tuple[bytes, Buffer, Action]


class RecordedLog(Protocol):
    """A log as `ChangeQueue` and `GroupCommit` use it.

    They notify the log when its changes are synced, and when a frame of it may leave memory. Running numbers
    count the changes of all logs of a storage.
    """

    policy: FlushPolicy

    @property
    def unsynced_records(self) -> int:
        """Number of records that were acknowledged and not yet synced."""

    def synced_up_to(self, number: int) -> bool:
        """Note that the changes up to running `number` are synced; return whether all of this log's are."""

    def evict_frame(self, index: int, frame: Buffer) -> None:
        """Drop a frame from memory, because it is in its segment, if it is still the one at `index`."""


class ChangeQueue:
    """The queue of changes that wait for the journal, and a cache of the frames recorded last.

    A frame stays in the cache at least until it is in its segment.
    """

    __slots__ = (
        "_recent",
        "_recent_bytes",
        "_recent_limit",
        "counted",
        "must_sync",
        "on_record",
        "pending",
        "pending_bytes",
        "recorded",
        "touched",
        "unsynced",
        "written",
    )

    def __init__(self, recent_limit: int) -> None:
        self.pending: deque[Pending] = deque()
        self.pending_bytes = 0
        # Running numbers: of the last change recorded, of the last one that counts (it may be acknowledged),
        # and of the last one that is in its segment. The segment writer's thread sets `written`; if the loop
        # sees it late, a frame only stays in memory for longer.
        self.recorded = 0
        self.counted = 0
        self.written = 0
        # `interval` logs with entries in the queue. A dict, not a set: its order is the same in each run.
        self.touched: dict[RecordedLog, None] = {}
        # Whether a change in the queue must be durable before it counts: true of all but batches of
        # `interval` logs.
        self.must_sync = False
        # `interval` logs with entries that no sync has covered yet.
        self.unsynced: dict[RecordedLog, None] = {}
        self.on_record: Callable[[], None] | None = None
        self._recent: deque[tuple[int, RecordedLog, int, Buffer]] = deque()
        self._recent_bytes = 0
        self._recent_limit = recent_limit

    def record(self, head: bytes, payload: Buffer, action: Action) -> int:
        """Queue one change that may be acknowledged only when it is durable; return its running number.

        `head` and `payload` are the change's journal record; `action` is what the segment writer does when
        the record is durable.
        """
        self.must_sync = True
        self.pending.append((head, payload, action))
        self.pending_bytes += RECORD.size + len(payload)
        self.recorded += 1
        if self.on_record is not None:
            self.on_record()
        return self.recorded

    def record_batch(self, log: RecordedLog, index: int, head: bytes, frame: Buffer, action: Write) -> int:
        """Queue one batch, and keep its frame in memory; return its running number.

        After the last batch of an append the caller must call `on_record`, and before that set `must_sync`
        unless the batches may be acknowledged when they are written.
        """
        size = len(frame)
        self.pending.append((head, frame, action))
        self.pending_bytes += RECORD.size + size
        self.recorded = number = self.recorded + 1
        self._recent.append((number, log, index, frame))
        self._recent_bytes += size
        if self._recent_bytes > self._recent_limit:
            self._evict_some()
        return number

    def take(self, max_bytes: int) -> list[Pending]:
        """Remove and return the oldest changes that fit in `max_bytes`; at least one, if there is any."""
        pending = self.pending
        if self.pending_bytes <= max_bytes:
            taken = list(pending)
            pending.clear()
            self.pending_bytes = 0
            return taken
        taken = []
        room = max_bytes
        while pending:
            size = RECORD.size + len(pending[0][1])
            if taken and size > room:
                break
            room -= size
            self.pending_bytes -= size
            taken.append(pending.popleft())
        return taken

    def _evict_some(self) -> None:
        """Drop the oldest frames that are in their segments from memory, down to the limit."""
        recent = self._recent
        while self._recent_bytes > self._recent_limit and recent[0][0] <= self.written:
            _, owner, old_index, old_frame = recent.popleft()
            self._recent_bytes -= len(old_frame)
            owner.evict_frame(old_index, old_frame)

    def first_unwritten(self, log: RecordedLog) -> int | None:
        """Return the index of the log's first entry that may not be in its segment; None if all are."""
        found = None
        for number, owner, index, _ in reversed(self._recent):
            if number <= self.written:
                break
            if owner is log:
                found = index if found is None else min(found, index)
        return found

    def evict_written(self) -> None:
        """Drop every frame that is in its segment from memory."""
        recent = self._recent
        while recent and recent[0][0] <= self.written:
            _, owner, index, frame = recent.popleft()
            self._recent_bytes -= len(frame)
            owner.evict_frame(index, frame)

    @property
    def recent_bytes(self) -> int:
        """Number of bytes of the frames in memory."""
        return self._recent_bytes
