"""End deliveries: consumers acknowledge, nack, release or extend records, or the time of records is over.

The requests of a turn are collected. At its end `Settling.end_deliveries` proposes one entry for all of them
and for the records that have expired, and the consumers are answered when it is committed. An extension is
not in the log: only the leader's memory of this term has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from laminar.http.api.problems import Problem
from laminar.node.channels.counts import ChannelCount, ChannelCounts
from laminar.node.channels.ends import Ends
from laminar.node.channels.giver import MAX_JOBS
from laminar.node.channels.lines import TICK_S, Lines
from laminar.node.channels.open_records.jobs import Run
from laminar.node.channels.proposing import fail, ignore, propose, seen
from laminar.node.channels.requests import Settled, Step, Verb
from laminar.node.channels.watchers import Watchers
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.channels import Channel, Out
from laminar.node.trace.ring import Who
from laminar.wire.channels import Named

MAX_RANGE: Final = MAX_JOBS
"""Most records that one request names."""


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


class Settling:
    """The ends of deliveries in one partition. `wake` schedules a turn."""

    def __init__(
        self,
        partition: Partition,
        lines: Lines,
        watchers: Watchers,
        *,
        counts: ChannelCounts,
        wake: Callable[[], None],
    ) -> None:
        self._partition = partition
        self._lines = lines
        self._watchers = watchers
        self._counts = counts
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        self._settlers: list[_Settler] = []
        self.acknowledged = 0
        self.late = 0
        self.died = 0

    async def settle(self, channel: int, steps: Sequence[Step], *, who: Who | None = None) -> Settled:
        """Take the steps about records that were given out; return when they are committed.

        Raises `Problem` as `Delivery.settle`.
        """
        self._partition.check_leads()
        self._lines.of(channel)
        check_range([step.named for step in steps])
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

    def refuse(self, problem: Problem) -> None:
        """Fail all waiting requests."""
        settlers, self._settlers = self._settlers, []
        for settler in settlers:
            fail(settler.future, problem)

    def end_deliveries(self, now_s: float) -> None:
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

    def release(self, channel: int, runs: Iterable[Run]) -> None:
        """Release records that were given out to a consumer that is gone, so that others get them at once."""
        if not self._partition.leads or channel not in self._partition.state.channels.by_id:
            return
        self.settle_alone(channel, "release", runs)

    def settle_alone(self, channel: int, verb: Verb, runs: Iterable[Run], reason: str = "") -> None:
        """Queue a step (nack or release) without a consumer, which is gone or cannot get the records."""
        number = self._partition.number
        steps = [Step(verb, Named(number, run.first, run.end, run.delivery), reason=reason) for run in runs]
        future: asyncio.Future[Settled] = self._loop.create_future()
        future.add_done_callback(ignore)
        self._settlers.append(_Settler(channel, steps, future))
        self._wake()

    def _count(self, channel: Channel) -> ChannelCount:
        return self._counts.of(self._partition.topic, channel.id, channel.name)


def check_range(named: Iterable[Named]) -> None:
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
