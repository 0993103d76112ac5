"""Deliver the records of one partition to the consumers of its channels. The partition's leader does this.

Requests are collected for a turn of the event loop. At its end `_turn` proposes one entry for the deliveries
that ended (acknowledged, failed or expired), and then one for the records that are given out. So the next
record of a key is given out by a later entry than the one that ends the record before it. A consumer is
answered when the entry is committed, never before: so the log of the next leader has everything that
consumers were promised.

A token is valid only if its record is out *at the log's end* under the delivery that the token names. Other
tokens change nothing: if the record is done the answer says so, otherwise the token is late (its delivery is
over). Both answers are given only when the log is committed up to the end at which the table was read.

The memory of a leader (`lines`) lasts for one term. `giver` chooses the records that are given out, and
answers consumers; `settling` ends deliveries, `pinning` reserves records for transactions, and `dead_records`
gives dead ones out again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

from laminar.http.api.problems import Problem
from laminar.node.channels.counts import ChannelCounts
from laminar.node.channels.dead_records import DeadRecords
from laminar.node.channels.given_records import GivenRecords
from laminar.node.channels.giver import MAX_JOBS, Giver, was_late
from laminar.node.channels.lines import TICK_S, Lines, Receiver
from laminar.node.channels.open_records.jobs import Jobs, Run
from laminar.node.channels.pinning import Pins
from laminar.node.channels.proposing import confirmed, propose, seen
from laminar.node.channels.requests import Settled, Step
from laminar.node.channels.settling import Settling, check_range
from laminar.node.channels.watchers import Watchers
from laminar.node.partition.partition import Partition
from laminar.node.partition.problems import not_leader
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.channel_changes import Closed, Opened, Sought, runs_of
from laminar.node.partition.state.channels import Why
from laminar.node.partition.state.pins import PartAcks
from laminar.node.partition.state.staged_batches import BatchKey
from laminar.node.trace.ring import Who
from laminar.wire.channels import ChannelSettings, CursorStart, Named

STALL_S: Final = 0.25
"""A timer that is late by more shows a stall of this process, which is not counted as time of consumers."""


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
        counts = ChannelCounts() if counts is None else counts
        parts = self._partition, self._lines, self._watchers
        self._settling = Settling(*parts, counts=counts, wake=self._wake)
        self._pins = Pins(*parts, counts=counts, wake=self._wake)
        self._dead_records = DeadRecords(partition, self._lines, self._wake)
        self._given = GivenRecords(partition, self._settling)
        self._giver = Giver(
            *(partition, self._lines),
            precedes=precedes,
            wake=self._wake,
            release=self._settling.release,
            counts=counts,
        )
        self._turn_is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0
        self._watch: asyncio.Task[None] | None = None

    @property
    def given(self) -> int:
        """The number of records that were given out."""
        return self._giver.given

    @property
    def repeated(self) -> int:
        """The number of records that were given out again, after an earlier delivery."""
        return self._giver.repeated

    @property
    def acknowledged(self) -> int:
        """The number of records that were acknowledged."""
        return self._settling.acknowledged + self._pins.acknowledged

    @property
    def late(self) -> int:
        """The number of steps of consumers that came after their delivery was over."""
        return self._settling.late

    @property
    def died(self) -> int:
        """The number of records that became dead."""
        return self._settling.died

    @property
    def pinned_s(self) -> dict[BatchKey, float]:
        """The loop's time at which a batch last asked for its pins, as far as this leader knows."""
        return self._pins.asked_s

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
            jobs = await self._given.read(channel, runs, receiver.late)
            if self._partition.context.trace is not None:
                self._partition.context.trace.read([run.first for run in jobs.runs], jobs.frames)
            return jobs
        except asyncio.CancelledError:
            # The caller is gone: its records are released, even if their delivery is committed only now.
            if future.done() and not future.cancelled() and future.exception() is None:
                runs = future.result()
            if runs:
                self._settling.release(channel, runs)
            raise

    async def settle(self, channel: int, steps: Sequence[Step], *, who: Who | None = None) -> Settled:
        """Acknowledge, nack, release or extend records that were given out; return when that is committed.

        Raises:
            Problem: as `receive`; 422 `invalid` when too many records are named. After the outcome `unknown`
                the request may have been carried out; it may be repeated safely.
        """
        return await self._settling.settle(channel, steps, who=who)

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
        check_range(named)
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
                await confirmed(self._partition)
                return over, late
            left_s = deadline_s - self._loop.time()
            if left_s <= 0 or not await self._watchers.wait(channel, stream, offsets, left_s):
                return [], 0

    # -- pins, places and the dead ------------------------------------------------------------------

    async def pin(self, batch: BatchKey, acks: Sequence[PartAcks]) -> int:
        """Pin (reserve) records for a batch of a sink (`Pins.pin`); return the index of the entry."""
        return await self._pins.pin(batch, acks)

    async def end_pins(self, batch: BatchKey, *, done: bool, index: int | None = None) -> None:
        """End the pins of a batch here (`Pins.end`); return when that is committed."""
        await self._pins.end(batch, done=done, index=index)

    async def retry_dead(self, channel: int, offsets: Iterable[int] | None, *, who: Who | None = None) -> int:
        """Give out dead records again (None: all of them); return their number. Raises `Problem`."""
        return await self._dead_records.retry(channel, offsets, who=who)

    async def drop_dead(self, channel: int, offsets: Iterable[int] | None, *, who: Who | None = None) -> int:
        """Drop dead records (None: all of them); return their number. Raises `Problem`."""
        return await self._dead_records.drop(channel, offsets, who=who)

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
        await confirmed(self._partition)
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
        self._pins.check()
        now_ms = self._partition.context.now_ms()
        for channel in list(self._partition.state.channels.by_id.values()):
            if not self._dead_records.drop_old(channel, now_ms) and channel.open:
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
                self._settling.end_deliveries(now_s)
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
        self._lines.end_term(problem)
        self._settling.refuse(problem)

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
