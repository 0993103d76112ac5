"""What partitions keep of the batches that sinks published which write once: so long as anybody may ask."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.batch import Header
from laminar.http.api.limits import Limits
from laminar.http.api.problems import Problem
from laminar.http.api.records import Records
from laminar.node.api.common.leader_call import LeaderCall
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.transactions import abandoned_stages
from laminar.node.api.transactions.sinks import SinkRoutes
from laminar.node.api.transactions.steps import PrepareRequest, PublishRequest, SinkSteps
from laminar.node.channels.deliveries import Deliveries
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.sinks import FIRST_ONCE_EPOCH, ONCE_MS, Decision, Sink, Target
from laminar.node.partition.state.staged_batches import (
    Published,
    Stage,
    StagedBatch,
    StagedBatches,
    StoredStages,
)
from laminar.node.transactions.coordinator import Coordinator, Part, Prepared
from laminar.node.transactions.participant import Batch, Participant
from tests.node.alone import lone_partition, values
from tests.node.entries import forget_published_entry, prepare_entry, publish_entry, staged_entry
from tests.node.services import Services, exchange, no_topic
from tests.node.transactions.test_single_use_sinks import PART, SINK, Targets, coordinator_of, janitor, stage
from tests.node.trio import trio


async def write(partition: Partition, coordinator: Coordinator, *, sink: bytes = SINK) -> Batch:
    """One that was committed, as a driver does it who is never heard of again."""
    epoch = (await coordinator.begin(sink, sink.hex(), once=True)).epoch
    batch = await stage(partition, epoch, sink=sink)
    assert await coordinator.commit(sink, 0, epoch, [PART])
    return batch


async def clean(partition: Partition, coordinator: Coordinator, *, age_ms: int) -> None:
    await janitor(partition, coordinator, age_ms=age_ms).forget_published([partition])


def prepare_index_of(partition: Partition, batch: Batch) -> int:
    return Participant(partition).prepare_index_of(batch)


def test_ten_thousand_writes_leave_as_many_entries_as_there_may_be() -> None:
    """Not one each for ever: the table travels with each start of the log, and must fit into one entry."""
    stages, most, index = StagedBatches(), 0, 0

    def append(frame: bytearray) -> None:
        stages.appended(Header.unpack(frame), frame)
        stages.committed(index)

    for write in range(10_000):
        sink, epoch = write.to_bytes(16, "big"), FIRST_ONCE_EPOCH + index
        append(staged_entry(index + 1, sink, 0, epoch, stage=0))
        append(prepare_entry(index + 2, sink, 0, epoch, [0]))
        append(publish_entry(index + 3, sink, 0, epoch, [(index + 1, 1)]))
        index += 4
        most = max(most, stages.published_once)
        # As a leader proposes now and then: by age, which is the index here, and by count.
        before_ms, keep = (index - 800, 1_000) if write % 2_000 < 1_000 else (0, 100)
        old = stages.old_published(before_ms=before_ms, keep=keep) if write % 50 == 49 else []
        append(forget_published_entry(index, old))
        # Each write has four entries.
        assert not old or stages.published_once <= (100 if before_ms == 0 else 200)
    assert most <= 250
    last = 9_999
    assert {last, last - 1} <= {int.from_bytes(sink, "big") for sink, _ in stages.stored().published}
    append(forget_published_entry(index + 1, stages.old_published(before_ms=1 << 60, keep=100)))
    assert ([], []) == (stages.stored().open, stages.stored().published)
    # What publishes name has a bound of its own.
    assert len(msgspec.msgpack.encode(stages.stored())) < 100_000


async def test_a_leader_forgets_what_was_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is too much at once, the rest in two hours; a restart does not bring it back."""
    monkeypatch.setattr(abandoned_stages, "KEPT_PUBLISHED", 10)
    monkeypatch.setattr("laminar.node.transactions.participant.FORGOTTEN_IN_ONE", 7)
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        stages = partition.state.stages
        sinks = [number.to_bytes(16, "big") for number in range(100)]
        for sink in sinks:
            await write(partition, coordinator, sink=sink)
        await clean(partition, coordinator, age_ms=0)
        assert sinks[-10:] == [sink for sink, _ in stages.stored().published]

        await clean(partition, coordinator, age_ms=ONCE_MS + 60_000)
        assert [] == stages.stored().published
        await partition.appends.append_records(Records([b"behind it"]))
    async with lone_partition(tmp_path) as partition:
        assert [] == partition.state.stages.stored().published
        assert 101 == partition.log.next_offset


async def test_a_publish_that_comes_late_is_refused_whatever_was_staged_and_prepared_again(
    tmp_path: Path,
) -> None:
    """Requests of a process that stood still, or that came twice: stage, prepare, publish, in that order."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, targets = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s", once=True)).epoch
        batch = await stage(partition, epoch)
        await targets.prepare(SINK, 0, epoch, PART)
        decided = Target("t", 0, b"g" * 16, prepare_index_of(partition, batch))
        assert await coordinator.commit(SINK, 0, epoch, [PART])
        await targets.publish(SINK, 0, epoch, decided)
        assert 1 == partition.end_offset, "recognised"

        await clean(partition, coordinator, age_ms=ONCE_MS + 60_000)
        for late in ("publish", "stage", "prepare"):
            if late == "stage":
                await stage(partition, epoch)
            if late == "prepare":
                await targets.prepare(SINK, 0, epoch, PART)
                assert decided.prepare_index < prepare_index_of(partition, batch)
            with pytest.raises(Problem) as problem:
                await targets.publish(SINK, 0, epoch, decided)
            assert ("no_stage", "not_applied") == (problem.value.code, problem.value.outcome)
        assert not await coordinator.commit(SINK, 0, epoch, [PART])
        assert [b"x"] == await values(partition)

        await janitor(partition, coordinator, age_ms=2 * ONCE_MS).clean(partition)
        assert not partition.state.stages, "and nothing of it holds the log's start"


async def test_what_is_not_over_is_not_forgotten(tmp_path: Path) -> None:
    """Another partition has not published its part yet: the coordinator that goes on asks all of them."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, targets = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s", once=True)).epoch
        batch = await stage(partition, epoch)
        await targets.prepare(SINK, 0, epoch, PART)
        target = Target("t", 0, b"g" * 16, prepare_index_of(partition, batch))
        known = await coordinator.status(SINK)
        undone = msgspec.structs.replace(known, number=0, undone=Decision(0, epoch, (target,)))
        await coordinator._sinks.change(SINK, undone)
        await targets.publish(SINK, 0, epoch, target)

        await clean(partition, coordinator, age_ms=100 * ONCE_MS)
        assert 1 == partition.state.stages.published_once
        coordinator.finish_all()
        assert not await coordinator.commit(SINK, 0, epoch, [PART])
        assert [b"x"] == await values(partition)
        await clean(partition, coordinator, age_ms=100 * ONCE_MS)
        assert 0 == partition.state.stages.published_once


async def test_a_later_publish_is_not_forgotten_with_the_one_that_was_asked_for(tmp_path: Path) -> None:
    """The sink was begun to last meanwhile, and committed its next batch."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        await write(partition, coordinator)
        old = partition.state.stages.old_published(before_ms=1 << 60, keep=0)
        epoch = (await coordinator.begin(SINK, "s")).epoch
        await stage(partition, epoch, number=1)
        assert await coordinator.commit(SINK, 1, epoch, [PART])
        Participant(partition).forget_published(old)
        assert (known := partition.state.stages.published(SINK)) is not None and 1 == known.number


async def test_of_sinks_that_are_kept_nothing_is_forgotten(tmp_path: Path) -> None:
    """Their drivers may ask for the same batch a year later, and they are few."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s")).epoch
        await stage(partition, epoch)
        assert await coordinator.commit(SINK, 0, epoch, [PART])
        await clean(partition, coordinator, age_ms=10_000 * ONCE_MS)
        assert partition.state.stages.published(SINK) is not None


async def test_young_ones_stay_while_they_are_few(tmp_path: Path) -> None:
    """A commit is tried again for a while: what it stages again then is refused at once."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        batch = await write(partition, coordinator)
        await clean(partition, coordinator, age_ms=ONCE_MS - 60_000)
        with pytest.raises(Problem) as problem:
            await stage(partition, batch.epoch)
        assert "already_committed" == problem.value.code


async def test_while_nobody_can_be_asked_no_more_is_prepared_than_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the decision it would be too late. Sinks that are kept, and what is prepared, go on."""
    monkeypatch.setattr("laminar.node.transactions.participant.MAX_PUBLISHED_ONCE", 1)
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, targets = coordinator_of(partition)
        waiting = (await coordinator.begin(b"w" * 16, "waiting", once=True)).epoch
        await stage(partition, waiting, sink=b"w" * 16)
        await targets.prepare(b"w" * 16, 0, waiting, PART)
        await write(partition, coordinator)
        with pytest.raises(Problem) as problem:
            await write(partition, coordinator, sink=b"o" * 16)
        assert ("quota", 1, "not_applied") == (problem.value.code, problem.value.limit, problem.value.outcome)
        assert await coordinator.commit(b"w" * 16, 0, waiting, [PART])
        lasting = (await coordinator.begin(b"l" * 16, "lasting")).epoch
        await stage(partition, lasting, sink=b"l" * 16)
        assert await coordinator.commit(b"l" * 16, 0, lasting, [PART])

        await clean(partition, coordinator, age_ms=ONCE_MS + 60_000)
        epoch = (await coordinator.status(b"o" * 16)).epoch
        assert await coordinator.commit(b"o" * 16, 0, epoch, [PART])


def test_a_table_from_before_prepares_were_named_is_taken_over() -> None:
    """What it does not tell is 0: such a prepare stands for any, and such a publish is old."""
    before = (
        [((SINK, 0, FIRST_ONCE_EPOCH), ([Stage(3, 0, 1, 200, 0, 5, 6)], True, 7))],
        [(b"k" * 16, (4, 1, 2, 0, 1)), (b"o" * 16, (0, FIRST_ONCE_EPOCH, 1, 1, 1))],
    )
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(before), type=StoredStages)
    stages = StagedBatches()
    stages.restore(stored)
    assert [(b"o" * 16, 1)] == stages.old_published(before_ms=1, keep=10)
    assert Published(4, 1, 2, 0, 1) == stages.published(b"k" * 16)
    held = stages.batch((SINK, 0, FIRST_ONCE_EPOCH))
    assert held is not None and (True, 7, 0) == (held.prepared, held.prepared_ms, held.prepare_index)
    assert StagedBatch((Stage(3, 0, 1, 200, 0, 5, 6),), True, 7) == held.stored()


async def test_a_decision_from_before_it_named_its_prepares_is_published(tmp_path: Path) -> None:
    """It was made by a node from before, or the prepare is in a table from before."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, targets = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s", once=True)).epoch
        batch = await stage(partition, epoch)
        await targets.prepare(SINK, 0, epoch, PART)
        staging = Participant(partition)
        prepare = staging.prepare_index_of(batch)
        assert [True, True, False] == [staging.knows(batch, named) for named in (0, prepare, prepare + 1)]
        stored = partition.state.stages.stored()
        old = [(key, msgspec.structs.replace(held, prepare_index=0)) for key, held in stored.open]
        partition.state.stages.restore(msgspec.structs.replace(stored, open=old))
        assert staging.knows(batch, prepare)
        await targets.publish(SINK, 0, epoch, Target("t", 0, b"g" * 16, prepare))
        assert [b"x"] == await values(partition)


@pytest.mark.parametrize(
    "now, code",
    [
        (Sink("s", 7, 0), "already_committed"),
        (Sink("s", 7, -1), "no_stage"),
        (Sink("s", 8, -1), "fenced"),
        (Sink(""), "invalid"),
    ],
)
async def test_who_prepares_again_what_was_committed_and_forgotten_is_told_so(
    monkeypatch: pytest.MonkeyPatch, now: Sink, code: str
) -> None:
    """Its partition says that it holds nothing; that nothing is committed only the coordinator may say."""

    async def gone(*_: Any) -> Any:
        raise Problem("no_stage", "it holds nothing of it", outcome="not_applied")

    async def status(sink: bytes) -> Sink:
        return now

    asked = routes()
    monkeypatch.setattr(asked._steps, "at_leader", gone)
    monkeypatch.setattr(asked._steps, "status", status)
    with pytest.raises(Problem) as problem:
        await asked._prepare_for_driver(PrepareRequest("t", 0, SINK, 0, 7, [0]))
    assert code == problem.value.code


# -- who was deposed unawares -------------------------------------------------------------------


class Forgot(Targets):
    """A partition that answers when it is told to, and then has published the batch and forgotten that."""

    def __init__(self, partition: Partition) -> None:
        super().__init__(partition)
        self.asking = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def prepare(self, sink: bytes, number: int, epoch: int, part: Part) -> Prepared:
        await self._answer()
        raise AssertionError

    async def publish(self, sink: bytes, number: int, epoch: int, target: Target) -> None:
        await self._answer()

    async def _answer(self) -> None:
        self.asking.set()
        await self.may_answer.wait()
        raise Problem("no_stage", "it holds nothing of it", outcome="not_applied")


@pytest.mark.parametrize("stopped", ["before the decision", "behind it"])
async def test_a_coordinator_that_was_deposed_tells_nobody_that_a_batch_is_not_there(stopped: str) -> None:
    """It waited long; meanwhile the batch was committed and published, and the partition forgot it."""
    async with trio() as cluster:
        old = await cluster.leader()
        targets = Forgot(old.partition)
        coordinator = Coordinator(old.partition, targets, spawn=asyncio.ensure_future)
        begun = await coordinator.begin(SINK, "s", once=True)
        if stopped == "behind it":
            decision = Decision(0, begun.epoch, (Target("t", 0, b"g" * 16, 1),))
            await coordinator._sinks.change(SINK, msgspec.structs.replace(begun, number=0, undone=decision))
        told = asyncio.ensure_future(coordinator.commit(SINK, 0, begun.epoch, [PART]))
        await targets.asking.wait()
        await cluster.settled()
        cluster.cut_off(old.node)
        new = await cluster.leader(among=[member.node for member in cluster.followers(old)])
        other, _ = coordinator_of(new.partition)
        await other._sinks.change(SINK, msgspec.structs.replace(begun, number=0, undone=None))

        targets.may_answer.set()
        for _ in range(20):
            await asyncio.sleep(0)
        cluster.heal()
        with pytest.raises(Problem) as problem:
            await told
        assert problem.value.code in ("not_leader", "outcome_unknown")
        assert not coordinator._publisher._lost


async def test_a_leader_that_was_deposed_does_not_say_that_a_prepare_is_lost() -> None:
    """It was made with the leader behind it."""
    async with trio() as cluster:
        old = await cluster.leader()
        cluster.cut_off(old.node)
        asked = asyncio.ensure_future(
            routes()._steps._do(
                old.partition, PublishRequest("t", 0, SINK, 0, 1, old.partition.replica.group, 9)
            )
        )
        await cluster.leader(among=[member.node for member in cluster.followers(old)])
        cluster.heal()
        with pytest.raises(Problem) as problem:
            await asked
        assert "not_leader" == problem.value.code


def routes() -> SinkRoutes:
    services, asking = Services(), exchange()
    topics = TopicLookup(services.view)
    steps = SinkSteps(services, LeaderCall(services, Locator(services, asking)), topics, Deliveries())
    return SinkRoutes(services, steps, topics, make_topic=no_topic, limits=Limits())
