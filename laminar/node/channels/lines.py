"""A leader's memory of its channels during one term: for each channel its queue and its waiting consumers.

Elections need no notification: each turn compares the term, and after a change begins again with the state in
the log.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from laminar.http.api.problems import Problem
from laminar.node.channels.open_records.jobs import Run
from laminar.node.channels.proposing import fail
from laminar.node.channels.queue import Queue
from laminar.node.channels.scanner import Scanner
from laminar.node.channels.watchers import Watchers
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.channels import Channel
from laminar.node.trace.ring import Who

TICK_S: Final = 0.1
"""The shortest time between two checks for due records."""


@dataclass(slots=True, eq=False)
class Receiver:
    """A waiting request for records; with `wanted` 0 it only waits until one is available."""

    wanted: int
    timeout_ms: int | None
    deadline_s: float
    future: asyncio.Future[list[Run] | None]
    # Of the records it is given: those whose previous delivery expired.
    late: set[int] = field(default_factory=set)
    # The requester, if the topic is traced.
    who: Who | None = None


@dataclass(slots=True, eq=False)
class Line:
    """The memory of one channel in this term: its queue, and its waiting consumers."""

    queue: Queue
    scanner: Scanner
    waiting: deque[Receiver] = field(default_factory=deque)
    gate: asyncio.Task[None] | None = None
    is_open: bool = False
    passed_s: float = 0.0


class Lines:
    """The lines of one partition's channels. `wake` schedules a turn when one of them may have work."""

    def __init__(self, partition: Partition, watchers: Watchers, wake: Callable[[], None]) -> None:
        self.by_id: dict[int, Line] = {}
        # The sum of this process's stalls, which do not count as time of deliveries.
        self.stalled_s = 0.0
        self._partition = partition
        self._watchers = watchers
        self._wake = wake
        self._loop = asyncio.get_running_loop()
        # The lines are of this term, and of this table.
        self._term = -1
        self._table = partition.state.channels

    def now_s(self) -> float:
        """Return the time by which deliveries expire: a monotonic clock, without stalls of this process."""
        return self._loop.time() - self.stalled_s

    def begin_turn(self) -> None:
        """Renew the lines if the term has changed, or the table was replaced. Leader only."""
        partition = self._partition
        term = partition.replica.core.term
        if term != self._term or self._table is not partition.state.channels:
            self._term, self._table = term, partition.state.channels
            for channel in list(self.by_id):
                # In between another leader may have extended deliveries.
                self.renew(channel, in_term=False)
                if channel in self.by_id:
                    self.by_id[channel].is_open = False
        for channel, line in list(self.by_id.items()):
            # Some of its records were trimmed, or a snapshot has rebuilt its table.
            if line.queue.lost != line.queue.channel.lost or self.is_stale(channel, line):
                self.renew(channel)

    def end_term(self, problem: Problem) -> None:
        """Drop all lines, and fail the waiting consumers."""
        self._term = -1
        lines, self.by_id = self.by_id, {}
        self._watchers.refuse(problem)
        for line in lines.values():
            self.end_tasks(line)
            for receiver in line.waiting:
                fail(receiver.future, problem)

    def channel(self, channel: int) -> Channel:
        """Return a channel that is open here. Raises 503 `being_created`."""
        held = self._partition.state.channels.by_id.get(channel)
        if held is None:
            # The caller has checked that the catalog has the channel.
            raise Problem(
                "being_created",
                f"the channel is not open in {self._partition.context.name} yet",
                retry_after_ms=50,
                outcome="not_applied",
            )
        return held

    def of(self, channel: int) -> Line:
        """Return the line of a channel that is open here. Raises 503 `being_created`."""
        held = self.channel(channel)
        line = self.by_id.get(channel)
        if line is not None and self.is_stale(channel, line):
            self.renew(channel)
        if line is None:
            line = self.by_id[channel] = Line(self._queue_of(held), Scanner(self._partition, self._wake))
        return line

    def renew(self, channel: int, *, in_term: bool = True) -> None:
        """Rebuild a channel's queue from the table; its consumers continue to wait.

        With `in_term` records that are out retain their remaining time: else a consumer that is gone could
        occupy its jobs for ever, if settings are changed or unread records are trimmed again and again.
        """
        self._watchers.ended(channel)
        line = self.by_id.get(channel)
        if line is None:
            return
        self.end_tasks(line)
        held = self._partition.state.channels.by_id.get(channel)
        if held is not None:
            line.queue = self._queue_of(held, before=line.queue if in_term else None)
            self._wake()
            return
        del self.by_id[channel]
        for receiver in line.waiting:
            fail(receiver.future, Problem("no_such_channel", "it was deleted", outcome="not_applied"))

    def is_stale(self, channel: int, line: Line) -> bool:
        """Return whether a line's queue is of a channel object that is no longer in the table.

        A snapshot undoes entries that are not committed, and applies them again. If the channel's opening is
        among them, the table has a new object for it after that.
        """
        return line.queue.channel is not self._partition.state.channels.by_id.get(channel)

    @staticmethod
    def end_tasks(line: Line) -> None:
        """Cancel a line's tasks."""
        line.scanner.stop()
        if line.gate is not None:
            line.gate.cancel()
            line.gate = None

    def _queue_of(self, channel: Channel, *, before: Queue | None = None) -> Queue:
        wall_ms = self._partition.context.now_ms()
        return Queue(channel, now_s=self.now_s(), wall_ms=wall_ms, before=before)
