"""Deliver the records of one partition to the consumers of its channels. The partition's leader does this.

Requests are collected for a turn of the event loop. At its end `_turn` proposes entries, in this order: for
acknowledged records, for those that failed or expired, and then for those that are given out. So the next
record of a key is given out by a later entry than the one that ends the record before it. A consumer is
answered when the entry is committed, never before: so the log of the next leader has everything that
consumers were promised.

A token is valid only if its record is out *at the log's end* under the delivery that the token names. Other
tokens change nothing: if the record is done the answer says so, otherwise the token is late (its delivery is
over). Both answers are given only when the log is committed up to the end at which the table was read.

The memory of a leader (`lines`) lasts for one term. `giver` chooses the records that are given out, and
answers consumers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange
from laminar.node.channels.counts import ChannelCount, ChannelCounts
from laminar.node.channels.ends import Ends
from laminar.node.channels.giver import MAX_JOBS, Giver, was_late
from laminar.node.channels.lines import Lines, Receiver
from laminar.node.channels.open_records.jobs import Jobs, Run, frames_of, split
from laminar.node.channels.pinning import wanted_of
from laminar.node.channels.proposing import fail, propose, seen
from laminar.node.channels.queue import Queue
from laminar.node.channels.requests import Settled, Step, Verb
from laminar.node.channels.watchers import Watchers
from laminar.node.partition.partition import Partition
from laminar.node.partition.problems import not_leader
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.channel_changes import (
    Acknowledged,
    Closed,
    Opened,
    Retried,
    Sought,
    runs_of,
    spaced,
    spaced_runs,
)
from laminar.node.partition.state.channels import Channel, Out, Why
from laminar.node.partition.state.pins import PINS_SINCE, PartAcks, PinsEnded
from laminar.node.partition.state.staged_batches import BatchKey
from laminar.node.trace.ring import Who
from laminar.wire.channels import ChannelSettings, CursorStart, Named

MAX_RANGE: Final = MAX_JOBS
"""Most records that one request names."""
TICK_S: Final = 0.1
"""The shortest time between two checks for due records."""
STALL_S: Final = 0.25
"""A timer that is late by more shows a stall of this process, which is not counted as time of consumers."""


@dataclass(slots=True, eq=False)
class _Settler:
    """A request to acknowledge, nack, release or extend records; `extends` are the valid extensions."""

    channel: int
    steps: Sequence[Step]
    future: asyncio.Future[Settled]
    extends: list[tuple[int, Out, int]] = field(default_factory=list)
    # Whether no entry was proposed for it, whose commit would prove that this replica still led.
    is_unconfirmed: bool = False
    # The requester, if the topic is traced.
    who: Who | None = None


async def _always(partition: Partition, channel: int) -> bool:
    return True


class Delivery:
    """Delivers the records of one partition to its channels' consumers. `stop` ends its tasks."""

    def __init__(
        self,
        partition: Partition,
        *,
        precedes: Callable[[Partition, int], Awaitable[bool]] = _always,
        counts: ChannelCounts | None = None,
    ) -> None:
        """Create the delivery of a partition; it is idle until the first request.

        `precedes(partition, channel id)` returns whether the channel has drained all ancestors of this
        partition: an ordered channel gives out nothing before that. `counts` are the counters that it
        updates.
        """
        self._partition = partition
        self._loop = asyncio.get_running_loop()
        self._watchers = Watchers()
        self._lines = Lines(partition, self._watchers, self._wake)
        self._counts = ChannelCounts() if counts is None else counts
        self._giver = Giver(
            *(partition, self._lines),
            precedes=precedes,
            wake=self._wake,
            release=self._release,
            counts=self._counts,
        )
        self._settlers: list[_Settler] = []
        self._turn_is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._watch: asyncio.Task[None] | None = None
        # The loop's time at which a batch last asked for its pins; pins made by earlier leaders are not in
        # it.
        self.pinned_s: dict[BatchKey, float] = {}
        self.acknowledged = 0
        self.late = 0
        self.died = 0

    @property
    def given(self) -> int:
        """The number of records that were given out."""
        return self._giver.given

    @property
    def repeated(self) -> int:
        """The number of records that were given out again, after an earlier delivery."""
        return self._giver.repeated

    # -- requests ------------------------------------------------------------------------------

    async def open(
        self, channel: int, name: str, version: int, settings: ChannelSettings, *, from_start: bool = False
    ) -> Receipt:
        """Open a channel here, or change its settings to this version; return when that is committed.

        With `from_start` it begins with the first record whatever its settings say: the partition was created
        after the channel.

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
            return await seen(self._partition)
        if known is None:
            self._check_fence()
        if isinstance(settings.start, CursorStart) and not from_start:
            # The bounds were confirmed before, so every record whose append was answered is committed here.
            cursor = partition.cursor_commands.get(settings.start.cursor)
            first = bounds.start if cursor is None else cursor.position
        first = max(first, partition.state.next_start)
        future = propose(self._partition, [Opened(channel, name, version, settings, first, until)])
        self._lines.renew(channel)
        return await future

    async def close(self, channel: int) -> Receipt:
        """Remove a channel from this partition; return when that is committed.

        Raises `Problem` as `open` does.
        """
        self._partition.check_leads()
        if channel not in self._partition.state.channels.by_id:
            return await seen(self._partition)
        future = propose(self._partition, [Closed(channel)])
        self._lines.renew(channel)
        return await future

    async def receive(
        self,
        channel: int,
        *,
        wanted: int,
        wait_s: float,
        timeout_ms: int | None = None,
        who: Who | None = None,
    ) -> Jobs | None:
        """Give out up to `wanted` records to the caller; None if there is none within `wait_s`.

        With `wanted` 0 nothing is given out: it returns a `Jobs` without records as soon as one is available,
        or None.

        Raises:
            Problem: 503 `being_created` if the channel is not open here; 404 `no_such_channel` if it is
                deleted meanwhile; 503 `not_leader`; 503 or 507 if the log takes no entry. After the outcome
                `unknown` records may be out until their delivery expires.
        """
        self._partition.check_leads()
        line = self._lines.of(channel)
        future: asyncio.Future[list[Run] | None] = self._loop.create_future()
        receiver = Receiver(min(wanted, MAX_JOBS), timeout_ms, self._loop.time() + wait_s, future, who=who)
        line.waiting.append(receiver)
        self._wake()
        runs: list[Run] | None = None
        try:
            runs = await future
            if runs is None:
                return None
            jobs = await self._read(channel, runs, receiver.late)
            if self._partition.context.trace is not None:
                self._partition.context.trace.read([run.first for run in jobs.runs], jobs.frames)
            return jobs
        except asyncio.CancelledError:
            # The caller is gone: its records are released, even if their delivery is committed only now.
            if future.done() and not future.cancelled() and future.exception() is None:
                runs = future.result()
            if runs:
                self._release(channel, runs)
            raise

    async def settle(self, channel: int, steps: Sequence[Step], *, who: Who | None = None) -> Settled:
        """Acknowledge, nack, release or extend records that were given out; return when that is committed.

        Raises:
            Problem: as `receive`; 422 `invalid` when too many records are named. After the outcome `unknown`
                the request may have been carried out; it may be repeated safely.
        """
        self._partition.check_leads()
        self._lines.of(channel)
        _check_range([step.named for step in steps])
        settler = _Settler(channel, steps, self._loop.create_future(), who=who)
        self._settlers.append(settler)
        self._wake()
        settled = await settler.future
        if settler.is_unconfirmed or settler.extends:
            # A deposed leader may lack later deliveries, after a seek also of records that are done here. Nor
            # may it extend deliveries: the next leader counts by its own clock.
            await self._partition.reader.confirmed_bounds()
        if settler.extends:
            missed = self._extend(settler)
            if missed:
                await seen(self._partition)  # the entry that ended them may not be committed yet
                settled = Settled(settled.done - len(missed), settled.late + missed)
        return settled

    async def ended(
        self, channel: int, stream: int, named: Sequence[Named], *, wait_s: float
    ) -> tuple[list[Named], int]:
        """Return those of these deliveries that are over, and the number of their records that expired.

        It waits, up to `wait_s`, until one is over, and returns when its end is committed, so that the answer
        stays true. Deliveries that are not in the answer may be over by now, too. One request of a `stream`
        may wait: a later one ends the wait of the earlier.

        Raises:
            Problem: as `receive`; 422 `invalid` when too many records are named.
        """
        deadline_s = self._loop.time() + wait_s
        _check_range(named)
        offsets = [offset for each in named for offset in range(each.first, each.end)]
        while True:
            self._partition.check_leads()
            held = self._lines.of(channel).queue.channel
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
                late += sum(was_late(held, offset) for offset in out)
            if over:
                # A deposed leader may lack deliveries of the next leader, which are not over.
                await self._confirmed()
                return over, late
            left_s = deadline_s - self._loop.time()
            if left_s <= 0 or not await self._watchers.wait(channel, stream, offsets, left_s):
                return [], 0

    # -- transactions --------------------------------------------------------------------------

    async def pin(self, batch: BatchKey, acks: Sequence[PartAcks]) -> int:
        """Pin (reserve) records for a batch of a sink, which will acknowledge them.

        Returns the index of the entry when that is committed.

        From then on they are out until `end_pins`: they do not expire, and no consumer may end their
        delivery. To repeat the same request changes nothing.

        Raises:
            Problem: as `wanted_of`; 422 `invalid` when the flush policy is `interval`; 503 `not_enabled`; 503
                `not_leader`, or the log takes no entry.
        """
        partition = self._partition
        partition.check_leads()
        partition.context.check_knows(PINS_SINCE, "acknowledgements in transactions")
        if partition.log.policy.is_interval:
            # Without a sync a power failure could lose the entry, and jobs of a decided batch be given out
            # again.
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
            # A deposed leader may not know of the delivery, nor that another batch has ended.
            await partition.reader.confirmed_bounds()
            await seen(self._partition)
            changes = wanted_of(partition.state.channels, batch, acks)
        for change in changes:
            self._lines.of(change.channel)
        # Synced, as replicas change to the policy `interval` one by one.
        future = propose(self._partition, [*changes], synced=True) if changes else seen(self._partition)
        held = partition.state.channels.pins.get(batch)
        self.pinned_s[batch] = self._loop.time()
        await future
        return 0 if held is None else held.entry

    async def end_pins(self, batch: BatchKey, *, done: bool, index: int | None = None) -> None:
        """End the pins (reservations of records) of a batch here; return when that is committed.

        To repeat the call changes nothing.

        With `done` the records are acknowledged: the caller knows that the batch is decided. Without, the
        time of their deliveries begins again: the caller knows that the batch is not decided, and cannot be
        any more. `index`, if given, limits this to records that were pinned by the entry with this index.

        Raises:
            Problem: 503 `not_leader`, or the log takes no entry.
        """
        partition = self._partition
        partition.check_leads()
        held = partition.state.channels.pins.get(batch)
        if held is None or index not in (None, held.entry):
            # A deposed leader may lack the pins that are to be ended, and must not answer that they were.
            await partition.reader.confirmed_bounds()
            held = partition.state.channels.pins.get(batch)
            if held is None or index not in (None, held.entry):
                await seen(self._partition)
                return
        ended: list[tuple[Queue, dict[int, Out]]] = []
        for channel, offsets in partition.state.channels.pinned(batch).items():
            queue, outs = self._lines.of(channel).queue, self._lines.channel(channel).out
            ended.append((queue, {offset: outs[offset] for offset in offsets}))
        future = propose(self._partition, [PinsEnded(*batch, done=done)], synced=True)
        self.pinned_s.pop(batch, None)
        now_s = self._lines.now_s()
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

    async def seek(self, channel: int, offset: int, *, drop: bool = False, who: Who | None = None) -> Receipt:
        """Move a channel to `offset`: all records from there on are given out again.

        Records before `offset` that are out (given out, not acknowledged) are given out again, too. With
        `drop` they are dropped instead, and so are those that wait for another attempt, except dead ones.
        Returns the receipt of the entry. Raises `Problem`.
        """
        self._partition.check_leads()
        self._lines.of(channel)
        self._check_fence()
        # A start of the log that is not committed yet has changed the table: commit it before the seek.
        offset = max(offset, self._partition.state.next_start)
        future = propose(self._partition, [Sought(channel, offset, drop)], who=who)
        self._lines.renew(channel)
        return await future

    def _check_fence(self) -> None:
        """Raise 503 `changing` while the partition is being reclaimed: then nothing may be given out."""
        if self._partition.cursor_commands.is_fenced():
            name = self._partition.context.name
            raise Problem("changing", f"{name} is being reclaimed", outcome="not_applied")

    async def retry_dead(self, channel: int, offsets: Iterable[int] | None, *, who: Who | None = None) -> int:
        """Give out dead records again (None: all of them); return their number. Raises `Problem`."""
        dead = self._dead(channel, offsets)
        if not dead:
            await self._confirmed()
            return 0
        line = self._lines.of(channel)
        before = {offset: line.queue.channel.aside[offset] for offset in dead}
        future = propose(
            self._partition,
            [Retried(channel, [part for each in spaced(dead) for part in (each, 0)])],
            who=who,
        )
        now_s = self._lines.now_s()
        for offset, aside in before.items():
            line.queue.retried(offset, aside, now_s)
        self._wake()
        await future
        return len(dead)

    async def drop_dead(self, channel: int, offsets: Iterable[int] | None, *, who: Who | None = None) -> int:
        """Drop dead records (None: all of them); return their number. Raises `Problem`."""
        dead = self._dead(channel, offsets)
        await (self._drop(channel, dead, who=who) if dead else self._confirmed())
        return len(dead)

    async def _confirmed(self) -> None:
        """Wait until the table, as it was read, is committed, and a majority confirms this leader.

        It is needed before an answer for which no entry was proposed: a deposed leader may lack entries that
        the next one has committed. The commit of an entry proves as much. Raises 503 `not_leader`.
        """
        await self._partition.reader.confirmed_bounds()
        await seen(self._partition)

    def _drop(self, channel: int, dead: list[int], *, who: Who | None = None) -> asyncio.Future[Receipt]:
        line = self._lines.of(channel)
        before = {offset: line.queue.channel.aside[offset] for offset in dead}
        future = propose(self._partition, [Acknowledged(channel, spaced_runs(runs_of(dead)))], who=who)
        for offset, aside in before.items():
            line.queue.ended(offset, None, aside)
        self._wake()
        return future

    async def is_drained(self, channel: int) -> bool:
        """Return whether the partition is sealed and the channel is done with all its records. Leader only.

        Dead records count as done, unless they park their keys (later records of the key wait for them). The
        answer is final: it is committed, and a majority has confirmed that this replica leads.

        Raises:
            Problem: 503 `not_leader`.
        """
        # The table is read first: an entry that is appended after that is not awaited, and may be lost.
        if not self._has_ended_all(channel):
            return False
        await self._confirmed()
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
        """Drop dead records that are older than the channel's `dead_ms`. Call it regularly."""
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
                self._lines.of(channel.id)  # its time-outs are looked at, though no consumer asks
        self._wake()

    def stop(self) -> None:
        """End all tasks, and fail all waiting requests: this replica serves no more."""
        for line in self._lines.by_id.values():
            self._lines.end_tasks(line)
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
                now_s = self._lines.now_s()
                self._end_deliveries(now_s)
                self._giver.give_out(now_s)
                self._watch_for_records()
                self._set_timer()
        except Exception as error:  # noqa: BLE001  # stops this partition's replica
            self._refuse_all(not_leader(self._partition.context.name, outcome="unknown"))
            self._partition.stop(error)

    def _leads(self) -> bool:
        """Return whether this replica leads; drop the memory of an earlier term."""
        if not self._partition.leads:
            self._refuse_all(not_leader(self._partition.context.name, outcome="not_applied"))
            return False
        self._lines.begin_turn()
        return True

    def _refuse_all(self, problem: Problem) -> None:
        settlers, self._settlers = self._settlers, []
        self._lines.end_term(problem)
        for settler in settlers:
            fail(settler.future, problem)

    # -- deliveries that end -------------------------------------------------------------------

    def _end_deliveries(self, now_s: float) -> None:
        """Propose an entry that ends the deliveries that consumers have settled, or that have expired."""
        settlers, self._settlers = self._settlers, []
        ends = Ends()
        answers: list[tuple[_Settler, Settled]] = []
        for settler in settlers:
            if settler.future.done():
                continue
            channel = self._partition.state.channels.by_id.get(settler.channel)
            if channel is None:
                fail(settler.future, Problem("no_such_channel", "it was deleted", outcome="not_applied"))
                continue
            self._lines.of(channel.id)  # created now, from the table as it is before this turn
            settled, settler.extends = ends.settle(channel, settler.steps)
            answers.append((settler, settled))
        overdue: dict[int, list[int]] = {}
        for number, line in self._lines.by_id.items():
            found = overdue[number] = line.queue.overdue(now_s)
            for offset in found:
                ends.overdue(line.queue.channel, offset, line.queue.channel.out[offset])
        changes = ends.changes()
        try:
            said = partial(self._requesters, [settler for settler, _ in answers])
            ends_now = partial(propose, self._partition, changes, requesters=said)
            future = ends_now() if changes else seen(self._partition) if answers else None
            for settler, _ in answers:
                settler.is_unconfirmed = not changes
        except Problem as problem:
            for settler, _ in answers:
                fail(settler.future, problem)
            for number, found in overdue.items():
                self._lines.by_id[number].queue.put_back(found, now_s + TICK_S)
            return
        if future is not None:
            future.add_done_callback(partial(_answer, answers))
        self._note_ends(ends, now_s)

    def _requesters(self, said: Iterable[_Settler]) -> dict[tuple[int, int], Who]:
        """Return by channel and offset the requester whose step ends a delivery: the first valid one."""
        found: dict[tuple[int, int], Who] = {}
        for settler in said:
            channel = self._partition.state.channels.by_id.get(settler.channel)
            if settler.who is None or channel is None:
                continue
            for step in settler.steps:
                for offset in range(step.named.first, step.named.end):
                    out = channel.out.get(offset)
                    if out is not None and out.delivery == step.named.delivery and step.verb != "extend":
                        found.setdefault((channel.id, offset), settler.who)
        return found

    def _note_ends(self, ends: Ends, now_s: float) -> None:
        self.late += ends.late.total()
        self.died += ends.died.total()
        for channel, late in ends.late.items():
            if late:
                self._count(self._lines.of(channel).queue.channel).late += late
        for channel, died in ends.died.items():
            self._count(self._lines.of(channel).queue.channel).died += died
        for channel, acked in ends.acked.items():
            self.acknowledged += len(acked)
            self._watchers.ended(channel, acked)
            queue = self._lines.of(channel).queue
            self._count(queue.channel).acknowledged += len(acked)
            for offset, out in acked.items():
                queue.ended(offset, out, None)
        for (channel, _), items in ends.failed.items():
            self._watchers.ended(channel, [offset for offset, *_ in items])
            queue = self._lines.of(channel).queue
            for offset, out, delay_ms, _ in items:
                queue.put_aside(offset, out, now_s + max(0, delay_ms) / 1000)

    def _extend(self, settler: _Settler) -> list[Named]:
        """Extend deliveries; return the records that are no longer out."""
        channel = self._partition.state.channels.by_id.get(settler.channel)
        line = self._lines.by_id.get(settler.channel)
        if line is not None and self._lines.is_stale(settler.channel, line):
            self._lines.renew(settler.channel)
        now_s = self._lines.now_s()
        missed: list[Named] = []
        trace = self._partition.context.trace
        for offset, out, timeout_ms in settler.extends:
            if channel is None or channel.out.get(offset) != out:
                missed.append(Named(self._partition.number, offset, offset + 1, out.delivery))
            elif line is not None:
                line.queue.extend(offset, out.delivery, now_s + timeout_ms / 1000)
                if trace is not None:
                    now_ms = self._partition.context.now_ms()
                    trace.extended(
                        *(channel, offset, out.delivery, settler.who),
                        entry=self._partition.committed_index,
                        at_ms=now_ms,
                        due_ms=now_ms + timeout_ms,
                    )
        self._wake()
        return missed

    def _release(self, channel: int, runs: Iterable[Run]) -> None:
        """Release records that were given out to a consumer that is gone, so that others get them at once."""
        if not self._partition.leads or channel not in self._partition.state.channels.by_id:
            return
        self._settle_alone(channel, "release", runs)

    def _settle_alone(self, channel: int, verb: Verb, runs: Iterable[Run], reason: str = "") -> None:
        """Queue a step (nack or release) without a consumer, which is gone or cannot get the records."""
        number = self._partition.number
        steps = [Step(verb, Named(number, run.first, run.end, run.delivery), reason=reason) for run in runs]
        future: asyncio.Future[Settled] = self._loop.create_future()
        future.add_done_callback(_ignore)
        self._settlers.append(_Settler(channel, steps, future))
        self._wake()

    # -- what is given out ---------------------------------------------------------------------

    # -- reading -------------------------------------------------------------------------------

    async def _read(self, channel: int, runs: list[Run], late: Collection[int]) -> Jobs:
        """Return records that were given out, with their batches.

        Records that cannot be read are released.
        """
        number = self._partition.number
        held = self._partition.state.channels.by_id.get(channel)
        floor = held.floor if held is not None else 0
        if not runs:
            return Jobs(number, floor, [], [])
        try:
            frames, count = await frames_of(self._partition, runs)
        except DamagedRange as damage:
            # Other replicas may have the record; if none has, it is dead after some attempts.
            first, end = damage.first_offset, max(damage.next_offset, runs[0].first + 1)
        except Problem as problem:
            if problem.code != "offset_expired":
                self._release(channel, runs)
                raise
            # The record was deleted meanwhile, or its copy is lost on all replicas: then it becomes dead.
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
            # The unreadable record is given out again at once, and is then the first.
            self._release(channel, rest)
            return await self._read(channel, whole, late)
        lost, rest = split(runs, end)
        self._settle_alone(channel, "nack", lost, "damaged")
        self._release(channel, rest)
        return Jobs(number, floor, [], [])

    def _end_of_expired(self, first: int, end: int) -> int:
        """Return the offset after the records from `first` on that are not in the log and have no copy."""
        start, copies = self._partition.start_offset, self._partition.state.channels.copies
        at = first + 1
        while at < min(end, start) and at not in copies:
            at += 1
        return at

    # -- time ----------------------------------------------------------------------------------

    def _watch_for_records(self) -> None:
        """Schedule a turn for when the next record is committed, if a consumer waits."""
        waits = any(line.waiting for line in self._lines.by_id.values())
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
        """Schedule a turn for when a record is due, a delivery expires, or a consumer's wait ends."""
        now_s = self._loop.time()
        times = [line.queue.next_time() for line in self._lines.by_id.values()]
        next_s = min((time + self._lines.stalled_s for time in times if time is not None), default=None)
        for line in self._lines.by_id.values():
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
            self._lines.stalled_s += late_s
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


def _answer(answers: list[tuple[_Settler, Settled]], done: asyncio.Future[Receipt]) -> None:
    error = None if done.cancelled() else done.exception()
    for settler, settled in answers:
        if error is not None:
            fail(settler.future, error)
        elif not settler.future.done():
            settler.future.set_result(settled)


def _ignore(done: asyncio.Future[Any]) -> None:
    if not done.cancelled():
        done.exception()
