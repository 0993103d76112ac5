"""The content of a checkpoint: each log, each hard state, and the place in the journal that they include.

A checkpoint replaces all journal records up to its LSN. This module has values and their encoding only; the
state that a checkpoint is taken from is in `laminar.log.segment.log_files`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class LogStart:
    """Where a log begins: `index`, `term` and `time_ms` of the entry *before* its first one.

    `offset` is that of the first record that is kept. All are 0 in a log that was never trimmed.
    """

    index: int = 0
    term: int = 0
    offset: int = 0
    time_ms: int = 0


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The last entry: its index and term, and the offset after its records."""

    index: int
    term: int
    offset: int


@dataclass(frozen=True, slots=True)
class HardState:
    """A replica's term, and the id of the replica that it voted for in that term (0: none)."""

    term: int
    vote: int


class LogState(msgspec.Struct, kw_only=True):
    """One log in a checkpoint.

    `segment` is the first index of the last segment (0: no entries), and `end_position` is where the last
    frame ends in it. `policy` is 0 for `commit`, 1 for `interval`; the limits of an interval are
    `interval_ms` and `interval_records`. `unsynced`: in this generation entries may have been
    acknowledged before they were synced. `power_lost`: the log is `recovering` only because a power loss
    may have taken its last interval. `least_term`: see `Log.set_recovering`.
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
    """Return the state of a new log: no files, no entries."""
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
    """The whole content of a checkpoint; see docs/storage.md#checkpoints.

    `generation` is one life of the journal, from a start to the next; `seed` is its random part. Recovery
    begins to read at `journal_position` of file `journal_file`, which was filled with zeros up to
    `journal_size` before its use (0: it was not). `boot_id` is that of the machine's boot in which the
    generation began.

    `hard_states` are by replica id. `lost` are the ids of replicas whose newest hard state may be lost.
    `replaced` maps the ids of replaced logs to the ids of their replacements, until the manifest names
    the replacements.
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
    """Return the checkpoint that `encode_checkpoint` encoded."""
    return _DECODER.decode(payload)


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Return a checkpoint as bytes."""
    return msgspec.msgpack.encode(checkpoint)


def directory_name(name: str, log_id: int) -> str:
    """Return the name of a log's directory."""
    return f"{name}-{log_id:016x}"
