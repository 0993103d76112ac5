"""Jobs that a transaction acknowledges: pinned before its decision, ended with it, by whoever leads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from laminar.batch import Header, Kind, build, kind_of
from laminar.batch.header import Flag
from laminar.http.api.problems import Problem
from laminar.node.channels.delivery import Delivery
from laminar.node.channels.open_records.jobs import Jobs
from laminar.node.channels.requests import Step
from laminar.node.partition.state.channel_changes import channel_changes
from laminar.node.partition.state.pins import PartAcks, Pinned, PinsEnded
from laminar.wire.channels import ChannelSettings, Named
from tests.node.alone import lone_partition
from tests.node.channels.delivering import (
    CHANNEL,
    append,
    attempts,
    delivering,
    given,
    nothing,
    offsets,
    steps,
)
from tests.node.channels.test_leaders import Consumers
from tests.node.channels.test_leaders import append as append_to
from tests.node.trio import trio

BATCH = (b"s" * 16, 0, 1)
NEWER = (b"s" * 16, 0, 2)
SECOND_MS = 1_000


def acks(jobs: Jobs, *wanted: int) -> list[PartAcks]:
    """The acknowledgement of those jobs that have the wanted offsets; without any: of all."""
    named = [
        Named(0, offset, offset + 1, run.delivery)
        for run in jobs.runs
        for offset in range(run.first, run.end)
        if not wanted or offset in wanted
    ]
    return [PartAcks(CHANNEL, named)]


async def test_what_is_pinned_is_out_until_its_batch_ends_however_long_that_takes(tmp_path: Path) -> None:
    """The others' time goes on. Done with the batch, it never comes again, also after a restart."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b", b"c")
        jobs = await given(delivery, timeout_ms=2 * SECOND_MS)
        index = await delivery.pin(BATCH, acks(jobs, 0, 2))
        again = await given(delivery)
        assert (offsets(again), attempts(again)) == ([1], [2])
        await nothing(delivery, 2.5)
        assert index == await delivery.pin(BATCH, acks(jobs, 0, 2)), "asked again it is answered as at first"

        channel = partition.state.channels.by_id[CHANNEL]
        assert (sorted(channel.out), sorted(channel.pins)) == ([0, 1, 2], [0, 2])
        await delivery.end_pins(BATCH, done=True, index=index)
        assert (sorted(channel.out), channel.pins) == ([1], {})
        await delivery.end_pins(BATCH, done=True, index=index)
        assert (await delivery.settle(CHANNEL, steps("ack", jobs))).done == 2, "0 and 2 are done"
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        assert sorted(partition.state.channels.by_id[CHANNEL].out) == [1]
        await nothing(delivery, 0.2)
        delivery.stop()


async def test_a_batch_that_is_not_committed_gives_its_jobs_their_time_again(tmp_path: Path) -> None:
    """From its end on: whoever has them may still acknowledge, and if he is gone they come again."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        jobs = await given(delivery, timeout_ms=2 * SECOND_MS)
        await delivery.pin(BATCH, acks(jobs))
        await nothing(delivery, 2.3)
        await delivery.end_pins(BATCH, done=False)

        assert sorted(partition.state.channels.by_id[CHANNEL].out) == [0, 1]
        await nothing(delivery, 0.3)
        assert await delivery.settle(CHANNEL, steps("ack", jobs)) == (2, [])
        channel = partition.state.channels.by_id[CHANNEL]
        assert not channel.pins and not channel.out
        await append(partition, b"c")
        later = await given(delivery, timeout_ms=2 * SECOND_MS)
        await delivery.pin(BATCH, acks(later))
        await delivery.end_pins(BATCH, done=False)
        again = await given(delivery, wait_s=60.0)
        assert (offsets(again), attempts(again)) == ([2], [2]), "its time is over"


async def test_what_is_pinned_is_ended_by_its_transaction_alone(tmp_path: Path) -> None:
    """By its token it is late, as if it were another's; more time it needs none, so it is extended."""
    async with delivering(tmp_path, ChannelSettings(order="key", retry_ms=0)) as (partition, delivery):
        await append(partition, b"a", b"b", keys=[b"k", b"k"])
        jobs = await given(delivery)
        assert offsets(jobs) == [0]
        index = await delivery.pin(BATCH, acks(jobs))
        for verb in ("ack", "nack", "release"):
            settled = await delivery.settle(CHANNEL, steps(verb, jobs))
            assert (settled.done, len(settled.late)) == (0, 1), verb
        assert await delivery.settle(CHANNEL, steps("extend", jobs)) == (1, [])
        other = Named(0, 0, 1, 1)
        assert (await delivery.settle(CHANNEL, [Step("extend", other)])).late == [other]
        await nothing(delivery, 0.2)

        await delivery.end_pins(BATCH, done=True, index=index)
        assert offsets(await given(delivery)) == [1], "its key is free"


async def test_only_what_is_out_under_its_delivery_is_pinned(tmp_path: Path) -> None:
    """All or nothing; not what another batch has; and of one batch no others in its epoch."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b", b"c")
        jobs = await given(delivery)
        await delivery.settle(CHANNEL, [Step("ack", acks(jobs, 1)[0].named[0])])
        channel = partition.state.channels.by_id[CHANNEL]

        async def refused(code: str, batch: tuple[bytes, int, int], parts: list[PartAcks]) -> Problem:
            with pytest.raises(Problem) as problem:
                await delivery.pin(batch, parts)
            assert (problem.value.code, problem.value.outcome) == (code, "not_applied")
            return problem.value

        late = await refused("late", BATCH, acks(jobs))
        assert late.value == f"0:1:{jobs.runs[0].delivery}"
        stale = acks(jobs, 0)[0].named[0]
        await refused("late", BATCH, [PartAcks(CHANNEL, [stale._replace(delivery=1)])])
        await refused("late", BATCH, [PartAcks(99, [stale])])
        await refused("no_such_channel", BATCH, [PartAcks(0, [stale])])
        assert not channel.pins and not partition.state.channels.pins

        index = await delivery.pin(BATCH, acks(jobs, 0))
        await refused("in_progress", NEWER, acks(jobs, 0, 2))
        await refused("in_progress", BATCH, acks(jobs, 0, 2))
        await refused("in_progress", BATCH, acks(jobs, 2))
        assert sorted(channel.pins) == [0]
        await delivery.end_pins(NEWER, done=True)
        await delivery.end_pins(BATCH, done=True, index=index + 1)
        assert sorted(channel.pins) == [0], "of another epoch, or another entry: not what is pinned"
        await delivery.end_pins(BATCH, done=False, index=index)
        assert await delivery.pin(NEWER, acks(jobs, 0, 2)) > index


async def test_a_person_may_move_a_channel_whose_jobs_are_pinned(tmp_path: Path) -> None:
    """Then they come again, and the end of their batch takes nothing from whoever has them then."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a")
        jobs = await given(delivery)
        index = await delivery.pin(BATCH, acks(jobs))
        await delivery.seek(CHANNEL, 0)
        again = await given(delivery)

        await delivery.end_pins(BATCH, done=True, index=index)
        assert await delivery.settle(CHANNEL, steps("ack", again)) == (1, [])
        await append(partition, b"b")
        jobs = await given(delivery)
        await delivery.pin(BATCH, acks(jobs))
        await delivery.close(CHANNEL)
        await delivery.end_pins(BATCH, done=True)
        assert not partition.state.channels.pins


async def test_pins_and_their_end_count_only_when_they_are_synced(tmp_path: Path) -> None:
    """Replicas change to the policy `interval` one by one: one of them may do so before its leader."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a")
        index = await delivery.pin(BATCH, acks(await given(delivery)))
        await delivery.end_pins(BATCH, done=True, index=index)
        frames = await partition.log.read(index, partition.log.last_index, max_bytes=1 << 20)
        pins = [
            Header.unpack(frame).flags
            for frame in frames
            if kind_of(frame) == Kind.CHANNEL and isinstance(channel_changes(frame)[0], (Pinned, PinsEnded))
        ]
        assert len(pins) == 2 and all(flags & Flag.SYNCED for flags in pins)


async def test_nothing_is_pinned_before_all_programs_know_pins(tmp_path: Path) -> None:
    """An older one could not read its log."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a")
        jobs = await given(delivery)
        partition.context._code_version = lambda: 4
        with pytest.raises(Problem) as problem:
            await delivery.pin(BATCH, acks(jobs))
        assert problem.value.code == "not_enabled"
        assert not partition.state.channels.pins


@pytest.mark.parametrize("done", [True, False])
async def test_the_next_leader_ends_what_the_one_before_has_pinned(done: bool) -> None:
    """No time runs for it there either; what is done stays done, what is not comes again."""
    async with trio() as cluster:
        consumers = Consumers(cluster)
        await consumers.open(ChannelSettings(retry_ms=0))
        await append_to(cluster, [b"a", b"b"], [None] * 2)
        first = await cluster.leader()
        jobs = await consumers.of(first).receive(CHANNEL, wanted=1, wait_s=60.0, timeout_ms=SECOND_MS)
        assert jobs is not None
        index = await consumers.of(first).pin(BATCH, acks(jobs))
        await first.kill()

        second = await cluster.leader()
        rest = await consumers.given(10)
        assert offsets(rest) == [1]
        assert await consumers.settle(Step("ack", acks(rest)[0].named[0]))
        assert await consumers.receive(10, wait_s=1.5) is None
        assert await consumers.of(second).pin(BATCH, acks(jobs)) == index
        await consumers.of(second).end_pins(BATCH, done=done, index=index)
        if done:
            assert await consumers.receive(10, wait_s=2.5) is None
        else:
            assert offsets(await consumers.given(10)) == [0]
        await first.start()
        await cluster.settled()
        tables = [
            (member.partition.state.channels.stored(), member.partition.state.channels.stored_pins())
            for member in cluster.members.values()
        ]
        assert tables[0] == tables[1] == tables[2] and not tables[0][1]
        consumers.stop()


async def test_a_leader_that_was_deposed_does_not_say_that_pins_have_ended() -> None:
    """They were made with the leader behind it: the coordinator has to ask that one."""
    async with trio() as cluster:
        consumers = Consumers(cluster)
        await consumers.open(ChannelSettings())
        await append_to(cluster, [b"a"], [None])
        old = await cluster.leader()
        jobs = await consumers.of(old).receive(CHANNEL, wanted=1, wait_s=60.0)
        assert jobs is not None
        cluster.cut_off(old.node)
        asked = asyncio.create_task(consumers.of(old).end_pins(BATCH, done=True, index=99))
        new = await cluster.leader(among=[node for node in cluster.members if node != old.node])
        index = await consumers.of(new).pin(BATCH, acks(jobs))
        cluster.heal()
        with pytest.raises(Problem) as problem:
            await asyncio.wait_for(asked, 60)
        assert problem.value.code == "not_leader"
        assert new.partition.state.channels.pins[BATCH].entry == index
        consumers.stop()


async def test_a_leader_that_was_deposed_does_not_say_that_a_pinned_job_is_extended() -> None:
    """The pin may have ended behind it, and another consumer may have the job by now."""
    async with trio() as cluster:
        consumers = Consumers(cluster)
        await consumers.open(ChannelSettings())
        await append_to(cluster, [b"a"], [None])
        old = await cluster.leader()
        jobs = await consumers.of(old).receive(CHANNEL, wanted=1, wait_s=60.0)
        assert jobs is not None
        await consumers.of(old).pin(BATCH, acks(jobs))
        cluster.cut_off(old.node)
        asked = asyncio.create_task(consumers.of(old).settle(CHANNEL, steps("extend", jobs)))
        new = await cluster.leader(among=[node for node in cluster.members if node != old.node])
        await consumers.of(new).end_pins(BATCH, done=True)
        cluster.heal()
        with pytest.raises(Problem) as problem:
            await asyncio.wait_for(asked, 60)
        assert problem.value.code == "not_leader"
        consumers.stop()


async def test_a_leader_that_was_deposed_does_not_call_a_job_late() -> None:
    """It was given out behind it: its batch can be committed."""
    async with trio() as cluster:
        consumers = Consumers(cluster)
        await consumers.open(ChannelSettings())
        old = await cluster.leader()
        cluster.cut_off(old.node)
        new = await cluster.leader(among=[node for node in cluster.members if node != old.node])
        frame = build([b"a"])
        await new.partition.appends.append_frame(frame, Header.unpack(frame))
        jobs = await consumers.of(new).receive(CHANNEL, wanted=1, wait_s=60.0)
        assert jobs is not None
        asked = asyncio.create_task(consumers.of(old).pin(BATCH, acks(jobs)))
        await asyncio.wait([asked], timeout=0.1)
        cluster.heal()
        with pytest.raises(Problem) as problem:
            await asyncio.wait_for(asked, 60)
        assert (problem.value.code, problem.value.outcome) == ("not_leader", "not_applied")
        assert await consumers.of(new).pin(BATCH, acks(jobs))
        consumers.stop()


async def test_a_pin_is_answered_when_a_majority_has_it() -> None:
    """Else a batch is decided whose jobs the next leader gives to others."""
    async with trio() as cluster:
        consumers = Consumers(cluster)
        await consumers.open(ChannelSettings())
        await append_to(cluster, [b"a"], [None])
        old = await cluster.leader()
        jobs = await consumers.of(old).receive(CHANNEL, wanted=1, wait_s=60.0)
        assert jobs is not None
        cluster.cut_off(old.node)
        asked = asyncio.create_task(consumers.of(old).pin(BATCH, acks(jobs)))
        new = await cluster.leader(among=[node for node in cluster.members if node != old.node])
        assert not asked.done()
        cluster.heal()
        with pytest.raises(Problem):
            await asyncio.wait_for(asked, 60)
        await cluster.settled()
        assert not new.partition.state.channels.pins
        consumers.stop()
