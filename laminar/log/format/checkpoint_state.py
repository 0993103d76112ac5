"""What a checkpoint says, and the writer's view of each log that it is made from.

A checkpoint stands for all journal records up to its LSN. `LogFiles` is one log as its files have it:
the writer's thread moves it on with each action, so a checkpoint is a copy of these views and nothing of
the loop's state, which is ahead.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import msgspec

from laminar.log.disk.errors import StorageError
from laminar.log.disk.open_files import Resources
from laminar.log.format.flush_policy import COMMIT, FlushPolicy
from laminar.log.segment.segment_file import SegmentFile


@dataclass(frozen=True, slots=True)
class LogStart:
    """The entry *before* the first: index, term and append time; the offset of the first record behind it."""

    index: int = 0
    term: int = 0
    offset: int = 0
    time_ms: int = 0


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The last entry: its index and term, and the offset behind its records."""

    index: int
    term: int
    offset: int


@dataclass(frozen=True, slots=True)
class HardState:
    """What a replica promised: its term, and whom it voted for in it (0: nobody)."""

    term: int
    vote: int


class LogState(msgspec.Struct, kw_only=True):
    """One log in a checkpoint.

    `segment` is the first index of the last segment (0: no entries), `end_position` where its last frame
    ends. `policy` 0 is `commit`, 1 `interval` with its limits. `unsynced`: entries may have been acknowledged
    in this generation before they were synced. `power_lost`: `recovering` says no more than that the last
    interval may be gone. `least_term`: see `Log.mark`.
    """

    log_id: int
    name: str
    start: LogStart
    end_index: int
    end_term: int
    end_offset: int
    segment: int
    end_position: int
    recovering: bool
    incarnation: int
    policy: int = 0
    interval_ms: int = 0
    interval_records: int = 0
    unsynced: bool = False
    power_lost: bool = False
    least_term: int = 0


def empty_state(log_id: int, name: str) -> LogState:
    """A log as it is made: no files, no entries."""
    return LogState(
        log_id=log_id,
        name=name,
        start=LogStart(),
        end_index=0,
        end_term=0,
        end_offset=0,
        segment=0,
        end_position=0,
        recovering=False,
        incarnation=0,
    )


class Checkpoint(msgspec.Struct, kw_only=True):
    """See docs/storage.md#checkpoints. Recovery begins to read at `journal_position` of file `journal_file`,
    which was filled with zeros up to `journal_size` (0: it was not). `boot_id` is that of the machine's boot
    in which the generation began; it lasts no longer than that.

    `lost` are replicas whose newest hard state may be gone; `replaced` maps the ids of replaced logs to
    those that stand for them, until the manifest names them.
    """

    generation: int
    seed: int
    lsn: int
    journal_file: int
    journal_position: int
    logs: list[LogState]
    hard_states: dict[int, HardState]
    lost: list[int] = []
    replaced: dict[int, int] = {}
    journal_size: int = 0
    boot_id: bytes = b""


_DECODER = msgspec.msgpack.Decoder(Checkpoint)


def decode_checkpoint(payload: bytes) -> Checkpoint:
    return _DECODER.decode(payload)


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    return msgspec.msgpack.encode(checkpoint)


def directory_name(name: str, log_id: int) -> str:
    return f"{name}-{log_id:016x}"


class LogFiles:
    """One log as its files have it. The loop only asks it for new segments; the rest is the writer's."""

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
        # Whether the directory is there. Set by the writer; durable with the next checkpoint.
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
        # Whether entries may be acknowledged before they are synced, as recorded.
        self.unsynced = False
        # A failed write or sync of a segment; from then on its records stay in the journal.
        self.failure: StorageError | None = None

    def new_segment(self, first_index: int, *, exists: bool = False) -> SegmentFile:
        """A segment that has no files yet, or has them (as one that recovery found)."""
        return SegmentFile(
            self.resources, self.directory, first_index=first_index, log_id=self.log_id, exists=exists
        )

    def state(self) -> LogState:
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
