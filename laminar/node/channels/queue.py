"""The leader's memory of one channel in one term: which record comes next, and which deliveries expire.

The durable state is the channel's table in the partition's log (`laminar.node.partition.state.channels`). A
queue orders that table: it is built when a leader first uses the channel in its term, and updated with each
entry that the leader proposes. It has heaps of records that are due and of those that are out, and, in an
ordered channel, the records that wait for each key. It has no clock and no log: its caller (`delivery`)
passes the time, and proposes the entries.

Times are of a monotonic clock, in seconds. A step of the wall clock costs at most one delay: a new leader
waits for a record that is aside until its due time, or for its delay, whichever is shorter.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final, NamedTuple

from laminar.node.partition.state.channels import MAX_OPEN, MAX_OPEN_HERE, NO_KEY, Aside, Channel, Out, Why

MAX_PASSED: Final = 16_384
"""The most records that are examined in one turn."""
MIN_OUTDATED: Final = 64
"""Outdated deadlines are removed from the heap only if it may have more of them than this."""


class Scanned(NamedTuple):
    """A record that was read ahead: its key's hash, and whether it passes the channel's filter."""

    offset: int
    key: int
    passes: bool


class Chosen(NamedTuple):
    """The records to be given out next: the arguments of a `GivenOut`, in ascending order of offsets.

    `fresh` are records that are given out for the first time (a list if records are read ahead, else a
    range), `again` those that were out before, `busy` those that must wait for an earlier record of their
    key.
    """

    next: int
    fresh: Sequence[int]
    keys: list[int]
    again: list[int]
    busy: list[tuple[int, int]]

    @property
    def total(self) -> int:
        """The number of records that consumers get."""
        return len(self.fresh) + len(self.again)


def is_full(channel: Channel, open_here: int) -> bool:
    """Return whether too many records are open (out or aside) to give out new ones."""
    return channel.open >= MAX_OPEN or open_here >= MAX_OPEN_HERE


class Queue:
    """The order in which one channel gives out its records, in the memory of the partition's leader."""

    def __init__(self, channel: Channel, *, now_s: float, wall_ms: int, before: Queue | None = None) -> None:
        """Build the queue from the table: deliveries that are out get their whole time again.

        `before` is the earlier queue of the same channel and term, if there is one: then these deliveries
        keep the time that they had left, and records that are aside wait no longer than in that queue.
        """
        self.channel = channel
        # The number of lost records, to notice later losses.
        self.lost = channel.lost
        # The next offset to examine: beyond `next` only after records that do not pass the filter.
        self.at = channel.next
        # The records read ahead from `at` on, and the offset at which reading goes on.
        self.scanned: deque[Scanned] = deque()
        self.scanned_to = channel.next
        # (deadline, delivery, a number, offsets) of records that are out; an extended one has its own entry.
        self._deadlines: list[tuple[float, int, int, Sequence[int]]] = []
        # Numbers of heap entries, so that offsets are never compared.
        self._order = count()
        self._extended: dict[int, tuple[int, float]] = {}
        # (due, offset) of records aside, and offsets that are due; both may have outdated ones.
        self._waiting: list[tuple[float, int]] = []
        self._due: list[int] = []
        # The due time of each record in `_waiting`: a pair that differs is outdated.
        self._due_s: dict[int, float] = {}
        # Only in an ordered channel: by key the ascending offsets of records aside for which later records of
        # the key wait; and the keys of which a record is out.
        self._by_key: dict[int, list[int]] = {}
        self._out_keys: set[int] = set()
        left, due_s = ({}, {}) if before is None else (before._left(), before._due_s)
        self._begin(now_s, wall_ms, left, due_s)

    def _begin(
        self, now_s: float, wall_ms: int, left: dict[tuple[int, int], float], due_s: dict[int, float]
    ) -> None:
        by_timeout: dict[tuple[int, int], list[int]] = {}
        for offset, out in self.channel.out.items():
            deadline_s = left.get((offset, out.delivery))
            if deadline_s is None:
                by_timeout.setdefault((out.timeout_ms, out.delivery), []).append(offset)
            else:
                self._deadlines.append((deadline_s, out.delivery, next(self._order), (offset,)))
            if self.is_ordered and out.key != NO_KEY:
                self._out_keys.add(out.key)
        for (timeout_ms, delivery), offsets in by_timeout.items():
            self._deadlines.append((now_s + timeout_ms / 1000, delivery, next(self._order), offsets))
        heapify(self._deadlines)
        for offset, aside in sorted(self.channel.aside.items()):
            wait_ms = min(aside.delay_ms, max(0, aside.due_ms - wall_ms))
            known_s = now_s + wait_ms / 1000
            self._add_aside(offset, aside, min(known_s, due_s.get(offset, known_s)))
        for key in self._by_key:
            self._consider(key)

    def _left(self) -> dict[tuple[int, int], float]:
        """Return the deadline of each (record, delivery) that may be out."""
        found: dict[tuple[int, int], float] = {}
        for deadline_s, delivery, _, offsets in sorted(self._deadlines):
            for offset in offsets:
                found.setdefault((offset, delivery), deadline_s)
        found |= {(offset, delivery): at_s for offset, (delivery, at_s) in self._extended.items()}
        return found

    @property
    def is_ordered(self) -> bool:
        """Whether the channel is ordered: only one record of each key is out at a time."""
        return self.channel.settings.order == "key"

    @property
    def is_scanned(self) -> bool:
        """Whether records are read ahead, before they are given out, for their keys or the filter."""
        return self.is_ordered or self.channel.settings.filter is not None

    # -- the next records --------------------------------------------------------------------

    def next_time(self) -> float | None:
        """Return the earliest time at which a record is due or a delivery expires; None if there is none.

        It may be too early, which does no harm, because entries of ended deliveries are removed late.
        """
        times = [heap[0][0] for heap in (self._deadlines, self._waiting) if heap]
        return min(times, default=None)

    def has_some(self, *, now_s: float, end: int, open_here: int) -> bool:
        """Return whether a record could be given out now. Call it after `choose`, which skips records."""
        if self.channel.settings.paused or self._room(1) <= 0:
            return False
        self._ripen(now_s)
        if self._due:
            return True
        if is_full(self.channel, open_here):
            return False
        if not self.is_scanned:
            return self.at < self.channel.last(end)
        if not self.scanned:
            return False
        _, key, passes = self.scanned[0]
        return passes and not (self.is_ordered and key != NO_KEY and self._is_busy(key, set()))

    def choose(self, wanted: int, *, now_s: float, end: int, open_here: int) -> Chosen | None:
        """Choose at most `wanted` records to give out; None if no entry is needed.

        `end` is the offset after the last record that may be given out, `open_here` the number of open
        records in all channels of the partition. The chosen records are removed from the queue: the caller
        must give them out, or build a new `Queue`.
        """
        if self.channel.settings.paused:
            return None
        self.at = max(self.at, self.channel.next)
        while self.scanned and self.scanned[0].offset < self.at:
            self.scanned.popleft()
        wanted = self._room(wanted)
        end = self.channel.last(end)
        self._ripen(now_s)
        free = min(MAX_OPEN - self.channel.open, MAX_OPEN_HERE - open_here)
        has_fresh = free > 0 and (bool(self.scanned) if self.is_scanned else self.at < end)
        # If there are new records, half are new ones, so that neither new nor repeated ones starve.
        again = self._take_due(wanted - wanted // 2 if has_fresh else wanted)
        rest = min(wanted - len(again), free)
        busy: list[tuple[int, int]] = []
        keys: list[int] = []
        fresh: Sequence[int]
        if self.is_scanned:
            fresh = self._pass_scanned(rest, free, keys, busy)
        else:
            fresh = range(self.at, min(end, self.at + max(0, rest)))
            self.at = max(self.at, fresh.stop)
        if len(again) + len(fresh) < wanted:
            again = sorted(again + self._take_due(wanted - len(again) - len(fresh)))
        if not (again or fresh or busy or self.at > self.channel.next):
            return None
        return Chosen(self.at, fresh, keys if self.is_ordered else [], again, busy)

    def _room(self, wanted: int) -> int:
        return min(wanted, self.channel.settings.max_in_flight - len(self.channel.out))

    def _pass_scanned(
        self, wanted: int, free: int, keys: list[int], busy: list[tuple[int, int]]
    ) -> list[int]:
        """Return records read ahead that pass the filter; those that must wait for their key go to `busy`."""
        fresh: list[int] = []
        given: set[int] = set()
        for _ in range(min(MAX_PASSED, len(self.scanned))):
            offset, key, passes = self.scanned[0]
            if passes and len(fresh) + len(busy) >= free:
                break
            if passes and self.is_ordered and key != NO_KEY and self._is_busy(key, given):
                busy.append((offset, key))
            elif passes:
                if len(fresh) >= wanted:
                    break
                fresh.append(offset)
                keys.append(key)
                given.add(key)
            self.scanned.popleft()
            self.at = offset + 1
        return fresh

    def _is_busy(self, key: int, given: set[int]) -> bool:
        return key in given or key in self._out_keys or bool(self._by_key.get(key))

    def _ripen(self, now_s: float) -> None:
        while self._waiting and self._waiting[0][0] <= now_s:
            due_s, offset = heappop(self._waiting)
            if self._due_s.get(offset) == due_s:
                del self._due_s[offset]
                heappush(self._due, offset)

    def _take_due(self, wanted: int) -> list[int]:
        found: list[int] = []
        while self._due and len(found) < wanted:
            offset = heappop(self._due)
            aside = self.channel.aside.get(offset)
            if aside is None or aside.why is Why.DEAD or offset in self._due_s:
                continue
            if self._has_order(aside):
                waiting = self._by_key.get(aside.key)
                if aside.key in self._out_keys or not waiting or waiting[0] != offset:
                    continue  # it is considered again when its key is free
                self._out_keys.add(aside.key)
                waiting.pop(0)
            if not found or found[-1] != offset:
                found.append(offset)
        return found

    # -- updates after the leader's entries --------------------------------------------------

    def given_out(self, chosen: Chosen, delivery: int, deadline_s: float) -> None:
        """Update the queue: the chosen records are out, by the last entry of the log."""
        for offsets in (chosen.again, chosen.fresh):
            if offsets:
                self._add_deadline(deadline_s, delivery, offsets)
        if self.is_ordered:
            self._out_keys.update(key for key in chosen.keys if key != NO_KEY)
            for offset, key in chosen.busy:
                self._by_key.setdefault(key, []).append(offset)
            for _, key in chosen.busy:
                self._consider(key)

    def ended(self, offset: int, out: Out | None, aside: Aside | None) -> None:
        """Update the queue: a record is done; `out` or `aside` is the row that the table had for it."""
        self._extended.pop(offset, None)
        if out is not None:
            self._free(out.key)
        elif aside is not None:
            self._forget_aside(offset, aside)

    def put_aside(self, offset: int, out: Out, due_s: float) -> None:
        """Update the queue: a record that was out (given out) is put aside; it is due again at `due_s`.

        The table of channels has been changed already.
        """
        self._extended.pop(offset, None)
        self._add_aside(offset, self.channel.aside[offset], due_s)
        self._free(out.key)

    def retried(self, offset: int, before: Aside, due_s: float) -> None:
        """Update the queue: the due time of a record that is aside has changed to `due_s`.

        `before` is the table's old row of the record. The table has the new row already.
        """
        self._forget_aside(offset, before)
        aside = self.channel.aside[offset]
        self._add_aside(offset, aside, due_s)
        if self._has_order(aside):
            self._consider(aside.key)

    def extend(self, offset: int, delivery: int, deadline_s: float) -> None:
        """Set the deadline of a delivery that is extended."""
        self._extended[offset] = (delivery, deadline_s)
        self._add_deadline(deadline_s, delivery, (offset,))

    def overdue(self, now_s: float) -> list[int]:
        """Return the ascending offsets of deliveries that have expired, and remove their deadlines."""
        found: set[int] = set()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            deadline_s, delivery, _, offsets = heappop(self._deadlines)
            for offset in offsets:
                if offset in self.channel.pins:
                    continue  # it has a deadline again if its batch is not committed
                if self._ends(offset, delivery, deadline_s):
                    found.add(offset)
        return sorted(found)

    def _ends(self, offset: int, delivery: int, deadline_s: float) -> bool:
        """Return whether this deadline is the current one of a record that is out under this delivery."""
        out = self.channel.out.get(offset)
        if out is None or out.delivery != delivery:
            return False
        extended = self._extended.get(offset)
        if extended is not None and extended[0] == delivery:
            return extended[1] == deadline_s  # else it has another one, later or earlier
        return True

    def _add_deadline(self, deadline_s: float, delivery: int, offsets: Sequence[int]) -> None:
        heappush(self._deadlines, (deadline_s, delivery, next(self._order), offsets))
        if len(self._deadlines) > 2 * len(self.channel.out) + MIN_OUTDATED:
            self._forget_outdated()

    def _forget_outdated(self) -> None:
        """Remove deadlines of deliveries that are already over from the heap.

        A deadline may be twelve hours away, and each delivery and each extension adds one.
        """
        held, seen = self.channel.out, set[int]()
        kept: list[tuple[float, int, int, Sequence[int]]] = []
        # The earliest first: for a record that was put back, a later deadline may seem current, too.
        for deadline_s, delivery, order, offsets in sorted(self._deadlines):
            left = [
                offset
                for offset in offsets
                if offset in held and offset not in seen and self._ends(offset, delivery, deadline_s)
            ]
            if left:
                seen.update(left)
                kept.append((deadline_s, delivery, order, left))
        self._deadlines = kept

    def put_back(self, offsets: Iterable[int], now_s: float) -> None:
        """Make these records expire again at `now_s`, because the entry about them was refused."""
        for offset in offsets:
            out = self.channel.out.get(offset)
            if out is not None:
                self._extended.pop(offset, None)
                self._add_deadline(now_s, out.delivery, (offset,))

    # -- order -------------------------------------------------------------------------------

    def _has_order(self, aside: Aside) -> bool:
        return self.is_ordered and aside.key != NO_KEY

    def _holds_key(self, aside: Aside) -> bool:
        """Return whether later records of the same key wait for this record."""
        return aside.why is not Why.DEAD or self.channel.settings.on_dead == "park"

    def _add_aside(self, offset: int, aside: Aside, due_s: float) -> None:
        if aside.why is not Why.DEAD:
            self._due_s[offset] = due_s
        if self._has_order(aside):
            if self._holds_key(aside):
                insort(self._by_key.setdefault(aside.key, []), offset)
        elif aside.why is not Why.DEAD:
            heappush(self._waiting, (due_s, offset))

    def _forget_aside(self, offset: int, aside: Aside) -> None:
        self._due_s.pop(offset, None)
        if not self._has_order(aside):
            return
        waiting = self._by_key.get(aside.key)
        if waiting is not None and offset in waiting:
            waiting.remove(offset)
            self._consider(aside.key)

    def _free(self, key: int) -> None:
        """Update the queue: no record of this key is out."""
        if self.is_ordered and key != NO_KEY:
            self._out_keys.discard(key)
            self._consider(key)

    def _consider(self, key: int) -> None:
        """If no record of a key is out, schedule its first waiting record for when it is due."""
        waiting = self._by_key.get(key)
        if waiting is None or key in self._out_keys:
            return
        if not waiting:
            del self._by_key[key]
            return
        aside = self.channel.aside.get(waiting[0])
        if aside is None or aside.why is Why.DEAD:
            return
        due_s = self._due_s.get(waiting[0])
        if aside.why is Why.BUSY or due_s is None:
            self._due_s.pop(waiting[0], None)
            heappush(self._due, waiting[0])
        else:
            heappush(self._waiting, (due_s, waiting[0]))
