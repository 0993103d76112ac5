"""Replay the records of a journal in memory: the second step of a recovery.

For each log the result names the last entry of its segments that is still valid (later ones were truncated),
and holds the entries after it, which the journal has. For each replica it has the newest term and vote, and
whether a newer vote may have been lost. The step before (`journal_scan.py`) decided which frames of the
journal are valid. No file is read or changed here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from laminar.batch.header import LOG_FIELDS, Flag
from laminar.log.format.checkpoint_state import Checkpoint, HardState, LogStart, LogState
from laminar.log.format.flush_policy import COMMIT, FlushPolicy
from laminar.log.format.journal_codec import (
    CARRIED,
    ONE,
    PAIR,
    POLICY,
    START,
    RecordKind,
    RecoveryReason,
    decode_mark,
)
from laminar.log.recovery.journal_scan import ScanResult

_OPENS_SEGMENT = int(Flag.OPENS_SEGMENT)


@dataclass(slots=True)
class TailFrame:
    """One entry of a log's tail, with its batch: the tail has the entries that come after the segments'."""

    index: int
    term: int
    prev_term: int
    base_offset: int
    opens_segment: bool
    frame: memoryview


@dataclass(slots=True)
class Replayed:
    """The state of one log, as far as the journal's records have been replayed.

    The log's segments are valid up to entry `base_last`, whose term is `base_term` (None: not known before
    the segments are read). `tail` has the entries after that one, from the journal. The methods apply one
    journal record each. Attributes that `LogState` has too mean the same there.
    """

    log_id: int
    name: str
    start: LogStart
    base_last: int
    base_term: int | None
    recovering: bool = False
    incarnation: int = 0
    tail: list[TailFrame] = field(default_factory=list)
    policy: FlushPolicy = COMMIT
    # Whether entries may have been acknowledged before they were synced.
    unsynced: bool = False
    power_lost: bool = False
    # Whether this recovery found that something may be lost: then the log gets a new incarnation, even if it
    # was recovering already.
    found_loss: bool = False
    # Whether memory was lost since entries were acknowledged that were perhaps not synced.
    lost_power: bool = False
    least_term: int = 0

    @property
    def last_index(self) -> int:
        """Index of the last entry, after the records replayed so far."""
        return self.tail[-1].index if self.tail else self.base_last

    def full(self, frame: memoryview) -> bool:
        """Add the entry of a record with a whole batch; return False if it does not continue the log.

        Only what is known without reading the segments is compared.
        """
        index: int
        _, flags, index, term, prev_term, base_offset, *_ = LOG_FIELDS.unpack_from(frame)
        if not self.start.index < index <= self.last_index + 1:
            return False
        chained = index == self.last_index + 1
        # After a gap the record of a truncation may be missing: the later batch at an index counts.
        self.truncate(index)
        before = self.tail[-1].term if self.tail else self.base_term
        if before is not None and before != prev_term:
            return False
        self.tail.append(TailFrame(index, term, prev_term, base_offset, bool(flags & _OPENS_SEGMENT), frame))
        return chained

    def truncate(self, index: int) -> None:
        """Remove entry `index` and all after it."""
        while self.tail and self.tail[-1].index >= index:
            self.tail.pop()
        if index <= self.base_last:
            self.base_last = index - 1
            # Unknown until the segments are read, unless it is the start's.
            self.base_term = self.start.term if self.base_last == self.start.index else None

    def change_policy(self, interval_ms: int, interval_records: int) -> None:
        """Replay a change of the log's flush policy; both intervals are 0 if each append is synced."""
        self.policy = FlushPolicy(interval_ms=interval_ms, interval_records=interval_records)
        self.unsynced &= self.policy.is_interval

    def marked(self, why: int, incarnation: int, least_term: int) -> None:
        """Set the log's recovery state, incarnation and least term (see `Log.set_recovering`).

        `why` is a `RecoveryReason`.
        """
        self.recovering, self.power_lost = why != RecoveryReason.NO, why == RecoveryReason.POWER_LOST
        self.incarnation = incarnation
        self.least_term = least_term

    def move_start(self, start: LogStart) -> None:
        """Set a new start of the log; entries up to `start.index` are removed."""
        if start.index > self.last_index:
            self.tail.clear()
            self.base_last, self.base_term = start.index, start.term
        self.start = start


class Replay:
    """The state of all logs and replicas: that of a checkpoint, with the journal's records applied.

    `gone` are the logs that were deleted or replaced.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.logs = {state.log_id: _from_state(state) for state in checkpoint.logs}
        self.gone: list[Replayed] = []
        self._checkpoint_lsn = checkpoint.lsn
        self.hard_states = dict(checkpoint.hard_states)
        self.lost = set(checkpoint.lost)
        self.replaced = dict(checkpoint.replaced)

    def run(self, scan: ScanResult) -> None:
        """Apply the records of the valid frames in `scan`, in order."""
        if scan.votes_lost_before:
            self.lost |= self.hard_states.keys()
        known_again: set[int] = set()
        for frame in scan.kept:
            for kind, key, payload in frame.records():
                self._apply(kind, key, payload)
                if kind is RecordKind.HARD_STATE:
                    # A vote after the gap is the newest one; after one before the gap, a newer
                    # one may be missing.
                    if frame.head.lsn >= scan.votes_lost_before:
                        known_again.add(key)
                    elif scan.votes_lost_before:
                        self.lost.add(key)
        self.lost -= known_again
        for frame in scan.votes_only:
            for kind, key, payload in frame.records():
                if kind is RecordKind.HARD_STATE:
                    self._apply(kind, key, payload)
        for log in self.logs.values():
            log.found_loss |= scan.damaged
            log.lost_power = log.unsynced and not scan.memory_kept

    def _apply(self, kind: RecordKind, key: int, payload: memoryview) -> None:
        if kind is RecordKind.HARD_STATE:
            self.hard_states[key] = HardState(*PAIR.unpack(payload))
        elif kind is RecordKind.CREATED:
            self.logs[key] = Replayed(key, bytes(payload).decode(), LogStart(), 0, 0)
        elif kind is RecordKind.RESET:
            self._replace(key, *ONE.unpack(payload))
        elif kind is RecordKind.CARRIED:
            # A recovery from an older checkpoint has read the originals already.
            lsn, carried = CARRIED.unpack_from(payload)
            if lsn == self._checkpoint_lsn:
                self._apply(RecordKind(carried), key, payload[CARRIED.size :])
        elif key in self.logs:
            self._apply_to_log(kind, self.logs[key], payload)
        # Else: a log whose creation was in a gap. Its replica is in the manifest without a log, and so
        # counts as lost.

    def _apply_to_log(self, kind: RecordKind, log: Replayed, payload: memoryview) -> None:
        if kind is RecordKind.FULL:
            if not log.full(payload):
                log.found_loss = True
        elif kind is RecordKind.TRUNCATE:
            index, _ = PAIR.unpack(payload)
            log.truncate(index)
        elif kind is RecordKind.LOG_START:
            log.move_start(LogStart(*START.unpack(payload)))
        elif kind is RecordKind.MARK:
            log.marked(*decode_mark(payload))
        elif kind is RecordKind.UNSYNCED:
            log.unsynced = True
        elif kind is RecordKind.POLICY:
            log.change_policy(*POLICY.unpack(payload))
        elif kind is RecordKind.DELETED:
            self.gone.append(self.logs.pop(log.log_id))
            if payload:
                (replica_id,) = ONE.unpack(payload)
                self.hard_states.pop(replica_id, None)
                self.lost.discard(replica_id)

    def _replace(self, new: int, old: int) -> None:
        if old in self.logs:
            self.gone.append(self.logs.pop(old))
        self.replaced = {key: new if to == old else to for key, to in self.replaced.items()}
        self.replaced[old] = new


def _from_state(state: LogState) -> Replayed:
    return Replayed(
        state.log_id,
        state.name,
        state.start,
        state.end_index,
        state.end_term,
        state.recovering,
        state.incarnation,
        policy=FlushPolicy(interval_ms=state.interval_ms, interval_records=state.interval_records),
        unsynced=state.unsynced,
        power_lost=state.power_lost,
        least_term=state.least_term,
    )
