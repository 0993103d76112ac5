"""By which way one log's changes reach the disk: through the journal, or straight into its segments.

A `commit` log's changes are all journal records. An `interval` log's batches go past the journal to the
segments' writer; its other changes are records, and the rules that keep the two ways in one order are here:

1. Before a record of an `interval` log is queued, its batches queued before are handed to the writer.
2. Behind a record (also its replica's term and vote) batches are *held* until that record is durable and
   handed to the writer: no byte of a segment changes before the truncation that makes room is durable.
3. A change of policy holds everything until the segments are synced up to there, so neither way of coming
   back finds a hole.
4. An entry that a truncation cut may come again. Recovery never takes such an entry from a segment, so it
   waits until a `synced` record stands behind that truncation.
5. Behind a configuration everything is held until the segments are synced. Who lost the last interval asks
   all voters that it knows of, and that protects nothing if it has forgotten who they are.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laminar.frame import Kind
from laminar.log.codec import PAIR, POLICY, RecordKind, record_head
from laminar.log.pending import Cut, Pending, Policy, Recorder, Write
from laminar.log.policy import FlushPolicy
from laminar.log.rows import HEADER, KIND_AT

if TYPE_CHECKING:
    from laminar.log.intervals import Intervals
    from laminar.log.log import Log

_UNTIL_SYNCED = 1 << 62


@dataclass(frozen=True, slots=True)
class Place:
    """A log's end: the last entry, the offset behind it, and how often the log had been truncated then."""

    index: int
    term: int
    offset: int
    cuts: int


class Passage:
    """See the module. One for each log; loop side only."""

    __slots__ = (
        "_cut_entries",
        "_held",
        "_intervals",
        "_lifted_at",
        "_lifting",
        "_log",
        "_recorder",
        "_until",
        "boot_id",
        "cuts",
        "interval",
        "policy",
        "synced_index",
        "synced_offset",
    )

    def __init__(self, log: Log, recorder: Recorder) -> None:
        self._log = log
        self._recorder = recorder
        self._intervals: Intervals | None = None
        self.policy = log.files.policy
        # Whether batches go past the journal. Never in recovery, which has no lane.
        self.interval = False
        # The boot under which entries may be acknowledged and not synced, as recorded.
        self.boot_id = log.files.boot_id
        self.synced_index = log.last_index
        self.synced_offset = log.next_offset
        self.cuts = 0
        # Changes that wait, oldest first, until the journal is durable up to a running number; None: none do.
        self._held: deque[Pending] | None = None
        self._until = 0
        self._cut_entries: set[tuple[int, int]] = set()
        self._lifting: set[tuple[int, int]] = set()
        self._lifted_at = 0

    def attach(self, intervals: Intervals) -> None:
        """There is a loop and a writer from now on."""
        self._intervals = intervals
        self.interval = self.policy.is_interval

    @property
    def straight(self) -> bool:
        """Whether a batch may be recorded in the journal at once."""
        return self._held is None and not self.interval

    @property
    def holding(self) -> bool:
        """Whether changes made now wait for something before they are on their way."""
        return self._held is not None

    # Changes

    def prepare(self) -> None:
        """Before batches are put."""
        if self.interval and not self.boot_id:
            self._mark_boot()

    def _mark_boot(self) -> None:
        """The mark of a clean stop goes, durably, before the first entry is acknowledged."""
        assert self._intervals is not None
        self.boot_id = self._intervals.boot_id
        log = self._log
        log.mark(recovering=log.recovering, incarnation=log.incarnation, power_lost=log.power_lost)

    def put(self, action: Write) -> None:
        """One batch."""
        pending = (record_head(RecordKind.FULL, self._log.log_id, len(action.frame)), action.frame, action)
        if self._held is None:
            self._go(pending)
        else:
            self._held.append(pending)

    def record(self, pending: Pending) -> int:
        """Any other change. Returns its running number; 0 if it isn't known yet."""
        if self._held is not None and (self._held or self._until == _UNTIL_SYNCED):
            self._held.append(pending)
            return 0
        return self._go(pending)

    def _go(self, pending: Pending) -> int:
        head, payload, action = pending
        log, recorder, intervals = self._log, self._recorder, self._intervals
        if type(action) is Write:
            if self.interval and intervals is not None:
                if (self._cut_entries or self._lifting) and self._was_cut(action):
                    self.hold_until_synced()
                    assert self._held is not None
                    self._held.append(pending)
                    intervals.settle_segments(log, None)
                    return 0
                number = intervals.put(log, action)
                log.on_its_way(number, action)
                recorder.remember(log, action.index, action.frame, intervals)
                if action.frame[KIND_AT] == Kind.CONFIGURATION:
                    self.hold_until_synced()
                    intervals.settle_segments(log, None)
            else:
                number = recorder.record(head, payload, action)
                log.on_its_way(number, action)
                recorder.touched[log] = None
                recorder.remember(log, action.index, action.frame, recorder)
            return number
        if self.interval and intervals is not None:
            intervals.flush()
        number = recorder.record(head, payload, action)
        if type(action) is Policy and intervals is not None:
            self.interval = self.policy.is_interval
        if self.interval:
            if type(action) is Cut:
                self._cut_entries.add(PAIR.unpack(payload))
            self.hold(number)
        return number

    def _was_cut(self, action: Write) -> bool:
        """Whether a recovery would take this entry for one left over from before a truncation."""
        assert self._intervals is not None
        if self._intervals.durable_number >= self._lifted_at:
            self._lifting = set()
        entry = (action.index, HEADER.unpack_from(action.frame)[3])
        return entry in self._cut_entries or entry in self._lifting

    def truncated(self, index: int) -> None:
        """The log is cut from this entry on; the record follows."""
        self.cuts += 1
        self.synced_index = min(self.synced_index, index - 1)

    # Holding

    def hold(self, number: int) -> None:
        """Batches wait until the journal is durable up to `number`. No effect on a `commit` log."""
        if not self.interval or self._intervals is None:
            return
        if self._held is None:
            self._held = deque()
            self._intervals.holding[self._log] = None
        self._until = max(self._until, number)

    def hold_until_synced(self) -> None:
        """Everything waits until the segments are synced; then `go_on`."""
        assert self._intervals is not None, f"{self._log!r} has no storage"
        if self.interval:
            self._intervals.flush()
        if self._held is None:
            self._held = deque()
            self._intervals.holding[self._log] = None
        self._until = _UNTIL_SYNCED

    def released(self, number: int) -> None:
        """The journal is durable up to `number`, and the writer has it."""
        if self._held is not None and number >= self._until:
            self._release(self._held)

    def _release(self, held: deque[Pending]) -> None:
        self._held, self._until = None, 0
        while held and not self.holding:
            self._go(held.popleft())
        if self.holding:
            self._hold_again(held)
            return
        log = self._log
        # A log that only got its first start, or lost entries, has no batch whose arrival says so.
        log.durable_index = max(log.durable_index, log.start.index)
        assert self._intervals is not None
        self._intervals.let_go(log)

    def go_on(self, place: Place, policy: FlushPolicy | None) -> None:
        """The segments are synced up to `place`, behind which all is held; say so, and go on."""
        held = self._held
        assert held is not None and self._until == _UNTIL_SYNCED, f"{self._log!r} waits for no sync"
        if not any(type(action) is Cut for _, _, action in held):
            # Else what was synced is not what the log holds there by now.
            self.synced(place)
        self._held, self._until = None, 0
        if policy is None:
            self.record_synced(place)
            self.hold(self._recorder.recorded)
        else:
            self.begin(policy, place)
        if self.holding:
            self._hold_again(held)
        else:
            self._release(held)

    def _hold_again(self, rest: deque[Pending]) -> None:
        """What goes on waiting is behind what has just begun to."""
        assert self._held is not None, f"{self._log!r} holds nothing"
        self._held.extend(rest)

    def failed(self) -> None:
        """A segment failed. What waits will never be written, and a restart must know that what was
        acknowledged may be gone: pages whose sync failed are marked clean, and read again from the disk.
        """
        self._held, self._until = None, 0
        log = self._log
        if self.interval:
            log.recovering, log.power_lost = True, False
            log.incarnation += 1
            self._recorder.record(*log.mark_record())

    def begin(self, policy: FlushPolicy, place: Place) -> None:
        """Go on under another policy: all up to `place` is durable in the segments."""
        self.policy = policy
        self.boot_id = b""
        self._cut_entries, self._lifting = set(), set()
        head = record_head(RecordKind.POLICY, self._log.log_id, POLICY.size)
        payload = POLICY.pack(policy.interval_ms, policy.interval_records, place.index, place.term)
        self._go((head, payload, Policy(self._log.files, policy)))
        if self.interval:
            # What is held goes past the journal as soon as it is released: so the mark goes first.
            self._mark_boot()

    # Syncs of the segments

    def synced(self, place: Place) -> bool:
        """The segments are synced up to `place`. Returns whether that still says something."""
        if place.cuts != self.cuts or place.index < self._log.start.index:
            return False
        if place.index > self.synced_index:
            self.synced_index, self.synced_offset = place.index, place.offset
        return True

    def record_synced(self, place: Place) -> None:
        """Let the journal say so: behind that, what was cut before cannot come back."""
        assert self._intervals is not None
        self._intervals.record_synced(self._log, place)
        if self._cut_entries:
            self._lifting |= self._cut_entries
            self._cut_entries = set()
            self._lifted_at = self._recorder.recorded
