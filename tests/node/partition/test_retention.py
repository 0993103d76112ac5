"""What is given up, when, and that all replicas give up the same."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import Batch, Header, Kind
from laminar.http.api.problems import Problem
from laminar.log import StorageSettings
from laminar.log.disk.errors import StorageError
from laminar.log.partition_log.log import Log
from laminar.node.host.clock import Clock
from laminar.node.partition.partition import Partition
from laminar.node.partition.retention import Retention, Rules, expired_ends
from tests.node.alone import lone_partition
from tests.node.trio import Member, Trio, batch, send, trio

HOUR_MS = 3_600_000
BIG = b"x" * 20_000

sealed_logs = st.lists(st.tuples(st.integers(1, 5), st.integers(0, 50), st.integers(1, 100)), max_size=8)


class At(Clock):
    """Clocks that a test sets."""

    __slots__ = ("monotonic", "wall")

    def __init__(self) -> None:
        self.wall = 0
        self.monotonic = 0

    def wall_ms(self) -> int:
        return self.wall

    def monotonic_ms(self) -> int:
        return self.monotonic


def keeper(clock: Clock, rules: Rules, *, low: bool = False, hold_ms: int = HOUR_MS) -> Retention:
    return Retention(clock=clock, rules_of=lambda topic: rules, space_is_low=lambda: low, hold_ms=hold_ms)


# -- the decision ----------------------------------------------------------------------------


@given(sealed_logs, st.none() | st.integers(1, 60), st.none() | st.integers(0, 300), st.integers(0, 120))
def test_what_expires_is_a_prefix_that_the_rules_do_not_keep(
    steps: list[tuple[int, int, int]], age_ms: int | None, size: int | None, now_ms: int
) -> None:
    """The first segment kept is young enough and, with all behind it, small enough; those before were not."""
    sealed: list[tuple[int, int, int]] = []
    index = time_ms = 0
    for entries, later_ms, size_bytes in steps:
        index, time_ms = index + entries, time_ms + later_ms
        sealed.append((index, time_ms, size_bytes))

    ends = expired_ends(sealed, Rules(age_ms, size), now_ms=now_ms)

    assert ends == [last for last, _, _ in sealed[: len(ends)]]
    for place, (_, last_ms, _) in enumerate(sealed):
        old = age_ms is not None and now_ms - last_ms > age_ms
        much = size is not None and sum(each[2] for each in sealed[place:]) > size
        if place < len(ends):
            assert old or much
        elif place == len(ends):
            assert not old and not much
    if age_ms is None and size is None:
        assert ends == []


def test_age_counts_from_the_last_batch_of_a_segment() -> None:
    """One old batch in a segment of young ones does not take them along; its age alone is not enough."""
    assert [] == expired_ends([(10, 1000, 5)], Rules(retention_ms=100), now_ms=1100)
    assert [10] == expired_ends([(10, 1000, 5)], Rules(retention_ms=100), now_ms=1101)


def test_size_counts_sealed_segments_only() -> None:
    """As many of the newest as fit; none at all with a bound of 0."""
    sealed = [(1, 0, 40), (2, 0, 40), (3, 0, 40)]
    assert [1] == expired_ends(sealed, Rules(retention_bytes=80), now_ms=0)
    assert [1, 2] == expired_ends(sealed, Rules(retention_bytes=79), now_ms=0)
    assert [1, 2, 3] == expired_ends(sealed, Rules(retention_bytes=0), now_ms=0)


# -- one replica -----------------------------------------------------------------------------


# One segment holds all that a test appends.
LARGE = StorageSettings(segment_size_bytes=1 << 30)


async def fill(partition: Partition, batches: int, *, first: int = 0) -> None:
    """Batches of one producer, of 300 kB each: a segment of the lone partition holds four."""
    for number in range(first, first + batches):
        frame = batch(number, b"%d" % number, b"x" * 300_000)
        await partition.appends.append_frame(frame, Header.unpack(frame))


async def test_records_given_up_are_gone_and_what_they_led_to_is_not(tmp_path: Path) -> None:
    """Offsets go on, retries are recognised, cursors stand where they stood: now and after a restart."""
    async with lone_partition(tmp_path) as partition:
        await fill(partition, 12)
        await partition.cursor_commands.set("billing", 3, expected=None, check=False, owner="me", now_ms=5)
        before = partition.log.size_bytes
        producers = partition.producers.stored()
        await partition.context.driver._storage.sync()
        await partition.context.driver._storage.checkpoint()  # all entries are in their segments now
        files = {path.name for path in (tmp_path / "logs").rglob("*.log")}

        await partition.start_mover.propose(await partition.start_mover.index_before(17))

        assert 16 == partition.start_offset, "rounded down to the border of a batch"
        assert partition.log.size_bytes < before
        with pytest.raises(Problem) as gone:
            await partition.reader.frames(15, max_bytes=1)
        assert ("offset_expired", 15, 16) == (gone.value.code, gone.value.value, gone.value.limit)
        assert b"8" == bytes(Batch((await partition.reader.frames(16, max_bytes=1))[0]).values[0])
        await partition.context.driver._storage.sync()
        await partition.context.driver._storage.checkpoint()
        left = {path.name for path in (tmp_path / "logs").rglob("*.log")}
        assert 2 == len(files - left), "whole segments before the start are removed"

    async with lone_partition(tmp_path) as partition:
        await partition.reader.wait_past(23, 60.0)
        assert (16, 24) == (partition.start_offset, partition.end_offset)
        assert producers == partition.producers.stored()
        cursor = partition.cursor_commands.get("billing")
        assert cursor is not None and (3, 5, "me") == (cursor.position, cursor.changed_ms, cursor.owner)
        retried = batch(2, b"2", b"x" * 300_000)
        assert 4 == (await partition.appends.append_frame(retried, Header.unpack(retried))).offset
        await fill(partition, 1, first=12)
        assert 26 == partition.end_offset
        # Once more: what the second entry carries is no less than what the first one did.
        await partition.start_mover.propose(partition.committed_index)
        assert partition.start_offset == partition.end_offset == 26

    async with lone_partition(tmp_path) as partition:
        assert 26 == partition.start_offset
        await fill(partition, 1, first=13)
        assert 28 == partition.end_offset


async def test_a_start_after_everything_takes_the_segment_that_is_written_to(tmp_path: Path) -> None:
    """The entry that says so opens a new one: room is made at once, and after a restart all is as it was."""
    async with lone_partition(tmp_path, settings=LARGE) as partition:
        await fill(partition, 4)
        await partition.cursor_commands.set("billing", 3, expected=None, check=False, owner="me", now_ms=5)
        last = partition.committed_index

        await partition.start_mover.propose(last)

        assert [last + 1] == partition.log.segment_first_indexes
        assert partition.log.size_bytes < 10_000
        await partition.context.driver._storage.sync()
        await partition.context.driver._storage.checkpoint()
        assert [f"{last + 1:020d}.log"] == [path.name for path in (tmp_path / "logs").rglob("*.log")]

    async with lone_partition(tmp_path, settings=LARGE) as partition:
        await partition.reader.wait_past(7, 60.0)
        assert (8, 8) == (partition.start_offset, partition.end_offset)
        cursor = partition.cursor_commands.get("billing")
        assert cursor is not None and (3, 5, "me") == (cursor.position, cursor.changed_ms, cursor.owner)
        retried = batch(2, b"2", b"x" * 300_000)
        assert 4 == (await partition.appends.append_frame(retried, Header.unpack(retried))).offset
        await fill(partition, 1, first=4)
        assert 10 == partition.end_offset


async def test_a_start_in_the_segment_that_is_written_to_ends_it(tmp_path: Path) -> None:
    """What follows the start stays; all of it goes with the next start. Not where little is given up: who
    trims often would have a file for each time.
    """
    async with lone_partition(tmp_path, settings=LARGE) as partition:
        await fill(partition, 2)
        first = partition.log.segment_first_indexes

        await partition.start_mover.propose(await partition.start_mover.index_before(2))
        assert first == partition.log.segment_first_indexes, "what is small is not worth a segment"
        await fill(partition, 3, first=2)
        kept = partition.committed_index
        await partition.start_mover.propose(await partition.start_mover.index_before(9))
        assert [*first, kept + 1] == partition.log.segment_first_indexes
        assert (8, 10) == (partition.start_offset, partition.end_offset)
        await partition.start_mover.propose(await partition.start_mover.index_before(10))

        assert [kept + 1] == partition.log.segment_first_indexes
        await fill(partition, 1, first=5)
        assert b"5" == bytes(Batch((await partition.reader.frames(10, max_bytes=1))[0]).values[0])


async def test_the_segment_that_is_written_to_never_expires(tmp_path: Path) -> None:
    """However old its batches are, and however small the bound."""
    clock = At()
    async with lone_partition(tmp_path) as partition:
        await fill(partition, 2)
        clock.wall = partition.log.last_append_time_ms + HOUR_MS

        keeper(clock, Rules(retention_ms=1, retention_bytes=0)).check(partition)

        assert not moving(partition)
        await fill(partition, 10, first=2)
        sealed = [end for end, _, _ in partition.log.sealed()]
        keeper(clock, Rules(retention_ms=1)).check(partition)
        assert moving(partition)
        keeper(clock, Rules(retention_ms=1)).check(partition)
        await settled_start(partition)
        starts = [row for row in rows(partition) if row == Kind.LOG_START]
        assert 1 == len(starts), "one entry at a time"
        assert sealed[-1] == partition.log.start.index
        assert partition.start_offset < partition.end_offset


def rows(partition: Partition) -> list[int]:
    log = partition.log
    return [log.index_entry(index).kind for index in range(log.first_index, log.last_index + 1)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # what is waited for has no event
            await asyncio.sleep(0.001)


def moving(partition: Partition) -> bool:
    return partition.state.start_is_moving


async def settled_start(partition: Partition) -> None:
    await until(lambda: not moving(partition))


async def test_b5_an_idle_empty_partition_loses_nothing_it_is_given_later(tmp_path: Path) -> None:
    """Retention finds nothing in it; what is appended afterwards is there after a restart. (laminarmq unlinks
    the files that its new write segment already holds.)
    """
    clock = At()
    async with lone_partition(tmp_path) as partition:
        await partition.reader.wait_past(-1, 1.0)
        clock.wall = partition.log.last_append_time_ms + HOUR_MS
        for _ in range(3):
            keeper(clock, Rules(retention_ms=1, retention_bytes=0)).check(partition)
            assert not moving(partition)
        await until(lambda: partition.committed_index == partition.log.last_index)
        await partition.start_mover.propose(partition.committed_index)
        for _ in range(3):
            keeper(clock, Rules(retention_ms=1, retention_bytes=0)).check(partition)
            assert not moving(partition)
        await fill(partition, 2)

    async with lone_partition(tmp_path) as partition:
        await partition.reader.wait_past(3, 60.0)
        assert (0, 4) == (partition.start_offset, partition.end_offset)
        assert b"1" == bytes(Batch((await partition.reader.frames(2, max_bytes=1))[0]).values[0])


async def test_b7_every_record_left_is_found_after_others_were_given_up(tmp_path: Path) -> None:
    """Also by what was looked up before, and when segments are sealed and given up again and again.
    (laminarmq keeps its cached segments by their place in a list, which shifts.)
    """
    async with lone_partition(tmp_path) as partition:
        for turn in range(4):
            await fill(partition, 9, first=turn * 9)
            for offset in range(partition.start_offset, partition.end_offset, 2):
                found = Batch((await partition.reader.frames(offset, max_bytes=1))[0])
                assert offset == found.header.base_offset
                assert b"%d" % (offset // 2) == bytes(found.values[0])

            keeper(At(), Rules(retention_bytes=1_300_000)).check(partition)
            await settled_start(partition)

            assert turn * 18 <= partition.start_offset
            for offset in range(partition.start_offset, partition.end_offset, 2):
                assert (
                    offset
                    == Batch((await partition.reader.frames(offset, max_bytes=1))[0]).header.base_offset
                )
        assert partition.start_offset > 36


async def test_b10_age_counts_from_appending_over_restarts_and_for_each_segment(tmp_path: Path) -> None:
    """A restart neither resets it nor makes it forgotten; what was just appended to an old log stays.
    (laminarmq counts from a segment's creation, by a clock of the process.)
    """
    clock = At()
    async with lone_partition(tmp_path) as partition:
        await fill(partition, 9)
        first_sealed_ms = next(partition.log.sealed())[1]

    async with lone_partition(tmp_path) as partition:
        await partition.reader.wait_past(17, 60.0)
        clock.wall = first_sealed_ms + HOUR_MS
        keeper(clock, Rules(retention_ms=HOUR_MS)).check(partition)
        assert not moving(partition), "not older than an hour"
        clock.wall = partition.log.last_append_time_ms + HOUR_MS + 1
        await fill(partition, 1, first=9)
        keeper(clock, Rules(retention_ms=HOUR_MS)).check(partition)
        await settled_start(partition)

        assert 0 < partition.start_offset <= 18
        assert b"9" == bytes(Batch((await partition.reader.frames(18, max_bytes=1))[0]).values[0])


async def test_without_a_setting_nothing_is_given_up(tmp_path: Path) -> None:
    """Kept for ever, and however large."""
    clock = At()
    clock.wall = 1 << 50
    async with lone_partition(tmp_path) as partition:
        await fill(partition, 9)

        keeper(clock, Rules()).check(partition)

        assert not moving(partition)


async def test_a_committed_start_is_not_carried_out_in_a_log_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process goes on, and the start moves when it may: what the entry carries is not lost with it."""
    async with lone_partition(tmp_path) as partition:
        await fill(partition, 9)
        with monkeypatch.context() as patched:
            moved = partition.start_mover.propose(await partition.start_mover.index_before(10))
            patched.setattr(Log, "failure", StorageError("a test says so"))
            await moved
            partition.start_mover.carry_out()
            assert 0 == partition.start_offset
            assert moving(partition)

        keeper(At(), Rules()).check(partition)

        assert 10 == partition.start_offset
        assert not moving(partition)


# -- three replicas --------------------------------------------------------------------------


async def produce(cluster: Trio, batches: int, *, first: int = 0) -> Member:
    """Batches of 20 kB through the leader, one after another: a segment holds four or five."""
    leader = await cluster.leader()
    for number in range(first, first + batches):
        await asyncio.wait_for(send(leader, batch(number, BIG)), 60)
    return leader


def starts(cluster: Trio) -> set[tuple[int, int, int]]:
    found = set()
    for member in cluster.alive:
        start = member.partition.log.start
        found.add((start.index, start.term, start.offset))
    return found


async def look_until_moved(cluster: Trio, rules: Rules) -> None:
    """As shards do: every replica is looked at now and then, and whoever leads proposes."""

    def moved() -> bool:
        for member in cluster.alive:
            keeper(member.clock, rules).check(member.partition)
        return all(member.partition.start_offset > 0 for member in cluster.alive)

    await cluster.until(moved, what="starts")
    await cluster.settled()


def check_alike(cluster: Trio) -> None:
    """Same start, same bytes behind it, same state."""
    assert 1 == len(starts(cluster)), starts(cluster)
    first, *others = cluster.alive
    for other in others:
        assert first.frames() == other.frames()
        assert first.partition.producers.stored() == other.partition.producers.stored()
        assert first.partition.cursors.stored() == other.partition.cursors.stored()


async def test_three_replicas_move_their_start_alike_and_keep_it() -> None:
    """By the leader's entry; a replica that was killed comes back with the start and the state it had."""
    async with trio() as cluster:
        leader = await produce(cluster, 14)
        await leader.partition.cursor_commands.set("c", 9, expected=None, check=False, owner="", now_ms=1)
        await cluster.settled()

        await look_until_moved(cluster, Rules(retention_bytes=0))

        check_alike(cluster)
        for member in list(cluster.members.values()):
            await member.kill()
            await member.start()
            await cluster.settled()
        check_alike(cluster)
        leader = await produce(cluster, 3, first=14)
        await cluster.settled()
        check_alike(cluster)
        assert 17 == leader.partition.end_offset
        assert {9} == {
            cursor.position
            for m in cluster.alive
            if (cursor := m.partition.cursor_commands.get("c")) is not None
        }


async def test_a_start_that_was_not_committed_moves_nothing() -> None:
    """A leader that is cut off proposes one; its successor's entries take its place."""
    async with trio() as cluster:
        leader = await produce(cluster, 14)
        await cluster.settled()
        cluster.cut_off(leader.node)
        lost = leader.partition.start_mover.propose(leader.partition.committed_index)
        others = [member.node for member in cluster.followers(leader)]
        await cluster.leader(among=others)
        cluster.heal()

        with pytest.raises(Problem):
            await asyncio.wait_for(lost, 60)
        await cluster.settled()
        assert {(0, 0, 0)} == starts(cluster)
        assert not moving(leader.partition)
        cluster.check_equal()


async def test_a_start_waits_for_a_replica_that_lags_but_not_for_ever() -> None:
    """It could not catch up from a log that begins behind its end. Time, or a full disk, ends the wait."""
    async with trio() as cluster:
        leader = await produce(cluster, 6)
        await cluster.settled()
        late = cluster.followers(leader)[0]
        ended_at = late.partition.log.last_index
        await late.kill()
        await produce(cluster, 12, first=6)
        clock = At()
        held = keeper(clock, Rules(retention_bytes=0), hold_ms=1000)

        held.check(leader.partition)
        await settled_start(leader.partition)
        assert 0 < leader.partition.log.start.index <= ended_at
        assert 1 == held.held
        await late.start()
        await cluster.settled()
        check_alike(cluster)

        await late.kill()
        await produce(cluster, 12, first=18)
        held.check(leader.partition)
        await settled_start(leader.partition)
        before = leader.partition.log.start.index
        clock.monotonic += 1000
        assert leader.partition.log.last_index == held.trimmable_index(
            leader.partition, leader.partition.log.last_index
        )
        full = keeper(clock, Rules(retention_bytes=0), low=True)
        assert leader.partition.committed_index == full.trimmable_index(
            leader.partition, leader.partition.committed_index
        )
        assert before <= late.partition.log.last_index


async def test_pitfall_46_clock_steps_of_an_hour_over_leader_changes() -> None:
    """Times never go back in a log; nothing younger than its retention by a right clock is given up; and
    retention goes on once the clocks are right again.
    """
    rules = Rules(retention_ms=2 * HOUR_MS)
    async with trio() as cluster:
        sent = 0
        for step_ms in (0, HOUR_MS, -HOUR_MS):
            leader = await cluster.leader()
            leader.clock.offset_ms = step_ms
            await produce(cluster, 6, first=sent)
            sent += 6
            await cluster.settled()
            leader = await cluster.leader()
            keeper(leader.clock, rules).check(leader.partition)
            assert not moving(leader.partition), "nothing is two hours old by anybody's clock"
            others = [member.node for member in cluster.followers(leader)]
            cluster.cut_off(leader.node)
            await cluster.leader(among=others)
            cluster.heal()
            await cluster.settled()

        for member in cluster.alive:
            times = [Header.unpack(frame).append_time_ms for frame in member.frames()]
            assert times == sorted(times)
        check_alike(cluster)
        assert {(0, 0, 0)} == starts(cluster)
        leader = await cluster.leader()
        for member in cluster.alive:
            member.clock.offset_ms = 3 * HOUR_MS + 60_000
        await look_until_moved(cluster, rules)
        check_alike(cluster)
        leader = await cluster.leader()
        ends = [end for end, _, _ in leader.partition.log.sealed()]
        assert not [end for end in ends if end <= leader.partition.log.start.index]


async def deliver(cluster: Trio, sequence: int) -> None:
    """As an idempotent producer does: again and again, to whoever leads, until there is a receipt."""
    while True:
        leader = await cluster.leader()
        try:
            receipt = await asyncio.wait_for(send(leader, batch(sequence, b"%d" % sequence, BIG)), 2)
        except (Problem, TimeoutError):
            continue
        assert 2 * sequence == receipt.offset, "neither lost nor doubled"
        return


@pytest.mark.parametrize("seed", range(1, 5))
async def test_starts_that_move_under_kills_and_power_cuts_lose_no_state(seed: int) -> None:
    """Retention keeps only the active segment, while members die in turn, with what their disks forget:
    each record is taken once, in order, and all replicas end with the same start, bytes and state.
    """
    async with trio(seed=seed) as cluster:
        rules = Rules(retention_bytes=0)
        down: Member | None = None
        for sequence in range(40):
            await deliver(cluster, sequence)
            for member in cluster.alive:
                keeper(member.clock, rules, hold_ms=1 << 40).check(member.partition)
            if sequence % 4 == 3:
                if down is not None:
                    await down.start()
                down = cluster.rng.choice(cluster.alive)
                await (down.kill() if cluster.rng.random() < 0.5 else down.cut_power())
        if down is not None:
            await down.start()
        await cluster.settled()
        await look_until_moved(cluster, rules)
        await until(lambda: not any(moving(member.partition) for member in cluster.alive))

        await cluster.settled()
        check_alike(cluster)
        for member in cluster.alive:
            partition = member.partition
            assert 80 == partition.end_offset
            for frame in member.frames():
                header = Header.unpack(frame)
                if header.kind == Kind.DATA:
                    assert b"%d" % (header.base_offset // 2) == bytes(Batch(frame).values[0])
            retried = partition.producers.check(b"p" * 16, 0, 39)
            assert retried is not None and getattr(retried, "offset", None) == 78
        assert 0 < cluster.alive[0].partition.start_offset
