"""Give out the dead records of a partition's channels again, or drop them.

A record is dead when its attempts are used up. It stays aside until a person decides about it, or until the
channel's `dead_ms` is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from laminar.http.api.problems import Problem
from laminar.node.channels.lines import Lines
from laminar.node.channels.proposing import confirmed, ignore, propose
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.channel_changes import Acknowledged, Retried, runs_of, spaced, spaced_runs
from laminar.node.partition.state.channels import Channel, Why
from laminar.node.trace.ring import Who


class DeadRecords:
    """The dead records of one partition's channels. `wake` schedules a turn."""

    def __init__(self, partition: Partition, lines: Lines, wake: Callable[[], None]) -> None:
        self._partition = partition
        self._lines = lines
        self._wake = wake

    async def retry(self, channel: int, offsets: Iterable[int] | None, *, who: Who | None = None) -> int:
        """Give out dead records again (None: all of them); return their number. Raises `Problem`."""
        dead = self._dead(channel, offsets)
        if not dead:
            await confirmed(self._partition)
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

    async def drop(self, channel: int, offsets: Iterable[int] | None, *, who: Who | None = None) -> int:
        """Drop dead records (None: all of them); return their number. Raises `Problem`."""
        dead = self._dead(channel, offsets)
        await (self._drop(channel, dead, who=who) if dead else confirmed(self._partition))
        return len(dead)

    def drop_old(self, channel: Channel, now_ms: int) -> bool:
        """Drop the dead records of a channel that are older than its `dead_ms`; return whether any were."""
        old = [
            offset
            for offset, aside in channel.aside.items()
            if aside.why is Why.DEAD and now_ms - aside.due_ms > channel.settings.dead_ms
        ]
        if old:
            with suppress(Problem):
                self._drop(channel.id, sorted(old)).add_done_callback(ignore)
        return bool(old)

    def _drop(self, channel: int, dead: list[int], *, who: Who | None = None) -> asyncio.Future[Receipt]:
        line = self._lines.of(channel)
        before = {offset: line.queue.channel.aside[offset] for offset in dead}
        future = propose(self._partition, [Acknowledged(channel, spaced_runs(runs_of(dead)))], who=who)
        for offset, aside in before.items():
            line.queue.ended(offset, None, aside)
        self._wake()
        return future

    def _dead(self, channel: int, offsets: Iterable[int] | None) -> list[int]:
        self._partition.check_leads()
        held = self._partition.state.channels.by_id.get(channel)
        aside = {} if held is None else held.aside
        wanted = aside.keys() if offsets is None else set(offsets) & aside.keys()
        return sorted(offset for offset in wanted if aside[offset].why is Why.DEAD)
