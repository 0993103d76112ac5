"""What was staged and never committed goes: by its age, or where it can't be decided any more.

The leader of a partition looks at it every now and then. What nobody pinned goes an hour after something was
added to it. What was pinned a coordinator may have decided, or may decide yet, so it is asked: by what it
has committed the batch is over when a newer epoch began, or when that number was decided otherwise. Of a sink
that writes once no newer epoch ever comes; so in time one is made.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol

from laminar.http.errors import Problem
from laminar.node.partition import Partition
from laminar.node.sinks import FIRST_ONCE_EPOCH, ONCE_MS, Sink
from laminar.node.stages import BatchKey
from laminar.node.staging import Batch, Staging

if TYPE_CHECKING:
    from laminar.node.shard import Shard

_log = logging.getLogger("laminar.transactions")

# What nobody pinned is dropped when nothing was added to it for so long; an older pin asks its coordinator.
STAGE_AGE_MS = 3_600_000
JANITOR_S = 10.0


class Coordinators(Protocol):
    """Ask the coordinator of a sink, wherever it is. They raise `Problem`."""

    async def status(self, sink: bytes, /) -> Sink:
        """See `laminar.node.coordinator.Coordinator.status`."""

    async def end(self, sink: bytes, epoch: int, /) -> Sink:
        """See `laminar.node.coordinator.Coordinator.end`."""


class Leftovers:
    """Of the partitions that are led in this process."""

    def __init__(self, shard: Shard, coordinators: Coordinators) -> None:
        self._shard = shard
        self._coordinators = coordinators
        shard.spawn(self._clean_up())

    async def _clean_up(self) -> None:
        while True:
            await asyncio.sleep(JANITOR_S)
            for partition in list(self._shard.partitions.values()):
                if partition.leads and partition.tables.stages:
                    await self.clean(partition)

    async def clean(self, partition: Partition) -> None:
        """One look at one partition that is led here."""
        now_ms = self._shard.clock.wall_ms()
        staging = Staging(partition)
        old = [
            (key, now_ms - held.last.append_time_ms)
            for key, held in partition.tables.stages.batches()
            if held.pinned and held.last.append_time_ms < now_ms - STAGE_AGE_MS
        ]
        try:
            staging.drop_left_behind(before_ms=now_ms - STAGE_AGE_MS)
        except Problem as problem:
            _log.debug("%s/%d is cleaned later: %s", partition.topic, partition.number, problem)
        for key, age_ms in old:
            try:
                if await self._is_over(key, partition, age_ms):
                    await staging.drop(Batch(sink=key[0], number=key[1], epoch=key[2]))
            except Problem:
                continue  # the next look tries again

    async def _is_over(self, key: BatchKey, partition: Partition, age_ms: int) -> bool:
        """Whether a pinned batch can't be published any more, by what its coordinator has committed."""
        sink, number, epoch = key
        known = await self._coordinators.status(sink)
        if epoch >= FIRST_ONCE_EPOCH and age_ms > ONCE_MS:
            undecided = known.once and known.epoch == epoch and known.number < 0
            if undecided or known.epoch == 0:
                # Its driver is gone, and for a sink that was forgotten he may have been long ago. Only an
                # epoch that is committed keeps both him and what he sent from deciding this yet.
                known = await self._coordinators.end(sink, epoch)
        if known.number < number:
            # One that wrote once, was forgotten, and is kept since: its epochs began anew, below all those.
            return known.epoch > epoch or 0 < known.epoch < FIRST_ONCE_EPOCH <= epoch
        decision = known.undone
        if decision is None or (decision.number, decision.epoch) != (number, epoch):
            return True
        return all(target.group != partition.replica.group for target in decision.targets)
