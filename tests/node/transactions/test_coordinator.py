"""Who may commit what, on a coordinator whose targets are asked by the test itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.batch import Header, Kind, build, build_control
from laminar.http.api.problems import Problem
from laminar.node.api.common.leader_call import SINK_STEP, LeaderCall
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.transactions import steps
from laminar.node.api.transactions.steps import PrepareRequest, PublishRequest, SinkRequest, SinkSteps
from laminar.node.channels.deliveries import Deliveries
from laminar.node.host.clock import Clock
from laminar.node.partition.retention import Retention, Rules
from laminar.node.partition.state.sinks import Decision, Sink, SinkChange, Target
from laminar.node.transactions import decision_publisher
from laminar.node.transactions.coordinator import Coordinator, Part, Prepared
from laminar.node.transactions.participant import Batch as StagedBatch
from laminar.node.transactions.participant import Participant
from tests.node.alone import lone_partition
from tests.node.services import TOPIC, Services, exchange
from tests.node.trio import Member, send, trio
from tests.node.trio import batch as batch_of

SINK = b"s" * 16
PART = Part(topic="t", partition=0, stages=[0])
PINNED = Prepared(b"g" * 16, 1)


class Targets:
    """Prepares and publishes when the test lets them."""

    def __init__(self) -> None:
        self.prepares: list[asyncio.Future[Prepared]] = []
        self.published: list[int] = []
        self.may_publish = asyncio.Event()

    async def prepare(self, sink: bytes, number: int, epoch: int, part: Part) -> Prepared:
        self.prepares.append(asyncio.get_running_loop().create_future())
        return await self.prepares[-1]

    async def publish(self, sink: bytes, number: int, epoch: int, target: Target) -> None:
        await self.may_publish.wait()
        self.published.append(number)


class Spawned:
    """What runs beside; it ends with the test."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()

    def __call__(self, work: Coroutine[Any, Any, None]) -> object:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        return task


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while True:
            if condition():
                return
            await asyncio.sleep(0)


async def test_two_commits_of_one_batch_at_once_are_both_answered(tmp_path: Path) -> None:
    """The second cannot prepare what the first has published by then: that is no reason to refuse it."""
    async with lone_partition(tmp_path) as partition:
        targets = Targets()
        targets.may_publish.set()
        coordinator = Coordinator(partition, targets, spawn=Spawned())
        epoch = (await coordinator.begin(SINK, "s")).epoch
        first = asyncio.ensure_future(coordinator.commit(SINK, 0, epoch, [PART]))
        second = asyncio.ensure_future(coordinator.commit(SINK, 0, epoch, [PART]))
        await until(lambda: len(targets.prepares) == 2)
        targets.prepares[0].set_result(PINNED)
        assert await first
        targets.prepares[1].set_exception(Problem("already_committed", outcome="not_applied"))

        assert not await second
        assert [0] == targets.published


@pytest.mark.parametrize("when", ["later", "while it prepares"])
async def test_a_batch_of_another_fingerprint_is_not_taken_for_the_one_that_is_committed(
    tmp_path: Path, when: str
) -> None:
    """Whoever counts from an older state again has new records under an old number: that is said."""
    async with lone_partition(tmp_path) as partition:
        targets = Targets()
        targets.may_publish.set()
        coordinator = Coordinator(partition, targets, spawn=Spawned())
        epoch = (await coordinator.begin(SINK, "s")).epoch
        first = asyncio.ensure_future(coordinator.commit(SINK, 0, epoch, [PART], "one"))
        await until(lambda: len(targets.prepares) == 1)
        if when == "later":
            targets.prepares[0].set_result(PINNED)
            assert await first
        other = asyncio.ensure_future(coordinator.commit(SINK, 0, epoch, [PART], "other"))
        if when != "later":
            await until(lambda: len(targets.prepares) == 2)
            targets.prepares[0].set_result(PINNED)
            assert await first
            targets.prepares[1].set_exception(Problem("already_committed", outcome="not_applied"))

        with pytest.raises(Problem) as problem:
            await other
        assert ("other_batch", "one", "not_applied") == (
            problem.value.code,
            problem.value.limit,
            problem.value.outcome,
        )
        for same in ("one", ""):
            assert not await coordinator.commit(SINK, 0, epoch, [], same)
        assert [0] == targets.published


async def test_pitfall_41_an_epoch_that_began_while_targets_prepared_refuses_the_older_driver(
    tmp_path: Path,
) -> None:
    """It is checked again in the turn in which the decision is made; nothing of the batch is published."""
    async with lone_partition(tmp_path) as partition:
        targets = Targets()
        targets.may_publish.set()
        coordinator = Coordinator(partition, targets, spawn=Spawned())
        epoch = (await coordinator.begin(SINK, "s")).epoch
        commit = asyncio.ensure_future(coordinator.commit(SINK, 0, epoch, [PART]))
        await until(lambda: len(targets.prepares) == 1)
        newer = (await coordinator.begin(SINK, "s")).epoch
        targets.prepares[0].set_result(PINNED)

        with pytest.raises(Problem) as problem:
            await commit
        assert ("fenced", newer, "not_applied") == (
            problem.value.code,
            problem.value.limit,
            problem.value.outcome,
        )
        assert [] == targets.published and -1 == (await coordinator.status(SINK)).number


async def test_a_named_epoch_begins_once_and_only_as_the_next(tmp_path: Path) -> None:
    """Who asks again is told again, nobody else; once a later one began it is over."""
    async with lone_partition(tmp_path) as partition:
        coordinator = Coordinator(partition, Targets(), spawn=Spawned())

        for _ in range(2):
            assert 1 == (await coordinator.begin(SINK, "s", "one", epoch=1)).epoch
        with pytest.raises(Problem, match="the epoch of sink 's' is 1"):
            await coordinator.begin(SINK, "s", "other", epoch=1)
        assert 2 == (await coordinator.begin(SINK, "s")).epoch
        for epoch, code in ((1, "fenced"), (2, "fenced"), (4, "invalid")):
            with pytest.raises(Problem) as problem:
                await coordinator.begin(SINK, "s", "another", epoch=epoch)
            assert (code, 2) == (problem.value.code, problem.value.limit)
        assert 2 == (await coordinator.status(SINK)).epoch


async def test_what_a_newer_node_asks_for_is_not_taken_for_the_commit_of_an_empty_batch(
    tmp_path: Path,
) -> None:
    """Nodes are upgraded one after the other."""
    async with lone_partition(tmp_path) as partition:
        coordinator = Coordinator(partition, Targets(), spawn=Spawned())
        epoch = (await coordinator.begin(SINK, "s")).epoch

        newer = SinkRequest("_transactions", 0, "newer", SINK, epoch=epoch)
        with pytest.raises(Problem, match="knows no operation 'newer'"):
            await steps_of()._coordinate(coordinator, newer)
        assert -1 == (await coordinator.status(SINK)).number


async def test_the_next_batch_is_decided_when_the_one_before_is_published_everywhere(tmp_path: Path) -> None:
    """However early it was prepared."""
    async with lone_partition(tmp_path) as partition:
        targets = Targets()
        coordinator = Coordinator(partition, targets, spawn=Spawned())
        epoch = (await coordinator.begin(SINK, "s")).epoch
        first = asyncio.ensure_future(coordinator.commit(SINK, 0, epoch, [PART]))
        await until(lambda: len(targets.prepares) == 1)
        targets.prepares[0].set_result(PINNED)
        sinks_known = partition.state.sinks
        await until(lambda: (sink := sinks_known.committed_at(SINK)) is not None and sink.number == 0)
        second = asyncio.ensure_future(coordinator.commit(SINK, 1, epoch, [PART]))
        await until(lambda: len(targets.prepares) == 2)
        targets.prepares[1].set_result(PINNED)
        for _ in range(100):
            await asyncio.sleep(0)
        assert 0 == (await coordinator.status(SINK)).number
        targets.may_publish.set()
        await until(lambda: len(targets.prepares) == 3)
        targets.prepares[2].set_result(PINNED)

        assert await first and await second
        assert [0, 1] == targets.published


async def test_a_beginning_that_arrives_again_fences_nobody_who_began_by_it(tmp_path: Path) -> None:
    """Its answer was lost, or it was sent to two nodes: it is one beginning, now and after a restart."""
    async with lone_partition(tmp_path) as partition:
        coordinator = Coordinator(partition, Targets(), spawn=Spawned())
        first = await coordinator.begin(SINK, "s", "one")
        assert 1 == first.epoch == (await coordinator.begin(SINK, "s", "one")).epoch
        assert 2 == (await coordinator.begin(SINK, "s", "two")).epoch
        # Behind another's it is a beginning of its own: nobody goes on under an epoch that was fenced.
        assert 3 == (await coordinator.begin(SINK, "s", "one")).epoch
        name = await coordinator.take_name(b"n" * 16, "n", b"p" * 16, "three")
        again = await coordinator.take_name(b"n" * 16, "n", b"q" * 16, "three")
        assert (1, b"p" * 16) == (name.epoch, name.producer) == (again.epoch, again.producer)
    async with lone_partition(tmp_path) as partition:
        coordinator = Coordinator(partition, Targets(), spawn=Spawned())
        await until(lambda: partition.leads)
        assert 3 == (await coordinator.begin(SINK, "s", "one")).epoch
        assert 4 == (await coordinator.begin(SINK, "s")).epoch
        assert 5 == (await coordinator.begin(SINK, "s")).epoch


class Emptied(Targets):
    """One of its partitions has lost what it had prepared."""

    async def prepare(self, sink: bytes, number: int, epoch: int, part: Part) -> Prepared:
        return PINNED

    async def publish(self, sink: bytes, number: int, epoch: int, target: Target) -> None:
        self.published.append(number)
        if not self.may_publish.is_set():
            raise Problem("no_stage", "t/0 holds no prepared stages of this batch", outcome="not_applied")


async def test_a_batch_whose_stages_are_gone_everywhere_ends_in_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, and so does every later one: behind a batch that is not whole nothing is decided."""
    async with lone_partition(tmp_path) as partition:
        targets = Emptied()
        coordinator = Coordinator(partition, targets, spawn=Spawned())
        epoch = (await coordinator.begin(SINK, "s")).epoch
        for number, outcome in ((0, "unknown"), (0, "unknown"), (1, "not_applied")):
            with pytest.raises(Problem) as problem:
                await coordinator.commit(SINK, number, epoch, [PART])
            assert ("stages_lost", outcome) == (problem.value.code, problem.value.outcome)
            assert "batch 0" in problem.value.detail and "t/0" in problem.value.detail
        coordinator.finish_all()
        assert [0] == targets.published, "it is not tried without end"
        monkeypatch.setattr(decision_publisher, "LOST_RETRY_S", 0.0)
        targets.may_publish.set()  # its topic was deleted
        coordinator.finish_all()
        await until(lambda: not partition.state.sinks.undone())
        assert await coordinator.commit(SINK, 1, epoch, [PART])


async def test_the_log_of_the_coordinators_is_trimmed_and_what_they_know_is_not(tmp_path: Path) -> None:
    """Whole segments go as soon as they are sealed: epochs and decisions travel with the start."""
    many = tuple(Target("t" * 200, number, b"g" * 16) for number in range(200))
    async with lone_partition(tmp_path) as partition:
        coordinator = Coordinator(partition, Targets(), spawn=Spawned())
        epoch = (await coordinator.begin(SINK, "s", "one")).epoch
        retention = Retention(
            clock=Clock(),
            rules_of=lambda topic: Rules(retention_bytes=0),
            space_is_low=lambda: False,
            hold_ms=1_000,
        )
        number = 0
        while retention.moved == 0:
            decided = Sink("s", epoch, number, Decision(number, epoch, many), begun_by="one")
            await partition.appends.append_control(
                build_control(Kind.SINK, msgspec.msgpack.encode(SinkChange(SINK, decided)))
            )
            retention.check(partition)
            await asyncio.sleep(0)
            number += 1
            assert number < 1_000
        assert partition.log.start.index > 1
        known = await coordinator.status(SINK)
    async with lone_partition(tmp_path) as partition:
        coordinator = Coordinator(partition, Targets(), spawn=Spawned())
        await until(lambda: partition.leads)
        found = await coordinator.status(SINK)
        assert (known.epoch, known.number, known.undone) == (found.epoch, found.number, found.undone)
        assert epoch == (await coordinator.begin(SINK, "s", "one")).epoch


# -- the routes ----------------------------------------------------------------------------


def steps_of(services: Services | None = None, **others: Callable[[str, bytes], Awaitable[Any]]) -> SinkSteps:
    """On a shard that leads nothing, with what other shards answer it."""
    services, asking = services or Services(), exchange(**others)
    leaders = LeaderCall(services, Locator(services, asking))
    return SinkSteps(services, leaders, TopicLookup(services.view), Deliveries())


async def test_what_an_earlier_try_did_is_not_denied_when_no_leader_is_found_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A commit may have been decided by it: nobody knows, and the driver is told so."""
    monkeypatch.setattr(steps, "SINK_STEP", replace(SINK_STEP, election_wait_s=0.05))
    tries = 0

    async def leader(node: str, payload: bytes) -> str:
        return "" if tries else "x"

    async def ask(node: str, payload: bytes) -> Any:
        nonlocal tries
        tries += 1
        raise Problem("outcome_unknown")

    asked = steps_of(Services(elsewhere=["x"]), leader=leader, sinks=ask)
    with pytest.raises(Problem) as problem:
        await asked.at_leader(SinkRequest(TOPIC, 0, "commit", SINK), object)
    assert 1 == tries
    assert ("no_leader", "unknown") == (problem.value.code, problem.value.outcome)


async def test_a_publish_is_not_over_because_another_group_of_that_name_is_led_here(tmp_path: Path) -> None:
    """It may be one that was deleted and is not gone yet, while the one that is meant waits elsewhere."""
    async with lone_partition(tmp_path) as partition:
        with pytest.raises(Problem) as problem:
            await steps_of()._do(partition, PublishRequest("t", 0, SINK, 0, 1, b"another group..."))
        assert ("not_leader", "not_applied") == (problem.value.code, problem.value.outcome)


async def test_a_partition_is_taken_for_deleted_by_an_up_to_date_view_only() -> None:
    """A node that has not heard of a topic yet must not take it for one that is no more."""

    async def refresh_view() -> None:
        raise Problem("no_leader", "this node has not heard yet", outcome="not_applied")

    with pytest.raises(Problem):
        await steps_of(Services(refresh=refresh_view)).publish(SINK, 0, 1, Target("t", 0, b"g" * 16))


async def test_a_prepare_is_answered_when_a_majority_holds_it() -> None:
    """Before that it may be lost with its leader, and what it promised to keep with it."""
    async with trio() as cluster:
        leader = await cluster.leader()
        frame = build([b"x"])
        batch = StagedBatch(sink=SINK, number=0, epoch=1)
        await Participant(leader.partition).stage(batch, 0, frame, Header.unpack(frame))
        cluster.cut_off(leader.node)

        asked = steps_of()._do(leader.partition, PrepareRequest("t", 0, SINK, 0, 1, [0]))
        prepared = asyncio.ensure_future(asked)
        await cluster.until(
            lambda: (held := leader.partition.state.stages.batch(batch.key)) is None or held.prepared,
            what="the prepare in the leader's log",
        )
        assert not prepared.done()
        cluster.heal()
        with contextlib.suppress(Problem):
            await prepared


async def test_nothing_is_published_before_the_decision_is_committed() -> None:
    """The periodic `finish_all` also meets a decision that no majority holds yet, and that may be lost."""
    async with trio() as cluster:
        leader = await cluster.leader()
        targets = Targets()
        targets.may_publish.set()
        coordinator = Coordinator(leader.partition, targets, spawn=Spawned())
        epoch = (await coordinator.begin(SINK, "s")).epoch
        cluster.cut_off(leader.node)
        commit = asyncio.ensure_future(coordinator.commit(SINK, 0, epoch, [PART]))
        await until(lambda: len(targets.prepares) == 1)
        targets.prepares[0].set_result(PINNED)
        sinks_known = leader.partition.state.sinks
        await until(lambda: (sink := sinks_known.get(SINK)) is not None and sink.undone is not None)

        coordinator.finish_all()
        for _ in range(100):
            await asyncio.sleep(0)

        assert [] == targets.published
        cluster.heal()
        with contextlib.suppress(Problem):
            await commit
            assert [0] == targets.published


async def test_what_a_deposed_leader_took_is_rolled_back() -> None:
    """Stages and decisions that were never committed leave nothing in its tables."""
    async with trio() as cluster:
        old = await cluster.leader()
        cluster.cut_off(old.node)
        frame = build([b"x"])
        batch = StagedBatch(sink=SINK, number=0, epoch=1)
        lost = [
            Participant(old.partition).stage(batch, 0, frame, Header.unpack(frame)),
            old.partition.appends.append_control(
                build_control(Kind.SINK, msgspec.msgpack.encode(SinkChange(SINK, Sink("s", 1))))
            ),
        ]
        others = [member.node for member in cluster.followers(old)]
        new = await cluster.leader(among=others)
        await send(new, batch_of(0, b"other"))
        assert len(old.partition.state.stages) == len(old.partition.state.sinks) == 1
        cluster.heal()
        await cluster.settled()

        for future in lost:
            with pytest.raises(Problem):
                await future
        assert not old.partition.state.stages and not old.partition.state.sinks
        cluster.check_equal()


async def test_a_commit_is_answered_when_all_have_published_and_the_next_leader_records_its_end() -> None:
    """The entry that records it may be lost with its leader: all is published again and nothing changes."""
    async with trio() as cluster:
        old = await cluster.leader()
        targets = Targets()
        coordinator = Coordinator(old.partition, targets, spawn=Spawned())
        epoch = (await coordinator.begin(SINK, "s")).epoch
        commit = asyncio.ensure_future(coordinator.commit(SINK, 0, epoch, [PART]))
        await until(lambda: len(targets.prepares) == 1)
        targets.prepares[0].set_result(PINNED)
        await until(lambda: bool(old.partition.state.sinks.undone()) and _decision_of(old) is not None)
        cluster.cut_off(old.node)
        targets.may_publish.set()

        assert await commit
        assert _decision_of(old) is not None, "the end is recorded, and the test shows nothing"

        new = await cluster.leader(among=[member.node for member in cluster.followers(old)])
        later = Coordinator(new.partition, targets, spawn=Spawned())
        later.finish_all()
        await until(lambda: _decision_of(new) is None)
        assert [0, 0] == targets.published
        assert (0, None) == ((known := await later.status(SINK)).number, known.undone)
        cluster.heal()


def _decision_of(member: Member) -> Decision | None:
    """The decision that a member's table of what is committed has as not published everywhere."""
    known = member.partition.state.sinks.committed_at(SINK)
    return known.undone if known is not None else None
