"""Remove stages that were never committed: once their batch can no longer be decided, or by their age.

The leader of a partition checks it regularly. When a batch is an hour old, its coordinator is asked, because
it may have decided the batch, or may still do so. The batch is over if a newer epoch began, or if its number
was decided for another batch. A batch that is not over may belong to a long job, so it is retained. But if it
was not prepared within a day it is removed, because a driver that is gone for good reports nothing. A single-
use sink never gets a newer epoch from its driver: so after `ONCE_MS` its coordinator begins one, which ends
its prepared batch.

No coordinator knows the parts of an upload: they are removed an hour after the last one arrived.

A partition remembers which batch of a sink it has published, to recognise a repeated publish. Each single-use
sink would add an entry for ever. So these entries are removed after `ONCE_MS`, or earlier if there are many
newer ones, once their coordinator has committed that nothing of the sink is under way. A publish that comes
even later is refused, because its prepare entry no longer counts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

from laminar.http.api.problems import Problem
from laminar.node.api.common.services import ShardServices
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.sinks import FIRST_ONCE_EPOCH, ONCE_MS, Sink
from laminar.node.partition.state.staged_batches import BatchKey
from laminar.node.transactions.participant import Batch, Participant

_log = logging.getLogger("laminar.transactions")

# The coordinator is asked about batches that have been idle, or prepared, for longer than this.
STAGE_AGE_MS = 3_600_000
# A batch that is not prepared is removed this long after its first stage, without asking the coordinator.
OPEN_AGE_MS = 24 * 3_600_000
# The pause between two passes.
JANITOR_S = 10.0
# The most batches of one partition checked in one pass, chosen at random so that none is left out for ever.
ASKED_AT_ONCE = 64
# The most publications of single-use sinks younger than ONCE_MS that a partition remembers.
KEPT_PUBLISHED = 10_000
# The most single-use sinks checked in one pass, chosen at random.
ASKED_PUBLISHED = 10_000


class Coordinators(Protocol):
    """Access to the coordinators of sinks, wherever they are.

    Raises:
        Problem: from each method, if the coordinator cannot be asked.
    """

    async def status(self, sink: bytes, /) -> Sink:
        """Return the committed state of a sink, confirmed by a majority."""

    async def end(self, sink: bytes, epoch: int, /) -> Sink:
        """Make it impossible that a single-use sink's batch is decided under `epoch`; return the sink."""

    async def over(self, sinks: Sequence[bytes], /) -> list[bytes]:
        """Return those of the sinks that have no open decision (decided, and not published everywhere).

        Sinks whose coordinators do not answer are left out.
        """


class AbandonedStages:
    """Removes stages and entries that abandoned transactions left in the partitions that this shard leads."""

    def __init__(self, services: ShardServices, coordinators: Coordinators) -> None:
        self._services = services
        self._coordinators = coordinators
        self._with_stages = services.watched(
            lambda each: bool(each.state.stages) or each.state.stages.published_once > 0
        )
        # Coordinators' answers during this pass. They do not get old: a batch that is over stays over.
        self._statuses: dict[bytes, Sink | Problem] = {}
        services.spawn(self._clean_up())

    async def _clean_up(self) -> None:
        while True:
            await asyncio.sleep(JANITOR_S)
            self._statuses.clear()
            led = [partition for partition in self._with_stages() if partition.leads]
            await self.forget_published(led)
            for partition in led:
                if partition.leads and partition.state.stages:
                    await self.clean(partition)

    async def forget_published(self, partitions: Iterable[Partition]) -> None:
        """Remove the entries about publications of single-use sinks that are old or too many."""
        before_ms = self._services.clock.wall_ms() - ONCE_MS
        old: dict[bytes, list[tuple[Partition, int]]] = {}
        for partition in partitions:
            stages = partition.state.stages
            for sink, index in stages.old_published(before_ms=before_ms, keep=KEPT_PUBLISHED):
                old.setdefault(sink, []).append((partition, index))
        if not old:
            return
        asked = list(old)
        if len(asked) > ASKED_PUBLISHED:
            asked = self._services.rng.sample(asked, ASKED_PUBLISHED)
        forgotten: dict[Partition, list[tuple[bytes, int]]] = {}
        for sink in await self._coordinators.over(asked):
            for partition, index in old[sink]:
                forgotten.setdefault(partition, []).append((sink, index))
        for partition, published in forgotten.items():
            try:
                Participant(partition).forget_published(published)
            except Problem as problem:
                # The next pass tries again.
                _log.debug(
                    "%s/%d: published batches are forgotten later: %s",
                    partition.topic,
                    partition.number,
                    problem,
                )

    async def clean(self, partition: Partition) -> None:
        """Check one partition that this shard leads, and remove its abandoned stages."""
        now_ms = self._services.clock.wall_ms()
        hour_ago_ms = now_ms - STAGE_AGE_MS
        # On a nearly full disk nothing can be committed, and stages prevent retention from freeing space.
        begun_before_ms = hour_ago_ms if self._services.space.low else now_ms - OPEN_AGE_MS
        staging = Participant(partition)
        try:
            staging.drop_abandoned(idle_before_ms=hour_ago_ms, begun_before_ms=begun_before_ms)
        except Problem as problem:
            _log.debug(
                "%s/%d: abandoned stages are removed later: %s", partition.topic, partition.number, problem
            )
        old = [
            (key, now_ms - (held.prepared_ms or held.last.append_time_ms) if held.prepared else 0)
            for key, held in partition.state.stages.batches()
            if held.first.records and (held.prepared_ms or held.last.append_time_ms) < hour_ago_ms
        ]
        asked = old if len(old) <= ASKED_AT_ONCE else self._services.rng.sample(old, ASKED_AT_ONCE)
        # Concurrently: an absent coordinator delays no other. Each sink once, for all partitions.
        await asyncio.gather(*map(self._ask, {key[0] for key, _ in asked} - self._statuses.keys()))
        await asyncio.gather(*(self._drop_if_over(partition, key, age_ms) for key, age_ms in asked))

    async def _ask(self, sink: bytes) -> None:
        try:
            self._statuses[sink] = await self._coordinators.status(sink)
        except Problem as problem:
            self._statuses[sink] = problem

    async def _drop_if_over(self, partition: Partition, key: BatchKey, prepared_for_ms: int) -> None:
        try:
            if await self._is_over(key, partition, prepared_for_ms):
                # A batch that is over stays so: what was staged or prepared meanwhile can't be decided
                # either.
                await Participant(partition).drop(Batch(sink=key[0], number=key[1], epoch=key[2]))
        except Problem as problem:
            # The next pass tries again.
            _log.debug(
                "%s/%d: abandoned stages are removed later: %s", partition.topic, partition.number, problem
            )

    async def _is_over(self, key: BatchKey, partition: Partition, prepared_for_ms: int) -> bool:
        """Return whether a batch can no longer be published here, by its coordinator's committed state."""
        sink, _, epoch = key
        known = self._statuses[sink]
        if isinstance(known, Problem):
            raise known
        if prepared_for_ms > ONCE_MS:
            undecided = known.once and known.epoch == epoch and known.number < 0
            if undecided or known.epoch == 0:
                # The driver is presumably gone; if the sink was forgotten, perhaps for long. But only the
                # commit of a newer epoch prevents that the driver, or a request it sent, still decides this.
                known = await self._coordinators.end(sink, epoch)
        return is_over(known, key, partition.replica.group)


def is_over(known: Sink, key: BatchKey, group: bytes) -> bool:
    """Return whether a batch can no longer be published in a group, by the committed state of its sink."""
    _, number, epoch = key
    if known.number < number:
        # The second case: a single-use sink that was forgotten, and that was begun again as a usual one.
        # Its epochs then began again below FIRST_ONCE_EPOCH, and so below all epochs of single use.
        return known.epoch > epoch or 0 < known.epoch < FIRST_ONCE_EPOCH <= epoch
    decision = known.undone
    if decision is None or (decision.number, decision.epoch) != (number, epoch):
        return True
    return all(target.group != group for target in decision.targets)
