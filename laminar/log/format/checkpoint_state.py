"""The content of a checkpoint: each log, each hard state, and the place in the journal that they include.

A checkpoint replaces all journal records up to its LSN. This module has values and their encoding only; the
state that a checkpoint is taken from is in `laminar.log.segment.log_files`.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class LogStart:
    """The start of a log: `index`, `term` and append time (`time_ms`) of the entry *before* its first.

    `offset` is that of the first record that is kept. All are 0 in a log that was never trimmed.
    """

    index: int = 0
    term: int = 0
    offset: int = 0
    time_ms: int = 0


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The end of a log: index and term of its last entry, and the offset after the last record."""

    index: int
    term: int
    offset: int


@dataclass(frozen=True, slots=True)
class HardState:
    """A replica's term, and the id of the replica that it voted for in that term (0: none)."""

    term: int
    vote: int


class LogState(msgspec.Struct, kw_only=True):
    """The state of one log in a checkpoint.

    The last entry has `end_index` and `end_term`, and `end_offset` is the offset after it. `segment` is the
    first index of the last segment (0: no entries), and `end_position` is the byte position in it where the
    last frame ends. `policy` is 0 for `commit` and 1 for `interval`, whose limits are `interval_ms` and
    `interval_records`. `unsynced` is set if entries may have been acknowledged before they were synced, in
    the checkpoint's generation. `recovering`, `power_lost`, `incarnation` and `least_term` are explained at
    `Log.set_recovering`.
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

    `generation` is the number of the journal's generation (the time from one start to the next), and `seed`
    its random part. The checkpoint includes all journal records up to `lsn`. Recovery reads the journal from
    position `journal_position` of file `journal_file` on; that file was filled with zeros up to
    `journal_size` before its use (0: it was not filled). `boot_id` identifies the machine's boot in which the
    generation began.

    `hard_states` has terms and votes by replica id. `lost` are the ids of replicas whose newest hard state
    may be lost. `replaced` maps the ids of replaced logs to the ids of their replacements, until the manifest
    names the replacements.
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
    """Return the checkpoint in the bytes that `encode_checkpoint` made."""
    return _DECODER.decode(payload)


def encode_checkpoint(checkpoint: Checkpoint) -> bytes:
    """Return the bytes of a checkpoint, in msgpack: the payload of its document."""
    return msgspec.msgpack.encode(checkpoint)


def directory_name(name: str, log_id: int) -> str:
    """Return the name of a log's directory, made of the log's name and its id."""
    return f"{name}-{log_id:016x}"
