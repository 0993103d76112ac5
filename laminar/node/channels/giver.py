"""Give out records to the waiting consumers, once a turn of the loop, by one entry in the log.

Consumers are answered when the entry is committed, never before: so the log of the next leader has everything
that consumers were promised. An ordered channel gives out nothing before it has drained the partition's
ancestors.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from laminar.http.api.problems import Problem
from laminar.node.channels.counts import OVERDUE_MS, ChannelCounts
from laminar.node.channels.lines import Line, Lines, Receiver
from laminar.node.channels.open_records.jobs import Run
from laminar.node.channels.proposing import fail, propose
from laminar.node.channels.queue import Chosen
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.channel_changes import (
    TIME_OUT,
    Change,
    GivenOut,
    runs_of,
    spaced,
    spaced_runs,
)
from laminar.node.partition.state.channels import Channel, Why
from laminar.node.trace.ring import Who

MAX_JOBS: Final = 10_000
"""The most records that are given out to one request."""
PASSED_S: Final = 1.0
"""The shortest time between two entries that only record how far a channel has read, and give out nothing."""
GATE_S: Final = 0.5
"""How long an ordered channel waits before it asks again whether the partition's ancestors are drained."""


class Giver:
    """Gives out records of one partition's channels to the consumers that wait in `Lines`."""

    def __init__(
        self,
        partition: Partition,
        lines: Lines,
        *,
        precedes: Callable[[Partition, int], Awaitable[bool]],
        wake: Callable[[], None],
        release: Callable[[int, Iterable[Run]], None],
        counts: ChannelCounts,
    ) -> None:
        """Create the giver of one partition.

        `precedes(partition, channel id)` returns whether the channel has drained the partition's ancestors.
        `release(channel id, runs)` releases records, so that other consumers get them.
        """
        self.given = 0
        self.repeated = 0
        self._partition = partition
        self._lines = lines
        self._precedes = precedes
        self._wake = wake
        self._release = release
        self._counts = counts
        self._loop = asyncio.get_running_loop()

    def give_out(self, now_s: float) -> None:
        """Propose an entry that gives out records; answer consumers that have waited long enough."""
        partition, table = self._partition, self._partition.state.channels
        end = partition.end_offset
        changes: list[Change] = []
        given: list[tuple[Line, Chosen, list[Receiver], int]] = []
        for number, line in list(self._lines.by_id.items()):
            while line.waiting and line.waiting[0].future.done():
                line.waiting.popleft()
            if not line.waiting:
                continue
            refusal = partition.appends.no_room(of_consumers=True)
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
        for line in self._lines.by_id.values():
            self._answer_others(line, now_s, end)

    def _may_give(self, number: int, line: Line) -> bool:
        """Return whether a channel may give out records: an ordered one waits for drained ancestors."""
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

    async def _open_gate(self, number: int, line: Line) -> None:
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
    def _served(line: Line) -> list[Receiver]:
        """Return the consumers that get records in this turn: those with the same time-out as the first."""
        asking = [each for each in line.waiting if each.wanted and not each.future.done()]
        return [each for each in asking if each.timeout_ms == asking[0].timeout_ms]

    def _is_worth_an_entry(self, line: Line, chosen: Chosen, now_s: float) -> bool:
        """Return whether an entry is needed now. One that only records how far was read may wait."""
        if chosen.total or chosen.busy:
            return True
        if now_s - line.passed_s < PASSED_S:
            return False
        line.passed_s = now_s
        return True

    def _propose_given(
        self, changes: list[Change], given: list[tuple[Line, Chosen, list[Receiver], int]], now_s: float
    ) -> None:
        before = [
            {offset: line.queue.channel.aside[offset].attempts for offset in chosen.again}
            for line, chosen, _, _ in given
        ]
        late = [
            {offset for offset in chosen.again if was_late(line.queue.channel, offset)}
            for line, chosen, _, _ in given
        ]
        due_ms = self._partition.context.now_ms() - OVERDUE_MS
        overdue = [_overdue(line.queue.channel, chosen.again, due_ms) for line, chosen, _, _ in given]
        try:
            self._partition.appends.flush()  # else the batcher's records would get this index
            index = self._partition.log.last_index + 1
            future = propose(self._partition, changes, requesters=partial(_requesters, given))
        except Problem as problem:
            for line, _, served, _ in given:
                for receiver in served:
                    fail(receiver.future, problem)
                self._lines.renew(line.queue.channel.id)
            return
        for (line, chosen, served, timeout_ms), attempts, late_before, waited in zip(
            given, before, late, overdue, strict=True
        ):
            line.queue.given_out(chosen, index, now_s + timeout_ms / 1000)
            shares = _shares(chosen, attempts, served, index)
            self.given += chosen.total
            self.repeated += len(chosen.again)
            if chosen.again:
                each = line.queue.channel
                count = self._counts.of(self._partition.topic, each.id, each.name)
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
        self, channel: int, shares: list[tuple[Receiver, list[Run]]], done: asyncio.Future[Receipt]
    ) -> None:
        """Answer consumers when the entry that gives records out is committed, or has failed."""
        error = None if done.cancelled() else done.exception()
        for receiver, runs in shares:
            if error is not None:
                fail(receiver.future, error)
            elif receiver.future.done():
                self._release(channel, runs)
            else:
                receiver.future.set_result(runs)

    def _answer_others(self, line: Line, now_s: float, end: int) -> None:
        """Answer requests that only wait for a record to be available, and those that waited long enough."""
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
    def _refuse(line: Line, problem: Problem) -> None:
        waiting, line.waiting = line.waiting, deque()
        for receiver in waiting:
            fail(receiver.future, problem)


def was_late(channel: Channel, offset: int) -> bool:
    """Return whether a record waits to be given out again (or is dead) because its last delivery expired."""
    aside = channel.aside.get(offset)
    return aside is not None and aside.reason == TIME_OUT


def _overdue(channel: Channel, offsets: Iterable[int], due_ms: int) -> int:
    """Return the number of records that wait for a retry and were due before `due_ms`."""
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


def _requesters(given: Iterable[tuple[Line, Chosen, Sequence[Receiver], int]]) -> dict[tuple[int, int], Who]:
    """Return by channel and offset the requester who gets a record, divided as in `_shares`."""
    found: dict[tuple[int, int], Who] = {}
    for line, chosen, served, _ in given:
        channel = line.queue.channel.id
        offsets = [*chosen.again, *chosen.fresh]
        at = 0
        for receiver in served:
            if receiver.who is not None:
                found |= {(channel, each): receiver.who for each in offsets[at : at + receiver.wanted]}
            at += receiver.wanted
    return found


def _shares(
    chosen: Chosen, attempts: dict[int, int], served: Sequence[Receiver], delivery: int
) -> list[tuple[Receiver, list[Run]]]:
    """Divide the chosen records among consumers, in the order of their requests."""
    numbered = [(offset, attempts[offset] + 1) for offset in chosen.again]
    numbered += [(offset, 1) for offset in chosen.fresh]
    shares: list[tuple[Receiver, list[Run]]] = []
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
