"""A sink that is deleted: nothing is decided for it any more, what was decided is there, its name is free."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from laminar.http.api.problems import Problem
from laminar.node.api.transactions.sinks import _described as described
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.sinks import Deletion, Sink, Target
from laminar.node.partition.state.state import PartitionState
from laminar.node.transactions.coordinator import Coordinator, Part, Prepared
from laminar.node.transactions.participant import Participant
from tests.node.alone import lone_partition, values
from tests.node.transactions.test_single_use_sinks import PART, SINK, Targets, coordinator_of, forget, stage
from tests.node.trio import trio


async def delete(partition: Partition, coordinator: Coordinator) -> int:
    """All of it, as a node does it; the epoch that refuses all before."""
    gone = await coordinator.delete(SINK, "delete")
    await Participant(partition).forget(SINK, gone.epoch)
    await coordinator.deleted(SINK, gone.epoch)
    return gone.epoch


async def refused(coordinator: Coordinator, number: int, epoch: int) -> str:
    with pytest.raises(Problem) as problem:
        await coordinator.commit(SINK, number, epoch, [PART])
    return problem.value.code


async def test_what_was_committed_stays_and_what_was_staged_goes(tmp_path: Path) -> None:
    """Its driver is refused, under every epoch; and nothing holds the log's start any more."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s")).epoch
        await stage(partition, epoch)
        assert await coordinator.commit(SINK, 0, epoch, [PART])
        await stage(partition, epoch, number=1)
        prepared = await stage(partition, epoch, number=2)
        await Participant(partition).prepare(prepared, [0])
        neighbour = await stage(partition, epoch, sink=b"n" * 16)

        after = await delete(partition, coordinator)
        assert [neighbour.key] == [key for key, _ in partition.state.stages.batches()]
        assert partition.state.stages.published(SINK) is None
        await stage(partition, epoch, number=1)
        for old in range(1, after + 1):
            assert "fenced" == await refused(coordinator, 1, old)
        assert [b"x"] == await values(partition)
        assert not (await coordinator.status(SINK)).exists
        assert [] == await coordinator.listed(prefix="", after="", limit=10)
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        assert partition.state.stages.published(SINK) is None
        assert partition.state.sinks.get(SINK) is not None


async def test_begun_anew_it_counts_from_the_beginning_and_no_epoch_comes_again(tmp_path: Path) -> None:
    """Numbers that the old one had published are taken; its driver is refused as long as he is remembered."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        old = (await coordinator.begin(SINK, "s")).epoch
        for number in range(3):
            await stage(partition, old, number=number)
            assert await coordinator.commit(SINK, number, old, [PART])
        gone = await delete(partition, coordinator)
        with pytest.raises(Problem) as problem:
            await coordinator.begin(SINK, "s", epoch=gone + 1)
        assert "no_such_sink" == problem.value.code, "who goes on would write again what was committed"

        anew = await coordinator.begin(SINK, "s")
        assert (gone + 1, -1, "") == (anew.epoch, anew.number, anew.fingerprint)
        await stage(partition, anew.epoch)
        assert "fenced" == await refused(coordinator, 3, old)
        assert await coordinator.commit(SINK, 0, anew.epoch, [PART])
        assert 4 == partition.end_offset
        assert [("s", 0)] == [
            (each.name, each.number) for each in await coordinator.listed(prefix="", after="", limit=10)
        ]


async def test_while_partitions_still_know_it_the_name_is_not_free(tmp_path: Path) -> None:
    """Else its first batches would be taken for those that the old one published."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        await coordinator.begin(SINK, "s")
        gone = await coordinator.delete(SINK, "one")
        for once in (False, True):
            with pytest.raises(Problem) as problem:
                await coordinator.begin(SINK, "s", once=once)
            assert ("in_progress", "not_applied") == (problem.value.code, problem.value.outcome)

        again = await coordinator.delete(SINK, "another")
        assert gone.epoch == again.epoch, "who asks again goes on with it"
        await coordinator.deleted(SINK, gone.epoch)
        assert Deletion.DONE == (await coordinator.delete(SINK, "one")).deletion, "its answer was lost"
        with pytest.raises(Problem) as problem:
            await coordinator.delete(SINK, "another")
        assert "no_such_sink" == problem.value.code


@pytest.mark.parametrize("once", [False, True])
async def test_a_deletion_that_comes_again_does_not_delete_the_next_of_that_name(
    tmp_path: Path, once: bool
) -> None:
    """Its answer was lost, and somebody else has begun that name meanwhile."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        await coordinator.begin(SINK, "s")
        await delete(partition, coordinator)
        anew = await coordinator.begin(SINK, "s", once=once)
        assert anew.epoch == (await coordinator.delete(SINK, "delete")).epoch
        await coordinator.begin(SINK, "s")
        assert not (await coordinator.delete(SINK, "delete")).deletion
        await stage(partition, anew.epoch + 1)
        assert await coordinator.commit(SINK, 0, anew.epoch + 1, [PART])
        assert Deletion.BEGUN == (await coordinator.delete(SINK, "another")).deletion


async def test_a_leader_that_was_deposed_does_not_say_that_a_sink_is_deleted() -> None:
    """It has not heard of the deletion, or of its end what will not last: the name may not be free."""
    async with trio() as cluster:
        old = await cluster.leader()
        cluster.cut_off(old.node)
        new = await cluster.leader(among=[member.node for member in cluster.followers(old)])
        coordinator, _ = coordinator_of(new.partition)
        await coordinator.begin(SINK, "s")
        gone = await coordinator.delete(SINK, "delete")
        deposed, _ = coordinator_of(old.partition)
        asked = asyncio.ensure_future(deposed.deleted(SINK, gone.epoch))
        await coordinator.status(SINK)
        assert not asked.done() or asked.exception() is not None
        cluster.heal()
        with pytest.raises(Problem):
            await asked
        await cluster.settled()
        assert Deletion.DONE == (await coordinator.deleted(SINK, gone.epoch)).deletion


@pytest.mark.parametrize("meanwhile", ["nothing", "once"])
async def test_no_epoch_of_a_sink_that_was_deleted_and_forgotten_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """Its driver was stopped before the deletion, and goes on when another sink has the name: what he commits
    would be the other's, and the numbers up to his would be taken for committed.
    """
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        first = (await coordinator.begin(SINK, "s")).epoch
        old = (await coordinator.begin(SINK, "s")).epoch
        gone = await delete(partition, coordinator)
        if meanwhile == "once":
            await coordinator.begin(SINK, "s", once=True)
        await forget(coordinator, monkeypatch)
        assert (0, gone) == ((known := await coordinator.status(SINK)).epoch, known.last_epoch)
        for epoch in (first, old, gone):
            assert "no_such_sink" == await refused(coordinator, 5, epoch)
            with pytest.raises(Problem) as problem:
                await coordinator.begin(SINK, "s", epoch=epoch)
            assert ("no_such_sink", gone) == (problem.value.code, problem.value.limit)
        assert "invalid" == await refused(coordinator, 5, gone + 1)
        assert gone + 1 == (await coordinator.begin(SINK, "s", epoch=gone + 1)).epoch
        for epoch in (first, old, gone):
            await stage(partition, epoch, number=5)
            assert "fenced" == await refused(coordinator, 5, epoch)
        await stage(partition, gone + 1)
        assert await coordinator.commit(SINK, 0, gone + 1, [PART])
        assert 1 == partition.end_offset

        restored = PartitionState(0)
        restored.restore(partition.state.state(), [], None)
        assert gone == restored.sinks.floor == partition.state.state_at(partition.committed_index).sinks_floor


async def test_a_sink_that_is_being_deleted_is_listed(tmp_path: Path) -> None:
    """Its name can't be begun: who looks for the reason finds it."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        await coordinator.begin(SINK, "s")
        gone = await coordinator.delete(SINK, "delete")
        (listed,) = await coordinator.listed(prefix="", after="", limit=10)
        assert ("s", Deletion.BEGUN) == (listed.name, listed.deletion)
        assert described("s", listed).deleting and not described("s", Sink("s", 1)).deleting
        await coordinator.deleted(SINK, gone.epoch)
        assert [] == await coordinator.listed(prefix="", after="", limit=10)


class SlowTargets(Targets):
    """Publishes when it is told to."""

    def __init__(self, partition: Partition) -> None:
        super().__init__(partition)
        self.prepared = asyncio.Event()
        self.may_prepare = asyncio.Event()
        self.publishing = asyncio.Event()
        self.may_publish = asyncio.Event()

    async def prepare(self, sink: bytes, number: int, epoch: int, part: Part) -> Prepared:
        prepared = await super().prepare(sink, number, epoch, part)
        self.prepared.set()
        await self.may_prepare.wait()
        return prepared

    async def publish(self, sink: bytes, number: int, epoch: int, target: Target) -> None:
        self.publishing.set()
        await self.may_publish.wait()
        await super().publish(sink, number, epoch, target)


@pytest.mark.parametrize("decided", [False, True])
async def test_a_batch_that_is_being_committed_is_published_first_or_refused(
    tmp_path: Path, decided: bool
) -> None:
    """Decided, it is published before anything is forgotten; before that, it never is."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        targets = SlowTargets(partition)
        coordinator = Coordinator(partition, targets, spawn=asyncio.ensure_future)
        epoch = (await coordinator.begin(SINK, "s")).epoch
        await stage(partition, epoch)
        committing = asyncio.ensure_future(coordinator.commit(SINK, 0, epoch, [PART]))
        await targets.prepared.wait()
        if decided:
            targets.may_prepare.set()
            await targets.publishing.wait()
            deleting = asyncio.ensure_future(delete(partition, coordinator))
            for _ in range(20):
                await asyncio.sleep(0)
            known = partition.state.sinks.get(SINK)
            assert known is not None and not known.deletion and not deleting.done()
            targets.may_publish.set()
            assert await committing
            await deleting
            assert [b"x"] == await values(partition)
        else:
            await delete(partition, coordinator)
            targets.may_prepare.set()
            with pytest.raises(Problem) as problem:
                await committing
            assert ("fenced", "not_applied") == (problem.value.code, problem.value.outcome)
            assert 0 == partition.end_offset
        assert not partition.state.stages


async def test_a_publish_that_comes_late_adds_nothing(tmp_path: Path) -> None:
    """From a coordinator that was deposed and does not know that all was published and then deleted."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, targets = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s")).epoch
        batch = await stage(partition, epoch)
        assert await coordinator.commit(SINK, 0, epoch, [PART])
        await delete(partition, coordinator)
        with pytest.raises(Problem) as problem:
            await targets.publish(SINK, 0, epoch, Target("t", 0, b"g" * 16))
        assert "no_stage" == problem.value.code
        assert [b"x"] == await values(partition)
        assert batch.key not in dict(partition.state.stages.batches())


async def test_a_name_that_is_free_again_leaves_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is remembered of it is forgotten as what wrote once is."""
    monkeypatch.setattr("laminar.node.transactions.coordinator.MAX_KEPT", 1)
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        await coordinator.begin(SINK, "s")
        with pytest.raises(Problem) as problem:
            await coordinator.begin(b"o" * 16, "other")
        assert "quota" == problem.value.code
        await delete(partition, coordinator)
        await coordinator.begin(b"o" * 16, "other")
        with pytest.raises(Problem):
            await coordinator.begin(SINK, "s")
        await forget(coordinator, monkeypatch)
        assert Sink("", first=3) == await coordinator.status(SINK)
        assert 1 == partition.state.sinks.kept
