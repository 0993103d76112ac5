"""Delivery of the records of one partition to the consumers of its channels. The leader's part.

Requests collect for a turn of the loop. At its end `_turn` proposes, in this order, what was acknowledged,
what failed or took too long, and then what is given out: so a successor of a key is out after the entry that
ends the one before it. A consumer is answered when the entry is committed, never before: what an earlier
leader promised is then in the log of this one.

A token counts only if its record is out *at the log's end* under that delivery. Other tokens change nothing:
one whose record is done says so, all others are late. Both are said when all that was looked at is committed.

The memory of a leader (`queue`) is for one term. Nothing here has to be notified of elections: each turn
compares the term, and begins again with what the log says.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange
from laminar.node.channels.counts import OVERDUE_MS, ChannelCount, ChannelCounts
from laminar.node.channels.ends import TIME_OUT, Ends
from laminar.node.channels.jobs import Jobs, Run, frames_of, split
from laminar.node.channels.pinning import wanted_of
from laminar.node.channels.queue import Chosen, Queue
from laminar.node.channels.requests import Settled, Step, Verb
from laminar.node.channels.scanner import Scanner
from laminar.node.channels.watchers import Watchers
from laminar.node.partition.partition import Partition
from laminar.node.partition.problems import not_leader
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.channels import (
    Acknowledged,
    Change,
    Channel,
    Closed,
    GivenOut,
    Opened,
    Out,
    Retried,
    Sought,
    Why,
    channel_entry,
    runs_of,
    spaced,
    spaced_runs,
)
from laminar.node.partition.state.pins import PINS_SINCE, PartAcks, PinsEnded
from laminar.node.partition.state.staged_batches import BatchKey
from laminar.wire.channels import ChannelSettings, CursorStart, Named

MAX_JOBS: Final = 10_000
"""Most records that one request is given."""
MAX_RANGE: Final = MAX_JOBS
"""Most records that one request names."""
TICK_S: Final = 0.1
"""How often, at most, what is due is looked for."""
STALL_S: Final = 0.25
"""A check that is late by more is taken for a stall of this process, which costs no consumer its time."""
PASSED_S: Final = 1.0
"""How often, at most, it is written down how far a channel has looked that gives out nothing."""
GATE_S: Final = 0.5
"""How long an ordered channel waits before it asks for the partitions before its own again."""


@dataclass(slots=True, eq=False)
class _Receiver:
    """A request for records; with `wanted` 0 it asks only whether there is one."""

    wanted: int
    timeout_ms: int | None
    deadline_s: float
    future: asyncio.Future[list[Run] | None]
    # Of what it is given: the records whose last consumer was late.
    late: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class _Settler:
    """A request that says what became of records; `extends` are those that may have more time."""

    channel: int
    steps: Sequence[Step]
    future: asyncio.Future[Settled]
    extends: list[tuple[int, Out, int]] = field(default_factory=list)
    # No entry was proposed after it was judged, whose commit would show that this replica led then.
    is_unconfirmed: bool = False


@dataclass(slots=True, eq=False)
class _Line:
    """One channel in this term: its queue, and the consumers that wait."""

    queue: Queue
    scanner: Scanner
    waiting: deque[_Receiver] = field(default_factory=deque)
    gate: asyncio.Task[None] | None = None
    is_open: bool = False
    passed_s: float = 0.0


async def _always(partition: Partition, channel: int) -> bool:
    return True


class Delivery:
    """The channels of one partition. `stop` ends its tasks."""

    def __init__(
        self,
        partition: Partition,
        *,
        precedes: Callable[[Partition, int], Awaitable[bool]] = _always,
        counts: ChannelCounts | None = None,
    ) -> None:
        """Make the delivery of a partition; it is idle until it is asked.

        `precedes(partition, channel id)` returns whether the channel has ended all that is in the partitions
        before this one: an ordered channel gives out nothing before that. `counts` are raised for what
        becomes of records.
        """
        self._partition = partition
        self._precedes = precedes
        self._loop = asyncio.get_running_loop()
        # The memory of lines is of this term, and of this table.
        self._term = -1
        self._table = partition.state.channels
        self._lines: dict[int, _Line] = {}
        self._settlers: list[_Settler] = []
        self._turn_is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        # How long this process has stood still, which does not count for consumers.
        self._stalled_s = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._watchers = Watchers()
        # When a batch last asked for its pins, by the loop's time; not of those that an earlier leader made.
        self.pinned_s: dict[BatchKey, float] = {}
        self._counts = ChannelCounts() if counts is None else counts
        self.given = 0
        self.repeated = 0
        self.acknowledged = 0
        self.late = 0
        self.died = 0

    # -- requests ------------------------------------------------------------------------------

    async def open(
        self, channel: int, name: str, version: int, settings: ChannelSettings, *, from_start: bool = False
    ) -> Receipt:
        """Open a channel here, or bring its settings to this version; return when that is committed.

        With `from_start` it begins with the first record whatever its settings say, as in a partition that
        was made after it.

        Raises:
            Problem: 503 `not_leader`, or the log takes no entry.
        """
        partition = self._partition
        partition.check_leads()
        bounds = await partition.reader.confirmed_bounds()
        first, until = bounds.start, None
        if settings.start == "latest" and not from_start:
            first = bounds.end
        elif isinstance(settings.start, int) and not from_start:
            first, _ = await partition.reader.at_time(bounds, settings.start)
        if settings.until is not None:
            until, _ = await partition.reader.at_time(bounds, settings.until)
        known = partition.state.channels.by_id.get(channel)
        if known is not None and known.version >= version:
            return await self._seen()
        if known is None:
            self._check_fence()
        if isinstance(settings.start, CursorStart) and not from_start:
            # The bounds were confirmed before: what a client was answered to have set is committed here.
            cursor = partition.cursor_commands.get(settings.start.cursor)
            first = bounds.start if cursor is None else cursor.position
        first = max(first, partition.state.next_start)
        future = self._propose([Opened(channel, name, version, settings, first, until)])
        self._renew(channel)
        return await future

    async def close(self, channel: int) -> Receipt:
        """Forget a channel; return when that is committed. Raises `Problem` as `open` does."""
        self._partition.check_leads()
        if channel not in self._partition.state.channels.by_id:
            return await self._seen()
        future = self._propose([Closed(channel)])
        self._renew(channel)
        return await future

    async def receive(
        self, channel: int, *, wanted: int, wait_s: float, timeout_ms: int | None = None
    ) -> Jobs | None:
        """Return up to `wanted` records, given to the caller alone; None after `wait_s` without one.

        With `wanted` 0 none is given: the answer has no records when there is one to be given, or is None.

        Raises:
            Problem: 503 `being_created` if the channel is not open here; 404 `no_such_channel` if it is
                deleted meanwhile; 503 `not_leader`; 503 or 507 when the log takes no entry. With the outcome
                `unknown` records may be out until their time is over.
        """
        self._partition.check_leads()
        line = self._line(channel)
        future: asyncio.Future[list[Run] | None] = self._loop.create_future()
        receiver = _Receiver(min(wanted, MAX_JOBS), timeout_ms, self._loop.time() + wait_s, future)
        line.waiting.append(receiver)
        self._wake()
        runs: list[Run] | None = None
        try:
            runs = await future
            if runs is None:
                return None
            return await self._read(channel, runs, receiver.late)
        except asyncio.CancelledError:
            # The caller is gone: what it was given is released, also if that is committed only now.
            if future.done() and not future.cancelled() and future.exception() is None:
                runs = future.result()
            if runs:
                self._release(channel, runs)
            raise

    async def settle(self, channel: int, steps: Sequence[Step]) -> Settled:
        """Acknowledge, refuse, release or extend records that were given out; return when that is committed.

        Raises:
            Problem: as `receive`; 422 `invalid` when too many records are named. With the outcome `unknown`
                it may have been carried out: to ask again is safe.
        """
        self._partition.check_leads()
        self._line(channel)
        _check_range([step.named for step in steps])
        settler = _Settler(channel, steps, self._loop.create_future())
        self._settlers.append(settler)
        self._wake()
        settled = await settler.future
        if settler.is_unconfirmed or settler.extends:
            # A leader that was deposed may lack what was given out since, after a seek also of what is done.
            # Nor may it give time: the next one counts by its own clock.
            await self._partition.reader.confirmed_bounds()
        if settler.extends:
            missed = self._extend(settler)
            if missed:
                await self._seen()  # what ended them is not committed yet, perhaps
                settled = Settled(settled.done - len(missed), settled.late + missed)
        return settled

    async def ended(
        self, channel: int, stream: int, named: Sequence[Named], *, wait_s: float
    ) -> tuple[list[Named], int]:
        """Return which of these deliveries are over, and how many of their records because they were late.

        It waits, up to `wait_s`, until one is over, and returns when that is committed. So it is never taken
        back; what is not named may be over meanwhile. Of a `stream` one question waits: a later one ends it.

        Raises:
            Problem: as `receive`; 422 `invalid` when too many records are named.
        """
        deadline_s = self._loop.time() + wait_s
        _check_range(named)
        offsets = [offset for each in named for offset in range(each.first, each.end)]
        while True:
            self._partition.check_leads()
            held = self._line(channel).queue.channel
            self._wake()  # time-outs are looked at, also if no consumer asks this leader for records
            over: list[Named] = []
            late = 0
            for each in named:
                out = [
                    offset
                    for offset in range(each.first, each.end)
                    if (known := held.out.get(offset)) is None or known.delivery != each.delivery
                ]
                over += [each._replace(first=first, end=first + count) for first, count in runs_of(out)]
                late += sum(_was_late(held, offset) for offset in out)
            if over:
                # A leader that was deposed may lack deliveries of the next one: they are not over.
                await self._partition.reader.confirmed_bounds()
                await self._seen()
                return over, late
            left_s = deadline_s - self._loop.time()
            if left_s <= 0 or not await self._watchers.wait(channel, stream, offsets, left_s):
                return [], 0

    # -- transactions --------------------------------------------------------------------------

    async def pin(self, batch: BatchKey, acks: Sequence[PartAcks]) -> int:
        """Pin records for a batch of a sink; return the entry's index when it is committed.

        From then on they are out until `end_pins`: no time runs for them, and no consumer may end them. To
        ask again for the same changes nothing.

        Raises:
            Problem: as `wanted_of`; 422 `invalid` when the flush policy is `interval`; 503 `not_enabled`;
                503 `not_leader`, or the log takes no entry.
        """
        partition = self._partition
        partition.check_leads()
        partition.context.check_knows(PINS_SINCE, "acknowledgements in transactions")
        if partition.log.policy.is_interval:
            # An entry that is lost with the power would give out again what a decision counts as done.
            raise Problem(
                "invalid",
                "transactions require partitions with the flush policy `commit`",
                field="flush",
                value="interval",
                limit="commit",
                outcome="not_applied",
            )
        try:
            changes = wanted_of(partition.state.channels, batch, acks)
        except Problem:
            # A leader that was deposed may not know of the delivery, nor that another batch has ended.
            await partition.reader.confirmed_bounds()
            await self._seen()
            changes = wanted_of(partition.state.channels, batch, acks)
        for change in changes:
            self._line(change.channel)
        # Synced, as replicas change to the policy `interval` one by one.
        future = self._propose([*changes], synced=True) if changes else self._seen()
        held = partition.state.channels.pins.get(batch)
        self.pinned_s[batch] = self._loop.time()
        await future
        return 0 if held is None else held.entry

    async def end_pins(self, batch: BatchKey, *, done: bool, index: int | None = None) -> None:
        """End what a batch has pinned here; return when that is committed. To ask again changes nothing.

        With `done` the records are acknowledged: the caller knows that the batch is decided. Else their time
        begins again: the caller knows that it is not decided, and can't be any more. `index` is that of the
        entry that pinned them, if only what that entry pinned is meant.

        Raises:
            Problem: 503 `not_leader`, or the log takes no entry.
        """
        partition = self._partition
        partition.check_leads()
        held = partition.state.channels.pins.get(batch)
        if held is None or index not in (None, held.entry):
            # A leader that was deposed may lack what is to be ended, and must not say that it was.
            await partition.reader.confirmed_bounds()
            held = partition.state.channels.pins.get(batch)
            if held is None or index not in (None, held.entry):
                await self._seen()
                return
        ended: list[tuple[Queue, dict[int, Out]]] = []
        for channel, offsets in partition.state.channels.pinned(batch).items():
            queue, outs = self._line(channel).queue, self._channel(channel).out
            ended.append((queue, {offset: outs[offset] for offset in offsets}))
        future = self._propose([PinsEnded(*batch, done=done)], synced=True)
        self.pinned_s.pop(batch, None)
        now_s = self._loop.time() - self._stalled_s
        for queue, before in ended:
            for offset, out in before.items():
                if done:
                    queue.ended(offset, out, None)
                else:
                    queue.extend(offset, out.delivery, now_s + out.timeout_ms / 1000)
            if done:
                self.acknowledged += len(before)
                self._count(queue.channel).acknowledged += len(before)
                self._watchers.ended(queue.channel.id, before)
        self._wake()
        await future

    # -- places and the dead -------------------------------------------------------------------

    async def seek(self, channel: int, offset: int, *, drop: bool = False) -> Receipt:
        """Give out from `offset` on, whatever was done there; see `Sought`. Raises `Problem`."""
        self._partition.check_leads()
        self._line(channel)
        self._check_fence()
        # A start of the log that is not committed yet has passed the table: it takes nothing more from it.
        offset = max(offset, self._partition.state.next_start)
        future = self._propose([Sought(channel, offset, drop)])
        self._renew(channel)
        return await future

    def _check_fence(self) -> None:
        """Raise 503 `changing` while the partition is being reclaimed: then nothing is to come out of it."""
        if self._partition.cursor_commands.is_fenced():
            name = self._partition.context.name
            raise Problem("changing", f"{name} is being reclaimed", outcome="not_applied")

    async def retry_dead(self, channel: int, offsets: Iterable[int] | None) -> int:
        """Give out dead records again; None: all. Return how many were dead. Raises `Problem`."""
        dead = self._dead(channel, offsets)
        if not dead:
            await self._seen()
            return 0
        line = self._line(channel)
        before = {offset: line.queue.channel.aside[offset] for offset in dead}
        future = self._propose([Retried(channel, [part for each in spaced(dead) for part in (each, 0)])])
        now_s = self._loop.time() - self._stalled_s
        for offset, aside in before.items():
            line.queue.retried(offset, aside, now_s)
        self._wake()
        await future
        return len(dead)

    async def drop_dead(self, channel: int, offsets: Iterable[int] | None) -> int:
        """End dead records; None: all. Return how many were dead. Raises `Problem`."""
        dead = self._dead(channel, offsets)
        await (self._drop(channel, dead) if dead else self._seen())
        return len(dead)

    def _drop(self, channel: int, dead: list[int]) -> asyncio.Future[Receipt]:
        line = self._line(channel)
        before = {offset: line.queue.channel.aside[offset] for offset in dead}
        future = self._propose([Acknowledged(channel, spaced_runs(runs_of(dead)))])
        for offset, aside in before.items():
            line.queue.ended(offset, None, aside)
        self._wake()
        return future

    async def is_drained(self, channel: int) -> bool:
        """Return whether a channel has ended all that will ever be here, but what is dead. Leader only.

        That is final: it is committed, and a majority has confirmed that this replica leads. A dead record
        that parks its key is not ended.

        Raises:
            Problem: 503 `not_leader`.
        """
        # The table is looked at first: what is appended after that is not waited for, and may be lost.
        if not self._has_ended_all(channel):
            return False
        await self._partition.reader.confirmed_bounds()
        await self._seen()
        return True

    def _has_ended_all(self, channel: int) -> bool:
        held = self._partition.state.channels.by_id.get(channel)
        end = self._partition.final_end
        if held is None or end is None or held.out:
            return False
        parks = held.settings.on_dead == "park"
        if any(aside.why is not Why.DEAD or parks for aside in held.aside.values()):
            return False
        return held.next >= held.last(end)

    def check(self) -> None:
        """End dead records that were kept long enough. To be called now and then."""
        if not self._partition.leads:
            return
        pins = self._partition.state.channels.pins
        self.pinned_s = {batch: at_s for batch, at_s in self.pinned_s.items() if batch in pins}
        now_ms = self._partition.context.now_ms()
        for channel in list(self._partition.state.channels.by_id.values()):
            old = [
                offset
                for offset, aside in channel.aside.items()
                if aside.why is Why.DEAD and now_ms - aside.due_ms > channel.settings.dead_ms
            ]
            if old:
                with suppress(Problem):
                    self._drop(channel.id, sorted(old)).add_done_callback(_ignore)
            elif channel.open:
                self._line(channel.id)  # its time-outs are looked at, though no consumer asks
        self._wake()

    def stop(self) -> None:
        """End all tasks, and refuse what waits: this replica serves no more requests."""
        for line in self._lines.values():
            self._end_tasks(line)
        if self._watch is not None:
            self._watch.cancel()
        if self._timer is not None:
            self._timer.cancel()
        self._refuse_all(not_leader(self._partition.context.name, outcome="not_applied"))

    # -- the turn ------------------------------------------------------------------------------

    def _wake(self) -> None:
        if not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_is_due = False
        try:
            if self._leads():
                now_s = self._loop.time() - self._stalled_s
                self._end_deliveries(now_s)
                self._give_out(now_s)
                self._set_timer()
        except Exception as error:  # noqa: BLE001  # stops this partition's replica
            self._refuse_all(not_leader(self._partition.context.name, outcome="unknown"))
            self._partition.stop(error)

    def _leads(self) -> bool:
        """Return whether this replica leads; forget the memory of another term."""
        partition = self._partition
        term = partition.replica.core.term
        if not partition.leads:
            self._term = -1
            self._refuse_all(not_leader(partition.context.name, outcome="not_applied"))
            return False
        if term != self._term or self._table is not partition.state.channels:
            self._term, self._table = term, partition.state.channels
            for channel in list(self._lines):
                self._renew(channel)
                if channel in self._lines:
                    self._lines[channel].is_open = False
        for channel, line in list(self._lines.items()):
            # The log's start has passed some of its records, or a snapshot made its table again.
            if line.queue.lost != line.queue.channel.lost or self._is_stale(channel, line):
                self._renew(channel)
        return True

    def _is_stale(self, channel: int, line: _Line) -> bool:
        """Return whether a line orders the records of a table that is not in force.

        A snapshot rolls back what is not committed, and does it again: if that includes the channel's
        opening, the table is another object then.
        """
        return line.queue.channel is not self._partition.state.channels.by_id.get(channel)

    def _refuse_all(self, problem: Problem) -> None:
        lines, self._lines = self._lines, {}
        settlers, self._settlers = self._settlers, []
        self._watchers.refuse(problem)
        for line in lines.values():
            self._end_tasks(line)
            for receiver in line.waiting:
                _fail(receiver.future, problem)
        for settler in settlers:
            _fail(settler.future, problem)

    @staticmethod
    def _end_tasks(line: _Line) -> None:
        line.scanner.stop()
        if line.gate is not None:
            line.gate.cancel()
            line.gate = None

    def _channel(self, channel: int) -> Channel:
        held = self._partition.state.channels.by_id.get(channel)
        if held is None:
            # Whether there is such a channel is asked before, of the catalog.
            raise Problem(
                "being_created",
                f"the channel is not open in {self._partition.context.name} yet",
                retry_after_ms=50,
                outcome="not_applied",
            )
        return held

    def _line(self, channel: int) -> _Line:
        held = self._channel(channel)
        line = self._lines.get(channel)
        if line is not None and self._is_stale(channel, line):
            self._renew(channel)
        if line is None:
            line = self._lines[channel] = _Line(self._queue_of(held), Scanner(self._partition, self._wake))
        return line

    def _queue_of(self, channel: Channel) -> Queue:
        now_s = self._loop.time() - self._stalled_s
        return Queue(channel, now_s=now_s, wall_ms=self._partition.context.now_ms())

    def _renew(self, channel: int) -> None:
        """Order a channel's records again by the table; consumers go on waiting."""
        self._watchers.ended(channel)
        line = self._lines.get(channel)
        if line is None:
            return
        self._end_tasks(line)
        held = self._partition.state.channels.by_id.get(channel)
        if held is not None:
            line.queue = self._queue_of(held)
            self._wake()
            return
        del self._lines[channel]
        for receiver in line.waiting:
            _fail(receiver.future, Problem("no_such_channel", "it was deleted", outcome="not_applied"))

    def _propose(self, changes: list[Change], *, synced: bool = False) -> asyncio.Future[Receipt]:
        """Propose one entry. With `synced` it counts only when it is synced, whatever the flush policy.

        Raises `Problem` when nothing was proposed.
        """
        partition = self._partition
        partition.appends.flush()
        succession = partition.state.succession
        # What follows a seal may be counted on by the partitions after it.
        synced = synced or succession.successor_of > 0 or succession.sealed is not None
        future: asyncio.Future[Receipt] = self._loop.create_future()
        partition.appends.propose(channel_entry(changes, synced=synced), [(future, 0)])
        return future

    def _seen(self) -> asyncio.Future[Receipt]:
        """Return a future that is resolved when all that is in the log now is committed."""
        partition = self._partition
        return partition.appends.when_committed(
            partition.log.last_index, Receipt(partition.number, 0, 0), copied=False
        )

    # -- what ends -----------------------------------------------------------------------------

    def _end_deliveries(self, now_s: float) -> None:
        """Propose what consumers said, and what took too long."""
        settlers, self._settlers = self._settlers, []
        ends = Ends()
        answers: list[tuple[_Settler, Settled]] = []
        for settler in settlers:
            if settler.future.done():
                continue
            channel = self._partition.state.channels.by_id.get(settler.channel)
            if channel is None:
                _fail(settler.future, Problem("no_such_channel", "it was deleted", outcome="not_applied"))
                continue
            self._line(channel.id)  # it is made by the table as it is before this turn
            settled, settler.extends = ends.settle(channel, settler.steps)
            answers.append((settler, settled))
        overdue: dict[int, list[int]] = {}
        for number, line in self._lines.items():
            found = overdue[number] = line.queue.overdue(now_s)
            for offset in found:
                ends.overdue(line.queue.channel, offset, line.queue.channel.out[offset])
        changes = ends.changes()
        try:
            future = self._propose(changes) if changes else self._seen() if answers else None
            for settler, _ in answers:
                settler.is_unconfirmed = not changes
        except Problem as problem:
            for settler, _ in answers:
                _fail(settler.future, problem)
            for number, found in overdue.items():
                self._lines[number].queue.put_back(found, now_s + TICK_S)
            return
        if future is not None:
            future.add_done_callback(partial(_answer, answers))
        self._note_ends(ends, now_s)

    def _note_ends(self, ends: Ends, now_s: float) -> None:
        self.late += ends.late.total()
        self.died += ends.died.total()
        for channel, late in ends.late.items():
            if late:
                self._count(self._line(channel).queue.channel).late += late
        for channel, died in ends.died.items():
            self._count(self._line(channel).queue.channel).died += died
        for channel, acked in ends.acked.items():
            self.acknowledged += len(acked)
            self._watchers.ended(channel, acked)
            queue = self._line(channel).queue
            self._count(queue.channel).acknowledged += len(acked)
            for offset, out in acked.items():
                queue.ended(offset, out, None)
        for (channel, _), items in ends.failed.items():
            self._watchers.ended(channel, [offset for offset, *_ in items])
            queue = self._line(channel).queue
            for offset, out, delay_ms, _ in items:
                queue.put_aside(offset, out, now_s + max(0, delay_ms) / 1000)

    def _extend(self, settler: _Settler) -> list[Named]:
        """Give records more time; return those that are not out any more."""
        channel = self._partition.state.channels.by_id.get(settler.channel)
        line = self._lines.get(settler.channel)
        if line is not None and self._is_stale(settler.channel, line):
            self._renew(settler.channel)
        now_s = self._loop.time() - self._stalled_s
        missed: list[Named] = []
        for offset, out, timeout_ms in settler.extends:
            if channel is None or channel.out.get(offset) != out:
                missed.append(Named(self._partition.number, offset, offset + 1, out.delivery))
            elif line is not None:
                line.queue.extend(offset, out.delivery, now_s + timeout_ms / 1000)
        self._wake()
        return missed

    def _release(self, channel: int, runs: Iterable[Run]) -> None:
        """Have what was given to a consumer that is gone be given to another at once."""
        if not self._partition.leads or channel not in self._partition.state.channels.by_id:
            return
        self._settle_alone(channel, "release", runs)

    def _settle_alone(self, channel: int, verb: Verb, runs: Iterable[Run], reason: str = "") -> None:
        """Say what became of records for a consumer that cannot."""
        number = self._partition.number
        steps = [Step(verb, Named(number, run.first, run.end, run.delivery), reason=reason) for run in runs]
        future: asyncio.Future[Settled] = self._loop.create_future()
        future.add_done_callback(_ignore)
        self._settlers.append(_Settler(channel, steps, future))
        self._wake()

    # -- what is given out ---------------------------------------------------------------------

    def _give_out(self, now_s: float) -> None:
        """Propose what the consumers that wait are given; answer those that have waited long enough."""
        partition, table = self._partition, self._partition.state.channels
        end = partition.end_offset
        changes: list[Change] = []
        given: list[tuple[_Line, Chosen, list[_Receiver], int]] = []
        for number, line in list(self._lines.items()):
            while line.waiting and line.waiting[0].future.done():
                line.waiting.popleft()
            if not line.waiting:
                continue
            refusal = partition.appends.no_room()
            if refusal is not None:
                self._refuse(line, refusal)
                continue
            if not self._may_give(number, line):
                continue
            line.scanner.read_ahead(line.queue, end)
            served = self._served(line)
            timeout_ms = served[0].timeout_ms if served else None
            timeout_ms = timeout_ms or line.queue.channel.settings.timeout_ms
            wanted = sum(receiver.wanted for receiver in served)
            chosen = line.queue.choose(min(wanted, MAX_JOBS), now_s=now_s, end=end, open_here=table.open)
            if chosen is not None and self._is_worth_an_entry(line, chosen, now_s):
                changes.append(_given_out(number, chosen, timeout_ms))
                given.append((line, chosen, served, timeout_ms))
        if changes:
            self._propose_given(changes, given, now_s)
        for line in self._lines.values():
            self._answer_others(line, now_s, end)
        self._watch_for_records()

    def _may_give(self, number: int, line: _Line) -> bool:
        """Return whether a channel may give out: an ordered one waits for the partitions before this."""
        if line.is_open:
            return True
        succession = self._partition.state.succession
        opened = succession.opened
        if not line.queue.is_ordered or opened is None or not opened.record.inputs:
            line.is_open = True
            return True
        if line.gate is None:
            line.gate = self._loop.create_task(self._open_gate(number, line))
        return False

    async def _open_gate(self, number: int, line: _Line) -> None:
        try:
            while not line.is_open:
                with suppress(Problem):
                    line.is_open = await self._precedes(self._partition, number)
                if not line.is_open:
                    await asyncio.sleep(GATE_S)
        except Exception as error:  # noqa: BLE001  # stops this partition's replica
            self._partition.stop(error)
            return
        line.gate = None
        self._wake()

    @staticmethod
    def _served(line: _Line) -> list[_Receiver]:
        """Return the consumers that get records in this turn: those with the time of the first."""
        asking = [each for each in line.waiting if each.wanted and not each.future.done()]
        return [each for each in asking if each.timeout_ms == asking[0].timeout_ms]

    def _is_worth_an_entry(self, line: _Line, chosen: Chosen, now_s: float) -> bool:
        """Return whether it is to be written down now: what only says how far was looked may wait."""
        if chosen.total or chosen.busy:
            return True
        if now_s - line.passed_s < PASSED_S:
            return False
        line.passed_s = now_s
        return True

    def _propose_given(
        self, changes: list[Change], given: list[tuple[_Line, Chosen, list[_Receiver], int]], now_s: float
    ) -> None:
        before = [
            {offset: line.queue.channel.aside[offset].attempts for offset in chosen.again}
            for line, chosen, _, _ in given
        ]
        late = [
            {offset for offset in chosen.again if _was_late(line.queue.channel, offset)}
            for line, chosen, _, _ in given
        ]
        due_ms = self._partition.context.now_ms() - OVERDUE_MS
        overdue = [_overdue(line.queue.channel, chosen.again, due_ms) for line, chosen, _, _ in given]
        try:
            self._partition.appends.flush()  # else the batcher's records would get this index
            index = self._partition.log.last_index + 1
            future = self._propose(changes)
        except Problem as problem:
            for line, _, served, _ in given:
                for receiver in served:
                    _fail(receiver.future, problem)
                self._renew(line.queue.channel.id)
            return
        for (line, chosen, served, timeout_ms), attempts, late_before, waited in zip(
            given, before, late, overdue, strict=True
        ):
            line.queue.given_out(chosen, index, now_s + timeout_ms / 1000)
            shares = _shares(chosen, attempts, served, index)
            self.given += chosen.total
            self.repeated += len(chosen.again)
            if chosen.again:
                count = self._count(line.queue.channel)
                count.redelivered += len(chosen.again)
                count.overdue += waited
            for receiver, _ in shares:
                receiver.late = late_before
                line.waiting.remove(receiver)
            channel = line.queue.channel.id
            future.add_done_callback(partial(self._hand_over, channel, shares))
        # Consumers may want more than one turn gives.
        if any(line.waiting for line, *_ in given):
            self._wake_later()

    def _wake_later(self) -> None:
        self._loop.call_soon(self._wake)

    def _hand_over(
        self, channel: int, shares: list[tuple[_Receiver, list[Run]]], done: asyncio.Future[Receipt]
    ) -> None:
        """Answer consumers: what they are given is committed, or may be."""
        error = None if done.cancelled() else done.exception()
        for receiver, runs in shares:
            if error is not None:
                _fail(receiver.future, error)
            elif receiver.future.done():
                self._release(channel, runs)
            else:
                receiver.future.set_result(runs)

    def _answer_others(self, line: _Line, now_s: float, end: int) -> None:
        """Answer those that only ask whether there is something, and those that waited long enough."""
        if not line.waiting:
            return
        asks = [each for each in line.waiting if not each.wanted]
        open_here = self._partition.state.channels.open
        if asks and line.is_open and line.queue.has_some(now_s=now_s, end=end, open_here=open_here):
            for receiver in asks:
                if not receiver.future.done():
                    receiver.future.set_result([])
        if not line.scanner.is_reading:
            for receiver in line.waiting:
                if receiver.deadline_s <= self._loop.time() and not receiver.future.done():
                    receiver.future.set_result(None)
        line.waiting = deque(each for each in line.waiting if not each.future.done())

    @staticmethod
    def _refuse(line: _Line, problem: Problem) -> None:
        waiting, line.waiting = line.waiting, deque()
        for receiver in waiting:
            _fail(receiver.future, problem)

    # -- reading -------------------------------------------------------------------------------

    async def _read(self, channel: int, runs: list[Run], late: Collection[int]) -> Jobs:
        """Return what was given out with its batches; what they do not hold goes back."""
        number = self._partition.number
        held = self._partition.state.channels.by_id.get(channel)
        floor = held.floor if held is not None else 0
        if not runs:
            return Jobs(number, floor, [], [])
        try:
            frames, count = await frames_of(self._partition, runs)
        except DamagedRange as damage:
            # The other replicas may have it; if none has, it is dead after some attempts.
            first, end = damage.first_offset, max(damage.next_offset, runs[0].first + 1)
        except Problem as problem:
            if problem.code != "offset_expired":
                self._release(channel, runs)
                raise
            # It was deleted meanwhile, or its copy was lost on all replicas: then it is dead in the end.
            first = problem.value if isinstance(problem.value, int) else runs[0].first
            end = self._end_of_expired(first, runs[0].end)
        else:
            if count < len(runs):
                self._release(channel, runs[count:])
            again = (
                [offset for run in runs[:count] for offset in range(run.first, run.end) if offset in late]
                if late
                else []
            )
            return Jobs(number, floor, runs[:count], frames, again)
        whole, rest = split(runs, first)
        if whole and rest:
            # What cannot be read comes again at once, and then as the first.
            self._release(channel, rest)
            return await self._read(channel, whole, late)
        lost, rest = split(runs, end)
        self._settle_alone(channel, "nack", lost, "damaged")
        self._release(channel, rest)
        return Jobs(number, floor, [], [])

    def _end_of_expired(self, first: int, end: int) -> int:
        """Return the end of the records from `first` on that are not in the log, and have no copy."""
        start, copies = self._partition.start_offset, self._partition.state.channels.copies
        at = first + 1
        while at < min(end, start) and at not in copies:
            at += 1
        return at

    # -- time ----------------------------------------------------------------------------------

    def _watch_for_records(self) -> None:
        """Have a turn when the next record is committed, while a consumer waits."""
        waits = any(line.waiting for line in self._lines.values())
        if waits and self._watch is None and self._partition.final_end is None:
            self._watch = self._loop.create_task(self._until_more(self._partition.end_offset))

    async def _until_more(self, end: int) -> None:
        try:
            if not await self._partition.reader.wait_past(end, 30.0):
                await asyncio.sleep(TICK_S)  # sealed, or this replica ends
        finally:
            self._watch = None
        self._wake()

    def _set_timer(self) -> None:
        """Have a turn when something is due, a consumer's time is over, or it has waited long enough."""
        now_s = self._loop.time()
        times = [line.queue.next_time() for line in self._lines.values()]
        next_s = min((time + self._stalled_s for time in times if time is not None), default=None)
        for line in self._lines.values():
            for receiver in line.waiting:
                next_s = receiver.deadline_s if next_s is None else min(next_s, receiver.deadline_s)
        if next_s is None:
            return
        next_s = max(next_s, now_s + TICK_S)
        if self._timer is not None:
            if self._timer_s <= next_s:
                return
            self._timer.cancel()
        self._timer_s = next_s
        self._timer = self._loop.call_at(next_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        late_s = self._loop.time() - self._timer_s
        if late_s > STALL_S:
            self._stalled_s += late_s
        self._wake()

    def _count(self, channel: Channel) -> ChannelCount:
        return self._counts.of(self._partition.topic, channel.id, channel.name)

    def _dead(self, channel: int, offsets: Iterable[int] | None) -> list[int]:
        self._partition.check_leads()
        held = self._partition.state.channels.by_id.get(channel)
        aside = {} if held is None else held.aside
        wanted = aside.keys() if offsets is None else set(offsets) & aside.keys()
        return sorted(offset for offset in wanted if aside[offset].why is Why.DEAD)


def _check_range(named: Iterable[Named]) -> None:
    """Raise 422 `invalid` when too many records are named."""
    total = sum(each.end - each.first for each in named)
    if total > MAX_RANGE:
        raise Problem(
            "invalid",
            f"a request names {MAX_RANGE:,} records at most",
            field="tokens",
            value=total,
            limit=MAX_RANGE,
            outcome="not_applied",
        )


def _was_late(channel: Channel, offset: int) -> bool:
    """Return whether a record is aside because its consumer's time was over."""
    aside = channel.aside.get(offset)
    return aside is not None and aside.reason == TIME_OUT


def _overdue(channel: Channel, offsets: Iterable[int], due_ms: int) -> int:
    """Return how many records, of those that waited for a time, have waited for one before this."""
    asides = [channel.aside[offset] for offset in offsets]
    return sum(each.why is Why.RETRY and each.due_ms < due_ms for each in asides)


def _given_out(channel: int, chosen: Chosen, timeout_ms: int) -> GivenOut:
    fresh = chosen.fresh
    runs = [(fresh.start, len(fresh))] if isinstance(fresh, range) and fresh else runs_of(fresh)
    busy: list[int] = []
    for distance, (_, key) in zip(spaced(each[0] for each in chosen.busy), chosen.busy, strict=True):
        busy += (distance, key)
    return GivenOut(
        channel,
        chosen.next,
        timeout_ms,
        fresh=spaced_runs(runs),
        again=spaced(chosen.again),
        keys=chosen.keys,
        busy=busy,
    )


def _shares(
    chosen: Chosen, attempts: dict[int, int], served: Sequence[_Receiver], delivery: int
) -> list[tuple[_Receiver, list[Run]]]:
    """Divide what was chosen among consumers, in the order in which they asked."""
    numbered = [(offset, attempts[offset] + 1) for offset in chosen.again]
    numbered += [(offset, 1) for offset in chosen.fresh]
    shares: list[tuple[_Receiver, list[Run]]] = []
    at = 0
    for receiver in served:
        part = sorted(numbered[at : at + receiver.wanted])
        at += receiver.wanted
        if not part:
            break
        runs: list[Run] = []
        for offset, attempt in part:
            last = runs[-1] if runs else None
            if last is not None and last.end == offset and last.attempt == attempt:
                runs[-1] = last._replace(length=last.length + 1)
            else:
                runs.append(Run(offset, 1, delivery, attempt))
        shares.append((receiver, runs))
    return shares


def _answer(answers: list[tuple[_Settler, Settled]], done: asyncio.Future[Receipt]) -> None:
    error = None if done.cancelled() else done.exception()
    for settler, settled in answers:
        if error is not None:
            _fail(settler.future, error)
        elif not settler.future.done():
            settler.future.set_result(settled)


def _ignore(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
