"""Sinks that write one batch and are never heard of again: forgotten in time, and nothing is lost by it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.batch import Header, Kind, build, build_control, stamp
from laminar.http.api.problems import Problem
from laminar.node.api.transactions import abandoned_stages as leftovers
from laminar.node.api.transactions.abandoned_stages import (
    OPEN_AGE_MS,
    STAGE_AGE_MS,
    AbandonedStages,
    Coordinators,
)
from laminar.node.partition.partition import Partition
from laminar.node.partition.state import sinks as module
from laminar.node.partition.state.sinks import (
    FIRST_ONCE_EPOCH,
    ONCE_MS,
    Decision,
    Deletion,
    Sink,
    SinkChange,
    Sinks,
    Target,
)
from laminar.node.transactions.coordinator import Coordinator, Part, Prepared
from laminar.node.transactions.participant import Batch, Participant
from tests.node.alone import lone_partition
from tests.node.services import Services, Stopped
from tests.node.trio import trio

UNDONE = Decision(0, 1, (Target("t", 0, b"g" * 16),))


class Log:
    """A coordinator's entries, and the table that follows from them."""

    def __init__(self) -> None:
        self.table = Sinks()
        self.entries: list[tuple[bytes, Sink, int]] = []

    def put(self, name: str, time_ms: int, **fields: Any) -> None:
        sink = Sink(name, **({"epoch": 1, "once": True} | fields))
        self.append(name.encode().ljust(16), sink, time_ms)

    def append(self, sink_id: bytes, sink: Sink, time_ms: int) -> None:
        self.entries.append((sink_id, sink, time_ms))
        tell(self.table, len(self.entries), sink_id, sink, time_ms)

    def truncate(self, index: int) -> None:
        del self.entries[index - 1 :]
        self.table.truncated(index)

    @property
    def names(self) -> str:
        return " ".join(sorted(entry.sink.name for entry in self.table.stored()))


def tell(table: Sinks, index: int, sink_id: bytes, sink: Sink, time_ms: int) -> None:
    frame = build_control(Kind.SINK, msgspec.msgpack.encode(SinkChange(sink_id, sink)))
    stamp(frame, index=index, term=1, prev_term=1, base_offset=0, append_time_ms=time_ms, committed_index=0)
    table.appended(Header.unpack(frame), frame)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Of a coordinator that keeps two of them, and each for a second."""
    monkeypatch.setattr(module, "MAX_ONCE", 2)
    monkeypatch.setattr(module, "ONCE_MS", 1_000)
    return Log()


def test_of_too_many_the_oldest_are_forgotten_but_none_before_its_time(log: Log) -> None:
    """What a sink is kept for begins with its last change; a table that grew meanwhile shrinks again."""
    for time_ms, name in enumerate("abcdef"):
        log.put(name, time_ms)
    log.put("a", 500)
    assert "a b c d e f" == log.names, "all are young"
    log.put("g", 1_002)
    assert "a d e f g" == log.names, "two at a time"
    log.put("h", 1_002)
    assert "a d e f g h" == log.names, "the next is 999 ms old"
    log.put("i", 2_000)
    assert "a f g h i" == log.names
    for time_ms, name in ((1_000_000, "j"), (1_000_001, "k"), (1_000_002, "l")):
        log.put(name, time_ms)
    assert "j k l" == log.names, "as few as there may be, and those that are young"


def test_what_is_kept_is_forgotten_by_nobody(log: Log) -> None:
    """A name of somebody's choosing; a decision that is not published; one that was begun without."""
    log.put("chosen", 0, once=False)
    log.put("undone", 1, number=0, undone=UNDONE)
    log.put("later", 2)
    log.put("later", 3, once=False)
    log.put("producer", 4, once=False, producer=b"p" * 16)
    for time_ms in range(10_000, 100_000, 10_000):
        log.put(f"x{time_ms}", time_ms, number=0)
    assert "chosen later producer undone x80000 x90000" == log.names

    log.put("undone", 100_000, number=0)
    log.put("y", 100_999, number=0)
    assert "chosen later producer undone x90000 y" != log.names, "it was published just now"
    log.put("z", 101_000, number=0)
    assert "chosen later producer y z" == log.names, "a second after it was"


def test_one_whose_batch_takes_long_is_not_forgotten_for_others_that_come_and_go(log: Log) -> None:
    """Of those that have not committed there is a bound of their own."""
    log.put("backfill", 0)
    for time_ms in range(10_000, 100_000, 10_000):
        log.put("short", time_ms)
        log.put(f"x{time_ms}", time_ms, number=0)
        log.put("short", time_ms, number=0)
    assert "backfill short x90000" == log.names
    log.put("y", 100_000)
    log.put("z", 101_000)
    assert "short x90000 y z" == log.names, "but for as many that never did"


def test_lasting_ones_forget_nothing(log: Log) -> None:
    """What comes of a table's being too large is done where it grows."""
    for name in "abcd":
        log.put(name, 0)
    log.put("chosen", 10_000, once=False)
    assert "a b c chosen d" == log.names


@pytest.mark.parametrize("seed", range(20))
def test_replicas_forget_the_same_by_whatever_way_they_got_there(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """One that had its log cut again and again, one that replays it, one that began with a stored table."""
    monkeypatch.setattr(module, "MAX_ONCE", 4)
    monkeypatch.setattr(module, "MAX_NAMES", 3)
    monkeypatch.setattr(module, "ONCE_MS", 50)
    rng = random.Random(seed)
    log, now_ms, committed, forgotten = Log(), 0, 0, 0
    for step in range(600):
        now_ms += rng.choice((0, 0, 1, 5, 30))
        kind = rng.randrange(10)
        if kind == 0 and len(log.entries) > committed:
            log.truncate(rng.randrange(committed, len(log.entries)) + 1)
        elif kind == 1:
            committed = rng.randrange(committed, len(log.entries) + 1)
            log.table.committed(committed)
        elif kind < 4:
            log.put(f"name {rng.randrange(8)}", now_ms, once=False, producer=b"p" * 16)
        else:
            undone = UNDONE if rng.random() < 0.2 else None
            deletion = rng.choice([*[Deletion.NONE] * 8, Deletion.BEGUN, Deletion.DONE])
            name, once = f"sink {rng.randrange(40)}", rng.random() < 0.9
            epoch = {"epoch": rng.randrange(1, 100)} if rng.random() < 0.5 else {}
            undone = None if deletion else undone
            log.put(name, now_ms, once=once, undone=undone, deletion=deletion, **epoch)
        assert sum(1 for entry in log.table.stored() if entry.sink.producer) <= 3
        if step % 20:
            continue
        replayed = Sinks()
        for index, entry in enumerate(log.entries, 1):
            tell(replayed, index, *entry)
            if index == committed:
                # A replica that is behind, or was told what there was before.
                assert replayed.stored() == log.table.stored_at(committed)
                assert replayed.floor == log.table.floor_at(committed)
                started = Sinks()
                started.restore(replayed.stored(), replayed.floor)
            if index > committed > 0:
                tell(started, index, *entry)
        assert replayed.stored() == log.table.stored() == log.table.stored_at(len(log.entries))
        assert replayed.floor == log.table.floor == log.table.floor_at(len(log.entries))
        if committed:
            assert (replayed.stored(), replayed.floor) == (started.stored(), started.floor)
        forgotten += len({entry[0] for entry in log.entries}) - len(log.table)
    assert forgotten > 0


# -- the coordinator -----------------------------------------------------------------------


class Targets:
    """Prepares and publishes at once, in the partition that is the coordinator's own."""

    def __init__(self, partition: Partition) -> None:
        self.staging = Participant(partition)
        self.asked = 0

    async def prepare(self, sink: bytes, number: int, epoch: int, part: Part) -> Prepared:
        self.asked += 1
        batch = Batch(sink=sink, number=number, epoch=epoch)
        preparing = self.staging.prepare(batch, part.stages)
        prepare = self.staging.prepare_index_of(batch)
        await preparing
        return Prepared(b"g" * 16, prepare)

    async def publish(self, sink: bytes, number: int, epoch: int, target: Target) -> None:
        await self.staging.publish(Batch(sink=sink, number=number, epoch=epoch), target.prepare_index)


PART = Part(topic="t", partition=0, stages=[0])
SINK = b"s" * 16


def coordinator_of(partition: Partition) -> tuple[Coordinator, Targets]:
    targets = Targets(partition)
    return Coordinator(partition, targets, spawn=asyncio.ensure_future), targets


async def stage(partition: Partition, epoch: int, *, sink: bytes = SINK, number: int = 0) -> Batch:
    batch = Batch(sink=sink, number=number, epoch=epoch)
    frame = build([b"x"])
    await Participant(partition).stage(batch, 0, frame, Header.unpack(frame))
    return batch


async def forget(coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that may be."""
    monkeypatch.setattr(module, "MAX_ONCE", 0)
    monkeypatch.setattr(module, "ONCE_MS", -1)
    # Behind the sink also when all of it is done within a millisecond.
    for other in (b"x" * 16, b"y" * 16):
        await coordinator.begin(other, "other", once=True)
    monkeypatch.setattr(module, "MAX_ONCE", 10_000)


async def refused(coordinator: Coordinator, epoch: int) -> tuple[str, str, int]:
    """Why batch 0 under this epoch is not committed; it was staged, so nothing else is in its way."""
    with pytest.raises(Problem) as problem:
        await coordinator.commit(SINK, 0, epoch, [PART])
    assert (problem.value.field, problem.value.value) == ("epoch", epoch)
    return problem.value.code, problem.value.outcome, problem.value.status


async def test_a_name_that_anybody_begins_to_last_does_so_from_then_on(tmp_path: Path) -> None:
    """Before and after a restart."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        first = await coordinator.begin(SINK, "s", "one", once=True)
        assert first.once and FIRST_ONCE_EPOCH < first.epoch == first.first
        assert first.epoch == (await coordinator.begin(SINK, "s", "one", once=True)).epoch
        again = await coordinator.begin(SINK, "s", once=True)
        assert (first.epoch + 1, first.epoch, True) == (again.epoch, again.first, again.once)
        assert not (await coordinator.begin(SINK, "s")).once
        assert not (await coordinator.begin(SINK, "s", once=True)).once
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        assert not (await coordinator.begin(SINK, "s", once=True)).once
        assert first.epoch + 4 == (await coordinator.status(SINK)).epoch
        lasting = await coordinator.begin(b"l" * 16, "lasting")
        assert (1, False) == (lasting.epoch, (await coordinator.begin(b"l" * 16, "lasting", once=True)).once)


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("then", ["nothing", "once", "lasting"])
async def test_a_commit_for_a_sink_that_was_forgotten_decides_nothing_and_denies_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool, then: str
) -> None:
    """Its batch may have been committed or not, whoever has begun that name anew: no epoch comes twice."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, targets = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s", once=True)).epoch
        await stage(partition, epoch)
        if committed:
            assert await coordinator.commit(SINK, 0, epoch, [PART])
        asked = targets.asked
        await forget(coordinator, monkeypatch)
        assert Sink("") == await coordinator.status(SINK)
        anew = 0
        if then != "nothing":
            anew = (await coordinator.begin(SINK, "s", once=then == "once")).epoch
            assert (anew > epoch) if then == "once" else (anew == 1)

        assert ("no_such_sink", "unknown", 404) == await refused(coordinator, epoch)
        assert asked == targets.asked and committed == (partition.end_offset == 1)
        code, outcome, _ = await refused(coordinator, 7)
        assert ("fenced" if then == "once" else "invalid", "not_applied") == (code, outcome), "never told"
        if then != "nothing" and not committed:
            await stage(partition, anew)
            assert await coordinator.commit(SINK, 0, anew, [PART])
            assert 1 == partition.end_offset


async def test_a_newer_driver_of_one_that_is_known_fences_as_ever(tmp_path: Path) -> None:
    """Then nothing is in doubt."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s", once=True)).epoch
        await stage(partition, epoch)
        await coordinator.begin(SINK, "s", once=True)
        assert ("fenced", "not_applied", 409) == await refused(coordinator, epoch)


# -- what is left of them in partitions --------------------------------------------------------


def janitor(
    partition: Partition, coordinator: Coordinators, *, age_ms: int, disk_is_low: bool = False
) -> AbandonedStages:
    """Of this partition, when so much time has passed."""
    services = Services(clock=Stopped(partition.log.last_append_time_ms + age_ms))
    services.space.low = disk_is_low
    return AbandonedStages(services, coordinator)


async def prepared(partition: Partition, epoch: int) -> Batch:
    batch = await stage(partition, epoch)
    await Participant(partition).prepare(batch, [0])
    return batch


async def test_what_was_prepared_and_never_decided_goes_when_it_can_be_decided_no_more(
    tmp_path: Path,
) -> None:
    """Its driver and coordinator went down in between. He comes late, and is refused.

    Also while the disk is full, as this makes room.
    """
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, targets = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s", once=True)).epoch
        batch = await prepared(partition, epoch)
        await janitor(partition, coordinator, age_ms=STAGE_AGE_MS + 60_000).clean(partition)
        assert partition.state.stages.batch(batch.key) is not None, "its driver may be about to"
        assert epoch == (await coordinator.status(SINK)).epoch

        partition.appends.refusal = lambda: Problem("disk_full", outcome="not_applied")
        await janitor(partition, coordinator, age_ms=ONCE_MS + 60_000).clean(partition)
        assert not partition.state.stages
        assert ("fenced", "not_applied", 409) == await refused(coordinator, epoch)
        known = await coordinator.status(SINK)
        assert (True, -1, "s") == (known.once, known.number, known.name)
        assert targets.asked == 0 == partition.end_offset


async def test_what_was_prepared_late_for_a_sink_that_was_deleted_and_forgotten_goes(tmp_path: Path) -> None:
    """It was to be kept, so its epoch is none of one that writes once; no newer one would ever come."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        await prepared(partition, 3)
        await janitor(partition, coordinator, age_ms=STAGE_AGE_MS + 60_000).clean(partition)
        assert partition.state.stages.prepared

        await janitor(partition, coordinator, age_ms=ONCE_MS + 60_000).clean(partition)
        assert not partition.state.stages
        assert ("fenced", "not_applied", 409) == await refused(coordinator, 3)


async def test_no_batch_is_decided_for_a_sink_that_never_began(tmp_path: Path) -> None:
    """Its epoch is 0, which nobody begins."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, targets = coordinator_of(partition)
        await stage(partition, 0)
        assert ("invalid", "not_applied", 422) == await refused(coordinator, 0)
        assert (0, 0) == (targets.asked, len(partition.state.sinks))


@pytest.mark.parametrize("then", ["nothing", "once", "lasting"])
async def test_what_a_forgotten_sink_had_prepared_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Whether its name was begun anew or not: what is staged then is another's, and stays."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s", once=True)).epoch
        batch = await prepared(partition, epoch)
        await forget(coordinator, monkeypatch)
        anew = None
        if then != "nothing":
            anew = await prepared(partition, (await coordinator.begin(SINK, "s", once=then == "once")).epoch)

        age_ms = STAGE_AGE_MS if anew is not None else ONCE_MS
        await janitor(partition, coordinator, age_ms=age_ms + 60_000).clean(partition)
        assert partition.state.stages.batch(batch.key) is None
        assert ("no_such_sink", "unknown", 404) == await refused(coordinator, epoch)
        if anew is not None:
            assert await coordinator.commit(SINK, 0, anew.epoch, [PART])


@pytest.mark.parametrize("once", [True, False])
async def test_what_was_decided_or_may_be_stays_for_ever(tmp_path: Path, once: bool) -> None:
    """A decision that waits to be published, and a sink that goes on."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        begun = await coordinator.begin(SINK, "s", once=once)
        batch = await prepared(partition, begun.epoch)
        if once:
            decision = Decision(0, begun.epoch, (Target("t", 0, partition.replica.group),))
            await coordinator._sinks.change(SINK, msgspec.structs.replace(begun, number=0, undone=decision))
        await janitor(partition, coordinator, age_ms=100 * ONCE_MS).clean(partition)
        assert partition.state.stages.batch(batch.key) is not None
        assert begun.epoch == (await coordinator.status(SINK)).epoch
        if once:
            coordinator.finish_all()
            assert not await coordinator.commit(SINK, 0, begun.epoch, [PART])
        else:
            assert await coordinator.commit(SINK, 0, begun.epoch, [PART])
        assert 1 == partition.end_offset


async def test_a_write_that_takes_hours_commits(tmp_path: Path) -> None:
    """Some partitions had their last stage long before the end; its driver is the newest, so it is open."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s")).epoch
        batch = await stage(partition, epoch)
        # As a stream's tasks do: under the next epoch, which their driver begins when he commits.
        first = await stage(partition, 1, sink=b"q" * 16)
        for hours in range(2, 24):
            await janitor(partition, coordinator, age_ms=hours * STAGE_AGE_MS).clean(partition)
        assert {batch.key, first.key} == {key for key, _ in partition.state.stages.batches()}
        assert await coordinator.commit(SINK, 0, epoch, [PART])


async def test_what_a_long_write_prepares_at_its_end_is_not_taken_from_it(tmp_path: Path) -> None:
    """A prepare's age counts from the prepare: old stages do not say that their driver is gone."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s", once=True)).epoch
        batch = await stage(partition, epoch)
        prepared_ms = partition.log.last_append_time_ms + ONCE_MS + 60_000
        partition.replica.wall_ms = lambda: prepared_ms
        await Participant(partition).prepare(batch, [0])
        assert prepared_ms == partition.log.last_append_time_ms
        await janitor(partition, coordinator, age_ms=STAGE_AGE_MS // 2).clean(partition)
        assert await coordinator.commit(SINK, 0, epoch, [PART])


@pytest.mark.parametrize("why", ["a newer driver", "a later batch", "a day", "the disk is nearly full"])
async def test_what_is_staged_goes_when_its_write_is_over_and_in_a_day_at_the_latest(
    tmp_path: Path, why: str
) -> None:
    """So what a client stages, and never commits, keeps the log's start for a bounded time."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s")).epoch
        batch = await stage(partition, epoch)
        if why == "a newer driver":
            await coordinator.begin(SINK, "s")
        elif why == "a later batch":
            await stage(partition, epoch, number=1)
            decision = Decision(1, epoch, (Target("elsewhere", 0, b"e" * 16),))
            known = await coordinator.status(SINK)
            await coordinator._sinks.change(SINK, msgspec.structs.replace(known, number=1, undone=decision))
        before, then = STAGE_AGE_MS - 60_000, STAGE_AGE_MS + 60_000
        if why == "a day":
            before, then = OPEN_AGE_MS - 60_000, OPEN_AGE_MS + 60_000
            # That it goes on staging does not matter.
            frame = build([b"later"])
            await Participant(partition).stage(batch, 1, frame, Header.unpack(frame))
        low = why == "the disk is nearly full"
        await janitor(partition, coordinator, age_ms=before, disk_is_low=low).clean(partition)
        assert partition.state.stages.batch(batch.key) is not None

        await janitor(partition, coordinator, age_ms=then, disk_is_low=low).clean(partition)
        assert partition.state.stages.batch(batch.key) is None


async def test_a_sink_is_asked_for_once_in_a_look_whatever_it_has_staged(tmp_path: Path) -> None:
    """A job of hours over thousands of partitions would else ask its coordinator for each of them."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        asked: list[bytes] = []

        class Counting:
            end = coordinator.end
            over = coordinator.over

            async def status(self, sink: bytes, /) -> Sink:
                asked.append(sink)
                return await coordinator.status(sink)

        for number in range(3):
            await stage(partition, 1, number=number)
        cleaner = janitor(partition, Counting(), age_ms=2 * STAGE_AGE_MS)
        for _ in range(3):
            await cleaner.clean(partition)
        assert [SINK] == asked and 3 == len(partition.state.stages)


class Away:
    """Coordinators that cannot be asked."""

    def __init__(self) -> None:
        self.waiting = 0
        self.most = 0

    async def status(self, sink: bytes, /) -> Sink:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0)
        self.waiting -= 1
        raise Problem("no_leader", "away", outcome="not_applied")

    async def end(self, sink: bytes, epoch: int, /) -> Sink:
        raise Problem("no_leader", "away", outcome="not_applied")

    async def over(self, sinks: Sequence[bytes], /) -> list[bytes]:
        return []


async def test_while_no_coordinator_answers_what_is_staged_stays_for_a_day_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is prepared stays for ever. A crowd of sinks is not asked for all at once."""
    monkeypatch.setattr(leftovers, "ASKED_AT_ONCE", 2)
    async with lone_partition(tmp_path) as partition:
        away = Away()
        for number in range(5):
            await stage(partition, 1, sink=b"%d" % number * 16)
        kept = await prepared(partition, 2)
        await janitor(partition, away, age_ms=OPEN_AGE_MS - 60_000).clean(partition)
        assert (6, 2) == (len(partition.state.stages), away.most)

        await janitor(partition, away, age_ms=OPEN_AGE_MS + 60_000).clean(partition)
        assert [kept.key] == [key for key, _ in partition.state.stages.batches()]


async def test_a_batch_that_is_decided_while_the_janitor_asks_is_not_ended(tmp_path: Path) -> None:
    """What it heard before is not what it acts by; the same of one that another epoch is in force for."""
    async with lone_partition(tmp_path) as partition:
        await partition.reader.confirmed_end()
        coordinator, _ = coordinator_of(partition)
        epoch = (await coordinator.begin(SINK, "s", once=True)).epoch
        await prepared(partition, epoch)
        assert (await coordinator.status(SINK)).number < 0
        assert await coordinator.commit(SINK, 0, epoch, [PART])
        known = await coordinator.end(SINK, epoch)
        assert (epoch, 0) == (known.epoch, known.number)
        newer = (await coordinator.begin(SINK, "s", once=True)).epoch
        assert newer == (await coordinator.end(SINK, epoch)).epoch
        lasting = (await coordinator.begin(b"l" * 16, "lasting")).epoch
        assert lasting == (await coordinator.end(b"l" * 16, lasting)).epoch


async def test_a_leader_that_was_deposed_ends_nothing() -> None:
    """It has not heard that the sink began, and so must not say that it is over."""
    async with trio() as cluster:
        old = await cluster.leader()
        cluster.cut_off(old.node)
        new = await cluster.leader(among=[member.node for member in cluster.followers(old)])
        coordinator, _ = coordinator_of(new.partition)
        epoch = (await coordinator.begin(SINK, "s", once=True)).epoch
        deposed, _ = coordinator_of(old.partition)
        asked = asyncio.ensure_future(deposed.end(SINK, epoch))
        heard = asyncio.ensure_future(deposed.status(SINK))
        assert epoch == (await coordinator.begin(SINK, "s", once=True)).epoch - 1
        assert not asked.done() or asked.exception() is not None
        assert not heard.done() or heard.exception() is not None
        cluster.heal()
        for answer in (asked, heard):
            with pytest.raises(Problem):
                await answer
        await cluster.settled()
        assert epoch + 1 == (await coordinator.status(SINK)).epoch
        cluster.check_equal()
