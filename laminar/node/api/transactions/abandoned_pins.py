"""End pins whose batch can no longer be decided, so that the deliveries of the pinned jobs expire again.

A batch of a sink pins (reserves) the jobs that it acknowledges before the batch is decided
(`laminar.node.partition.state.pins`); a pinned job does not expire. Mostly the decision follows at once. If
it does not, because a job of another partition had expired or a coordinator died, the leader asks the
coordinator once in the channel's `timeout_ms`, but at least once in `ASK_S`. A batch is over if a newer epoch
of the sink began, or if another batch with its number was decided.

Stages of a driver that is gone may wait for the next driver; jobs may not, because no other consumer gets
them meanwhile. So after `SILENT_S` without another attempt to commit the batch, the coordinator begins a
newer epoch, which ends the batch.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, Protocol

from laminar.http.api.problems import Problem
from laminar.node.api.common.services import ShardServices
from laminar.node.api.transactions.abandoned_stages import is_over
from laminar.node.channels.deliveries import Deliveries
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.sinks import Sink
from laminar.node.partition.state.staged_batches import BatchKey

_log = logging.getLogger("laminar.transactions")

PASS_S: Final = 1.0
"""The pause between two passes over the partitions; no channel has a shorter `timeout_ms`."""
SILENT_S: Final = 300.0
"""A driver that has not tried to commit its batch for this long counts as gone."""
ASK_S: Final = 30.0
"""The longest time between two questions to the coordinator, however long the channel's `timeout_ms` is."""
ASKED_AT_ONCE: Final = 64
"""The most batches of one partition about which coordinators are asked at a time."""


class Coordinators(Protocol):
    """Access to the coordinators of sinks. Each method raises `Problem` if one cannot be asked."""

    async def status(self, sink: bytes, /) -> Sink:
        """Return the committed state of a sink, confirmed by a majority."""

    async def fence(self, sink: bytes, epoch: int, number: int, /) -> Sink:
        """Make it impossible that batch `number` of a sink is decided under `epoch`; return the sink."""


class _Watched:
    """A batch that has pinned jobs here: when it was first seen, and when its coordinator was last asked.

    `waits` says that the coordinator has not answered yet.
    """

    __slots__ = ("asked_s", "seen_s", "waits")

    def __init__(self, now_s: float) -> None:
        self.seen_s = self.asked_s = now_s
        self.waits = False


class AbandonedPins:
    """Ends the pins (reserved jobs) of abandoned batches in the partitions that this shard leads."""

    def __init__(self, services: ShardServices, deliveries: Deliveries, coordinators: Coordinators) -> None:
        self._services = services
        self._deliveries = deliveries
        self._coordinators = coordinators
        self._loop = asyncio.get_running_loop()
        # By group, then by batch and the entry that pinned it.
        self._watched: dict[bytes, dict[tuple[BatchKey, int], _Watched]] = {}
        self._with_pins = services.watched(lambda each: bool(each.state.channels.pins))
        services.spawn(self._watch())

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PASS_S)
            holding = [each for each in self._with_pins() if each.leads and each.state.channels.pins]
            groups = {each.replica.group for each in holding}
            for group in self._watched.keys() - groups:
                del self._watched[group]
            for partition in holding:
                # Not awaited, so that an absent coordinator delays neither other batches nor the next pass.
                self._services.spawn(self.check(partition))

    async def check(self, partition: Partition) -> None:
        """Ask coordinators about one partition's batches that are due; end pins of those that are over."""
        if not partition.leads:
            return
        pins, now_s = partition.state.channels.pins, self._loop.time()
        before = self._watched.get(partition.replica.group, {})
        watched = self._watched[partition.replica.group] = {
            (batch, held.entry): before.get((batch, held.entry)) or _Watched(now_s)
            for batch, held in pins.items()
        }
        due = []
        for (batch, _), each in watched.items():
            if not each.waits and now_s - each.asked_s >= self._period_s(partition, batch):
                due.append((batch, each))
        # Batches that have waited longest come first, so that batches that stay pinned delay no others.
        due.sort(key=lambda each: each[1].asked_s)
        free = max(0, ASKED_AT_ONCE - sum(each.waits for each in watched.values()))
        await asyncio.gather(*(self._ask(partition, *each) for each in due[:free]))

    @staticmethod
    def _period_s(partition: Partition, batch: BatchKey) -> float:
        table = partition.state.channels
        times = [
            table.by_id[channel].settings.timeout_ms / 1000
            for channel, _ in table.pins[batch].parts
            if channel in table.by_id
        ]
        return min((*times, ASK_S))

    async def _ask(self, partition: Partition, batch: BatchKey, watched: _Watched) -> None:
        sink, number, epoch = batch
        now_s = watched.asked_s = self._loop.time()
        watched.waits = True
        delivery = self._deliveries.of(partition)
        tried_s = max(watched.seen_s, delivery.pinned_s.get(batch, watched.seen_s))
        try:
            known = await self._coordinators.status(sink)
            over = is_over(known, batch, partition.replica.group)
            if not over and known.number < number and now_s - tried_s >= SILENT_S:
                # Only the commit of a newer epoch prevents that the driver, or a request of it, decides this.
                known = await self._coordinators.fence(sink, epoch, number)
                over = is_over(known, batch, partition.replica.group)
            if over:
                await delivery.end_pins(batch, done=False)
        except Problem as problem:
            # The coordinator is asked again in the next pass.
            _log.debug("%s/%d: pinned jobs wait longer: %s", partition.topic, partition.number, problem)
        finally:
            watched.waits = False
