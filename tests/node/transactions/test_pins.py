"""Jobs of transactions: done with the publish; if it was not decided, out again once it can't be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from laminar.batch import build
from laminar.batch.header import Header
from laminar.http.api.problems import Problem
from laminar.node.api.transactions import abandoned_pins
from laminar.node.api.transactions.abandoned_pins import ASK_S, SILENT_S, AbandonedPins
from laminar.node.api.transactions.steps import PrepareRequest, PublishRequest
from laminar.node.channels.deliveries import Deliveries
from laminar.node.channels.delivery import Delivery
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.pins import PartAcks
from laminar.node.partition.state.sinks import Decision, Sink, Target
from laminar.node.partition.state.staged_batches import BatchKey
from laminar.node.transactions.coordinator import Coordinator
from laminar.wire.channels import ChannelSettings, Named
from tests.node.alone import GROUP, lone_partition
from tests.node.services import Services
from tests.node.transactions.test_published_once import routes
from tests.node.transactions.test_single_use_sinks import SINK, coordinator_of

CHANNEL = 7
SECOND = ChannelSettings(timeout_ms=1_000)


class Later:
    """The loop, as many seconds later as the test says."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def time(self) -> float:
        return asyncio.get_running_loop().time() + self.ahead_s


class World(NamedTuple):
    """A partition with a job that is out, the coordinator of a sink, and who ends what was abandoned."""

    partition: Partition
    delivery: Delivery
    acks: list[PartAcks]
    coordinator: Coordinator
    pins: AbandonedPins
    later: Later

    @property
    def pinned(self) -> list[BatchKey]:
        return list(self.partition.state.channels.pins)

    async def passed(self, seconds: float) -> None:
        self.later.ahead_s += seconds + 0.001  # beyond the time to the last digit, by a clock of milliseconds
        await self.pins.check(self.partition)


@asynccontextmanager
async def world(folder: Path) -> AsyncIterator[World]:
    async with lone_partition(folder / "t") as partition, lone_partition(folder / "sinks") as other:
        deliveries = Deliveries()
        delivery = deliveries.of(partition)
        await delivery.open(CHANNEL, "billing", 1, SECOND)
        frame = build([b"a"])
        await partition.appends.append_frame(frame, Header.unpack(frame))
        jobs = await delivery.receive(CHANNEL, wanted=1, wait_s=60.0, timeout_ms=60_000)
        assert jobs is not None
        coordinator, _ = coordinator_of(other)
        pins = AbandonedPins(Services([partition]), deliveries, coordinator)
        later = pins._loop = Later()  # type: ignore[assignment]
        acks = [PartAcks(CHANNEL, [Named(0, 0, 1, jobs.runs[0].delivery)])]
        yield World(partition, delivery, acks, coordinator, pins, later)
        deliveries.stop()


async def test_pins_end_when_a_newer_epoch_began(tmp_path: Path) -> None:
    """It is asked for each time of the channel; until then a decision may name them."""
    async with world(tmp_path) as here:
        epoch = (await here.coordinator.begin(SINK, "s")).epoch
        await here.delivery.pin((SINK, 0, epoch), here.acks)
        for _ in range(5):
            await here.passed(1.0)
        assert here.pinned == [(SINK, 0, epoch)]
        await here.coordinator.begin(SINK, "s")
        await here.passed(0.4)
        assert here.pinned == [(SINK, 0, epoch)], "it is not asked for that often"
        await here.passed(0.6)
        assert here.pinned == []
        assert sorted(here.partition.state.channels.by_id[CHANNEL].out) == [0], "not acknowledged"


async def test_a_driver_that_is_gone_does_not_keep_jobs_for_ever(tmp_path: Path) -> None:
    """One that tries again is not taken for gone; one that is fenced may not decide any more."""
    async with world(tmp_path) as here:
        epoch = (await here.coordinator.begin(SINK, "s")).epoch
        await here.delivery.pin((SINK, 0, epoch), here.acks)
        await here.passed(1.0)
        await here.passed(SILENT_S - 2.0)
        here.delivery.pinned_s[SINK, 0, epoch] = here.later.time()  # it has tried again
        await here.passed(SILENT_S - 2.0)
        assert here.pinned == [(SINK, 0, epoch)]
        await here.passed(3.0)
        assert here.pinned == []
        assert (await here.coordinator.status(SINK)).epoch == epoch + 1
        with pytest.raises(Problem) as problem:
            await here.coordinator.commit(SINK, 0, epoch, [])
        assert problem.value.code == "fenced"


async def test_pins_of_a_sink_that_never_began_end(tmp_path: Path) -> None:
    """Or that is forgotten: an epoch is raised for it."""
    async with world(tmp_path) as here:
        await here.delivery.pin((SINK, 0, 1), here.acks)
        await here.passed(1.0)
        await here.passed(1.0)
        assert here.pinned == [(SINK, 0, 1)]
        await here.passed(SILENT_S)
        assert here.pinned == []


async def test_pins_of_an_epoch_that_was_never_committed_end(tmp_path: Path) -> None:
    """A coordinator that was deposed had it in its log; no sink ever gets a newer one by itself."""
    async with world(tmp_path) as here:
        epoch = (await here.coordinator.begin(SINK, "s")).epoch
        await here.delivery.pin((SINK, 0, epoch + 1), here.acks)
        await here.passed(1.0)
        assert here.pinned == [(SINK, 0, epoch + 1)]
        await here.passed(SILENT_S)
        assert here.pinned == []
        assert (await here.coordinator.status(SINK)).epoch == epoch + 2, "it begins no more"


async def test_a_driver_that_is_gone_keeps_no_jobs_while_the_disk_is_full(tmp_path: Path) -> None:
    """They keep the log, which may be what it is full of."""
    async with world(tmp_path) as here:
        epoch = (await here.coordinator.begin(SINK, "s")).epoch
        await here.delivery.pin((SINK, 0, epoch), here.acks)
        for partition in (here.partition, here.coordinator.partition):
            partition.appends.refusal = lambda: Problem("disk_full", outcome="not_applied")
        await here.passed(1.0)
        await here.passed(SILENT_S)
        assert here.pinned == []


async def test_jobs_of_a_channel_with_much_time_are_free_soon_after_their_batch(tmp_path: Path) -> None:
    """It is asked for before their time is over, which begins again only then."""
    async with world(tmp_path) as here:
        await here.delivery.open(CHANNEL, "billing", 2, ChannelSettings(timeout_ms=12 * 3_600_000))
        epoch = (await here.coordinator.begin(SINK, "s")).epoch
        await here.delivery.pin((SINK, 0, epoch), here.acks)
        await here.coordinator.begin(SINK, "s")
        await here.passed(0.0)
        await here.passed(ASK_S)
        assert here.pinned == []


async def test_batches_that_stay_pinned_delay_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than are asked for in one pass, each due again in the next."""
    monkeypatch.setattr(abandoned_pins, "ASKED_AT_ONCE", 1)
    async with world(tmp_path) as here:
        frame = build([b"b"])
        await here.partition.appends.append_frame(frame, Header.unpack(frame))
        jobs = await here.delivery.receive(CHANNEL, wanted=1, wait_s=60.0, timeout_ms=60_000)
        assert jobs is not None
        stays = (b"o" * 16, 0, (await here.coordinator.begin(b"o" * 16, "o")).epoch)
        over = (SINK, 0, (await here.coordinator.begin(SINK, "s")).epoch)
        await here.delivery.pin(stays, here.acks)
        await here.delivery.pin(over, [PartAcks(CHANNEL, [Named(0, 1, 2, jobs.runs[0].delivery)])])
        await here.coordinator.begin(SINK, "s")
        for _ in range(4):
            await here.passed(1.0)
        assert here.pinned == [stays]


async def test_a_coordinator_that_does_not_answer_delays_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it asked again before it has answered."""
    monkeypatch.setattr(abandoned_pins, "PASS_S", 0.01)
    monkeypatch.setattr(abandoned_pins, "ASK_S", 0.05)
    async with world(tmp_path) as here:
        asked: list[bytes] = []
        began = asyncio.Event()

        class Slow:
            async def status(self, sink: bytes) -> Sink:
                asked.append(sink)
                if sink != SINK:
                    await asyncio.Event().wait()
                began.set()
                return await here.coordinator.status(sink)

        class Running(Services):
            def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                tasks.append(asyncio.ensure_future(work))
                return tasks[-1]

        tasks: list[asyncio.Task[None]] = []
        frame = build([b"b"])
        await here.partition.appends.append_frame(frame, Header.unpack(frame))
        jobs = await here.delivery.receive(CHANNEL, wanted=1, wait_s=60.0, timeout_ms=60_000)
        assert jobs is not None
        stays = (b"o" * 16, 0, 1)
        over = (SINK, 0, (await here.coordinator.begin(SINK, "s")).epoch)
        await here.delivery.pin(stays, here.acks)
        await here.delivery.pin(over, [PartAcks(CHANNEL, [Named(0, 1, 2, jobs.runs[0].delivery)])])
        AbandonedPins(Running([here.partition]), here.pins._deliveries, Slow())  # type: ignore[arg-type]
        await asyncio.wait_for(began.wait(), 60)
        await here.coordinator.begin(SINK, "s")
        for _ in range(2_000):
            if over not in here.pinned:
                break
            await asyncio.sleep(0.01)
        assert (here.pinned, asked.count(stays[0])) == ([stays], 1)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_pins_of_a_batch_that_is_decided_wait_for_its_publish(tmp_path: Path) -> None:
    """However long: not if the decision is another one, or has another partition."""
    async with world(tmp_path) as here:
        begun = await here.coordinator.begin(SINK, "s")
        index = await here.delivery.pin((SINK, 0, begun.epoch), here.acks)
        target = Target("t", 0, GROUP, 0, index, has_records=False)
        decision = Decision(0, begun.epoch, (target,))
        await here.coordinator._sinks.change(SINK, msgspec.structs.replace(begun, number=0, undone=decision))
        await here.coordinator.begin(SINK, "s")
        for _ in range(3):
            await here.passed(SILENT_S)
        assert here.pinned == [(SINK, 0, begun.epoch)]
        assert (await here.coordinator.status(SINK)).epoch == begun.epoch + 1, "and no epoch is raised"
        other = msgspec.structs.replace(decision, targets=(msgspec.structs.replace(target, group=b"o" * 16),))
        now = await here.coordinator.status(SINK)
        await here.coordinator._sinks.change(SINK, msgspec.structs.replace(now, undone=other))
        await here.passed(1.0)
        assert here.pinned == []


async def test_pins_wait_while_their_coordinator_does_not_answer(tmp_path: Path) -> None:
    async with world(tmp_path) as here:

        class Gone:
            async def status(self, sink: bytes) -> None:
                raise Problem("no_leader")

        await here.delivery.pin((SINK, 0, 1), here.acks)
        here.pins._coordinators = Gone()  # type: ignore[assignment]
        await here.passed(1.0)
        await here.passed(2 * SILENT_S)
        assert here.pinned == [(SINK, 0, 1)]


async def test_a_publish_ends_what_its_prepare_has_pinned(tmp_path: Path) -> None:
    """Without records in that partition, too; each step may be repeated, and a late one changes nothing."""
    async with world(tmp_path) as here:
        asked = routes()._steps
        asked._deliveries = here.pins._deliveries
        prepare = PrepareRequest("t", 0, SINK, 0, 1, [], 0, here.acks)
        prepared = await asked._do(here.partition, prepare)
        assert prepared == await asked._do(here.partition, prepare)
        assert (prepared.prepare_index, here.pinned) == (0, [(SINK, 0, 1)])
        publish = PublishRequest("t", 0, SINK, 0, 1, GROUP, 0, prepared.pin_index, has_records=False)
        for _ in range(2):
            await asked._do(here.partition, publish)
            channel = here.partition.state.channels.by_id[CHANNEL]
            assert (here.pinned, channel.open, channel.next) == ([], 0, 1)
        with pytest.raises(Problem) as problem:
            await asked._do(here.partition, prepare)
        assert problem.value.code == "late"
