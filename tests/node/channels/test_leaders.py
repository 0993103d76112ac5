"""Channels over three members: what one leader gave out, the next one knows."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from laminar.batch import Batch, Header, build
from laminar.http.api.problems import Problem
from laminar.node.channels.delivery import Delivery
from laminar.node.channels.open_records.jobs import Jobs
from laminar.node.channels.requests import Step
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.channels import Why
from laminar.wire.channels import ChannelSettings, Named
from tests.node.trio import Member, Trio, trio

CHANNEL = 7


class Consumers:
    """The deliveries of a trio's members, and calls that find the leader and try again."""

    def __init__(self, cluster: Trio) -> None:
        self.cluster = cluster
        self._deliveries: dict[int, tuple[Partition, Delivery]] = {}

    def of(self, member: Member) -> Delivery:
        held = self._deliveries.get(id(member.partition))
        if held is None:
            held = self._deliveries[id(member.partition)] = (member.partition, Delivery(member.partition))
        return held[1]

    async def open(self, settings: ChannelSettings) -> None:
        await self.of(await self.cluster.leader()).open(CHANNEL, "billing", 1, settings)

    async def receive(self, wanted: int, *, wait_s: float = 0.3) -> Jobs | None:
        try:
            async with asyncio.timeout(3):
                delivery = self.of(await self.cluster.leader())
                return await delivery.receive(CHANNEL, wanted=wanted, wait_s=wait_s, timeout_ms=1_000)
        except (Problem, TimeoutError):
            return None

    async def given(self, wanted: int) -> Jobs:
        """What is given out as soon as there is something, and a leader that says so."""
        async with asyncio.timeout(60):
            while (jobs := await self.receive(wanted)) is None:
                pass
        return jobs

    async def settle(self, step: Step) -> bool:
        """Whether the record is as was asked; asked again until a leader answers."""
        while True:
            try:
                async with asyncio.timeout(2):
                    settled = await self.of(await self.cluster.leader()).settle(CHANNEL, [step])
                return not settled.late
            except (Problem, TimeoutError):
                await asyncio.sleep(0.02)

    def stop(self) -> None:
        for _, delivery in self._deliveries.values():
            delivery.stop()


async def append(cluster: Trio, values: list[bytes], keys: list[bytes | None]) -> None:
    frame = build(values, keys=keys)
    leader = await cluster.leader()
    await leader.partition.appends.append_frame(frame, Header.unpack(frame))


async def test_what_a_killed_leader_gave_out_is_out() -> None:
    """The next leader gives it to no other before its time is over, and takes its acknowledgement."""
    async with trio() as cluster:
        consumers = Consumers(cluster)
        await consumers.open(ChannelSettings())
        await append(cluster, [b"a", b"b", b"c"], [None] * 3)
        jobs = await consumers.given(2)
        first = await cluster.leader()
        await first.kill()

        leader = await cluster.leader()
        assert leader is not first
        rest = await consumers.given(10)
        assert [run.first for run in rest.runs] == [2]
        (run,) = jobs.runs
        assert await consumers.settle(Step("ack", Named(0, 0, 1, run.delivery)))
        channel = leader.partition.state.channels.by_id[CHANNEL]
        assert (sorted(channel.out), channel.floor) == ([1, 2], 1)
        again = await consumers.given(10)
        assert sum(run.length for run in again.runs) >= 1, "1 and 2 come again"
        assert 0 not in [run.first for run in again.runs]
        await first.start()
        await cluster.settled()
        tables = [member.partition.state.channels.stored() for member in cluster.members.values()]
        assert tables[0] == tables[1] == tables[2]
        consumers.stop()


async def test_a_leader_that_is_cut_off_gives_out_nothing() -> None:
    """Its entry is never committed, so no consumer is answered; the others give the record to one."""
    async with trio() as cluster:
        consumers = Consumers(cluster)
        await consumers.open(ChannelSettings())
        await append(cluster, [b"a"], [None])
        old = await cluster.leader()
        cluster.cut_off(old.node)
        asked = asyncio.create_task(consumers.of(old).receive(CHANNEL, wanted=1, wait_s=20.0))

        new = await cluster.leader(among=[node for node in cluster.members if node != old.node])
        jobs = await consumers.of(new).receive(CHANNEL, wanted=1, wait_s=60.0)

        assert jobs is not None and jobs.total == 1
        cluster.heal()
        with pytest.raises(Problem):
            await asyncio.wait_for(asked, 60)
        await cluster.settled()
        channels = new.partition.state.channels
        assert list(channels.by_id[CHANNEL].out) == [0]
        assert old.partition.state.channels.stored() == channels.stored(), (
            "what was truncated is in its table"
        )
        consumers.stop()


async def test_a_leader_that_is_cut_off_tells_no_stream_of_an_end() -> None:
    """Its entry is never committed: the record is out yet, and the stream's credit is used up."""
    async with trio() as cluster:
        consumers = Consumers(cluster)
        await consumers.open(ChannelSettings())
        await append(cluster, [b"a"], [None])
        old = await cluster.leader()
        jobs = await consumers.of(old).receive(CHANNEL, wanted=1, wait_s=60.0)
        assert jobs is not None
        named = Named(0, 0, 1, jobs.runs[0].delivery)
        cluster.cut_off(old.node)
        said = asyncio.create_task(consumers.of(old).settle(CHANNEL, [Step("ack", named)]))
        await asyncio.sleep(0.02)
        assert not old.partition.state.channels.by_id[CHANNEL].out, "as of its log's end it is done"
        asked = asyncio.create_task(consumers.of(old).ended(CHANNEL, 1, [named], wait_s=20.0))

        new = await cluster.leader(among=[node for node in cluster.members if node != old.node])
        assert ([], 0) == await consumers.of(new).ended(CHANNEL, 1, [named], wait_s=0.1)
        waits = asyncio.create_task(consumers.of(new).ended(CHANNEL, 1, [named], wait_s=20.0))
        await asyncio.sleep(0)
        await consumers.of(new).settle(CHANNEL, [Step("ack", named)])
        assert ([named], 0) == await waits

        cluster.heal()
        for each in (said, asked):
            with pytest.raises(Problem):
                await asyncio.wait_for(each, 60)
        consumers.stop()


@pytest.mark.parametrize("seed", range(4))
async def test_leaders_that_die_lose_no_job_and_double_none(seed: int) -> None:
    """While leaders are killed, cut off and lose power: done is done, and of a key one record is out."""
    chance = random.Random(seed)
    settings = ChannelSettings(order="key" if seed % 2 else "none", retry_ms=0, max_attempts=0)
    count = 150
    async with trio(seed=seed) as cluster:
        consumers = Consumers(cluster)
        await consumers.open(settings)
        done: set[int] = set()
        given: set[tuple[int, int]] = set()
        attempts: dict[int, int] = {}
        asked: set[int] = set()  # acknowledged, whether or not an answer came
        order: dict[bytes, list[int]] = {}
        stopped = asyncio.Event()

        async def produce() -> None:
            at = 0
            while at < count:
                size = min(chance.randint(1, 20), count - at)
                keys: list[bytes | None] = [b"k%d" % chance.randint(0, 5) for _ in range(size)]
                try:
                    async with asyncio.timeout(2):
                        await append(cluster, [b"x"] * size, keys)
                except (Problem, TimeoutError):
                    await asyncio.sleep(0.05)
                at = (await cluster.leader()).partition.end_offset

        async def consume() -> None:
            while not stopped.is_set():
                jobs = await consumers.receive(chance.randint(1, 8))
                if jobs is None:
                    continue
                keys = {
                    batch.base_offset + at: key
                    for batch in map(Batch, jobs.frames)
                    for at, key in enumerate(batch.keys or [None] * len(batch))
                }
                each = [
                    (offset, run.delivery, run.attempt)
                    for run in jobs.runs
                    for offset in range(run.first, run.end)
                ]
                # At once: when it comes to the last of them, another may have done it, as its time is over.
                for offset, delivery, attempt in each:
                    assert offset not in done, f"{offset} is given out after it was acknowledged"
                    assert (offset, delivery) not in given, "one delivery has one consumer"
                    assert attempt > attempts.get(offset, 0), "an attempt was not counted"
                    if settings.order == "key":
                        earlier = order.setdefault(keys[offset] or b"", [])
                        assert asked >= {each for each in earlier if each < offset}, "two of a key are out"
                        if offset not in attempts:
                            earlier.append(offset)
                    given.add((offset, delivery))
                    attempts[offset] = attempt
                for offset, delivery, _ in each:
                    verb: Any = chance.choice(["ack", "ack", "ack", "nack"])
                    if verb == "ack":
                        asked.add(offset)
                    ended = await consumers.settle(Step(verb, Named(0, offset, offset + 1, delivery)))
                    if ended and verb == "ack":
                        done.add(offset)
                    elif verb == "ack" and offset not in done:
                        asked.discard(offset)  # it came too late, and acknowledged nothing

        async def trouble() -> None:
            for _ in range(4):
                await asyncio.sleep(chance.uniform(0.2, 0.6))
                leader = await cluster.leader()
                what = chance.choice(["kill", "cut", "power"])
                if what == "cut":
                    cluster.cut_off(leader.node)
                    await asyncio.sleep(0.5)
                    cluster.heal()
                    continue
                await (leader.kill() if what == "kill" else leader.cut_power())
                await asyncio.sleep(0.1)
                await leader.start()

        async with asyncio.timeout(90):
            work = [asyncio.create_task(consume()) for _ in range(4)]
            await asyncio.gather(produce(), trouble())
            end = (await cluster.leader()).partition.end_offset
            while len(done) < end:
                failed = [task for task in work if task.done()]
                if failed:
                    failed[0].result()
                await asyncio.sleep(0.02)
            stopped.set()
            await asyncio.gather(*work)
        await cluster.settled()
        assert done == set(range(end))
        assert all(found == sorted(found) for found in order.values())
        tables = [member.partition.state.channels.stored() for member in cluster.members.values()]
        assert tables[0] == tables[1] == tables[2] and not tables[0][0].out
        consumers.stop()


@pytest.mark.parametrize("what", ["done", "late", "over"])
async def test_a_leader_that_is_cut_off_says_nothing_of_what_it_can_not_know(what: str) -> None:
    """The next one may have gone back by a seek and given the record out again: then it is out, not done."""
    async with trio() as cluster:
        consumers = Consumers(cluster)
        await consumers.open(ChannelSettings())
        await append(cluster, [b"a"], [None])
        old = await cluster.leader()
        jobs = await consumers.of(old).receive(CHANNEL, wanted=1, wait_s=60.0)
        assert jobs is not None
        ack = Step("ack", Named(0, 0, 1, jobs.runs[0].delivery))
        assert await consumers.settle(ack)
        await cluster.settled()
        cluster.cut_off(old.node)
        # As of a delivery that the next leader may make: this one has never heard of it.
        later = Named(0, 0, 1, jobs.runs[0].delivery + 100)
        if what == "over":
            asked: asyncio.Task[Any] = asyncio.create_task(
                consumers.of(old).ended(CHANNEL, 1, [later], wait_s=20.0)
            )
        else:
            step = ack if what == "done" else Step("nack", later)
            asked = asyncio.create_task(consumers.of(old).settle(CHANNEL, [step]))

        new = await cluster.leader(among=[node for node in cluster.members if node != old.node])
        await consumers.of(new).seek(CHANNEL, 0)
        again = await consumers.of(new).receive(CHANNEL, wanted=1, wait_s=60.0)
        assert again is not None and again.total == 1
        cluster.heal()
        with pytest.raises(Problem):
            await asyncio.wait_for(asked, 60)
        consumers.stop()


@pytest.mark.parametrize("what", ["retry", "drop"])
async def test_a_leader_that_is_cut_off_does_not_say_that_nothing_is_dead(what: str) -> None:
    """A person who has records replayed or dropped, and reads 0, takes it that none is left."""
    async with trio() as cluster:
        consumers = Consumers(cluster)
        await consumers.open(ChannelSettings(max_attempts=1))
        await append(cluster, [b"a"], [None])
        old = await cluster.leader()
        jobs = await consumers.of(old).receive(CHANNEL, wanted=1, wait_s=60.0)
        assert jobs is not None
        await cluster.settled()
        cluster.cut_off(old.node)
        delivery = consumers.of(old)
        ask = delivery.retry_dead if what == "retry" else delivery.drop_dead
        asked = asyncio.create_task(ask(CHANNEL, None))

        new = await cluster.leader(among=[node for node in cluster.members if node != old.node])
        nack = Step("nack", Named(0, 0, 1, jobs.runs[0].delivery))
        assert (await consumers.of(new).settle(CHANNEL, [nack])).done == 1
        assert new.partition.state.channels.by_id[CHANNEL].aside[0].why is Why.DEAD
        cluster.heal()
        with pytest.raises(Problem):
            await asyncio.wait_for(asked, 60)
        again = consumers.of(new)
        assert await (again.retry_dead if what == "retry" else again.drop_dead)(CHANNEL, None) == 1
        consumers.stop()
