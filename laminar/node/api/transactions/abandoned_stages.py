"""Removal of stages that were never committed: once they cannot be decided any more, or by their age.

The leader of a partition checks it regularly. A batch that is an hour old a coordinator may have decided, or
may still decide, so it is asked: the batch is over when a newer epoch began, or when that number was decided
otherwise. A batch that is not over may belong to a job that takes long, so it stays; one that was not
pinned for a day is removed, as a driver that is gone for good tells no one. A single-use sink never gets a
newer epoch: so in time one is made for what it had pinned.

The parts of an upload no coordinator knows: they are removed an hour after the last of them.

Which batch a sink has published a partition remembers, to recognise a repeated publish. Of single-use sinks
that would be an entry for each, for ever: they are removed two hours after, or when there are many newer
ones, if their coordinator has committed that nothing of them is under way. A publish that comes even later is
refused: it names a pin that is used up.
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

# The coordinator is asked about batches that were idle, or pinned, for longer than this.
STAGE_AGE_MS = 3_600_000
# Stages that were not pinned are removed this long after the first, without asking the coordinator.
OPEN_AGE_MS = 24 * 3_600_000
JANITOR_S = 10.0
# Batches of one partition checked in one pass, drawn by lot so that none is passed over for ever.
ASKED_AT_ONCE = 64
# Publishes of sinks that write once that a partition keeps, if they are younger than ONCE_MS.
KEPT_PUBLISHED = 10_000
# Single-use sinks checked in one pass, drawn by lot.
ASKED_PUBLISHED = 10_000


class Coordinators(Protocol):
    """Access to the coordinators of sinks, wherever they are.

    Raises:
        Problem: from each method, if the coordinator cannot be asked.
    """

    async def status(self, sink: bytes, /) -> Sink:
        """Return the sink; see `Coordinator.status`."""

    async def end(self, sink: bytes, epoch: int, /) -> Sink:
        """End an epoch of the sink; see `Coordinator.end`."""

    async def over(self, sinks: Sequence[bytes], /) -> list[bytes]:
        """Return the sinks with nothing under way; see `Coordinator.over`.

        Sinks whose coordinators do not answer are left out.
        """


class AbandonedStages:
    """The removal of what abandoned transactions left in the partitions that are led in this process."""

    def __init__(self, services: ShardServices, coordinators: Coordinators) -> None:
        self._services = services
        self._coordinators = coordinators
        # Coordinators' answers since the last pass began: a batch that is over stays so.
        self._heard: dict[bytes, Sink | Problem] = {}
        services.spawn(self._clean_up())

    async def _clean_up(self) -> None:
        while True:
            await asyncio.sleep(JANITOR_S)
            self._heard.clear()
            led = [partition for partition in self._services.partitions.values() if partition.leads]
            await self.forget_published(led)
            for partition in led:
                if partition.leads and partition.state.stages:
                    await self.clean(partition)

    async def forget_published(self, partitions: Iterable[Partition]) -> None:
        """Forget old or excess publications of single-use sinks in these partitions."""
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
        """Check one partition that is led here, once."""
        now_ms = self._services.clock.wall_ms()
        hour_ago_ms = now_ms - STAGE_AGE_MS
        # On a nearly full disk nothing can be committed, and what is staged keeps retention from making room.
        begun_before_ms = hour_ago_ms if self._services.space.low else now_ms - OPEN_AGE_MS
        staging = Participant(partition)
        try:
            staging.drop_abandoned(idle_before_ms=hour_ago_ms, begun_before_ms=begun_before_ms)
        except Problem as problem:
            _log.debug(
                "%s/%d: abandoned stages are removed later: %s", partition.topic, partition.number, problem
            )
        old = [
            (key, now_ms - (held.pinned_ms or held.last.append_time_ms) if held.pinned else 0)
            for key, held in partition.state.stages.batches()
            if held.first.records and (held.pinned_ms or held.last.append_time_ms) < hour_ago_ms
        ]
        asked = old if len(old) <= ASKED_AT_ONCE else self._services.rng.sample(old, ASKED_AT_ONCE)
        # Concurrently: an absent coordinator delays no other. Each sink once, for all partitions.
        await asyncio.gather(*map(self._ask, {key[0] for key, _ in asked} - self._heard.keys()))
        await asyncio.gather(*(self._drop_if_over(partition, key, age_ms) for key, age_ms in asked))

    async def _ask(self, sink: bytes) -> None:
        try:
            self._heard[sink] = await self._coordinators.status(sink)
        except Problem as problem:
            self._heard[sink] = problem

    async def _drop_if_over(self, partition: Partition, key: BatchKey, pinned_for_ms: int) -> None:
        try:
            if await self._is_over(key, partition, pinned_for_ms):
                # That stays so: whatever was added or pinned meanwhile can't be decided either.
                await Participant(partition).drop(Batch(sink=key[0], number=key[1], epoch=key[2]))
        except Problem as problem:
            # The next pass tries again.
            _log.debug(
                "%s/%d: abandoned stages are removed later: %s", partition.topic, partition.number, problem
            )

    async def _is_over(self, key: BatchKey, partition: Partition, pinned_for_ms: int) -> bool:
        """Return whether a batch can no longer be published, by what its coordinator has committed."""
        sink, number, epoch = key
        known = self._heard[sink]
        if isinstance(known, Problem):
            raise known
        if pinned_for_ms > ONCE_MS:
            undecided = known.once and known.epoch == epoch and known.number < 0
            if undecided or known.epoch == 0:
                # Its driver is gone, and for a sink that was forgotten perhaps for long. Only an
                # epoch that is committed keeps both the driver and what it sent from deciding this yet.
                known = await self._coordinators.end(sink, epoch)
        if known.number < number:
            # It was single-use, was forgotten, and is kept since: its epochs began again, below all those.
            return known.epoch > epoch or 0 < known.epoch < FIRST_ONCE_EPOCH <= epoch
        decision = known.undone
        if decision is None or (decision.number, decision.epoch) != (number, epoch):
            return True
        return all(target.group != partition.replica.group for target in decision.targets)
