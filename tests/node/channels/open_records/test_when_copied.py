"""Which open records are copied, and when: only where their copies free more than they take."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from laminar.batch import Header
from laminar.batch.builder import _build
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange
from laminar.node.channels.open_records import carrier as carrier_module
from laminar.node.channels.open_records.carrier import Carrier
from laminar.node.channels.open_records.jobs import Source
from laminar.node.delay.carrier import Carrier as DelayedCarrier
from laminar.node.delay.publisher import Publisher
from laminar.node.partition.retention import Rules
from laminar.node.partition.state.delayed_records import CANCELLED, Changed, delayed_entry
from laminar.node.partition.state.succession import Output, SealRecord
from tests.node.channels.carrying import CHANNEL, MIB, carrying, damage, retained
from tests.node.channels.delivering import append, given, offsets, steps
from tests.node.channels.test_retention import EVERYTHING, start_after
from tests.node.partition.test_retention import HOUR_MS
from tests.node.transactions.test_uploads import publish, put


@pytest.mark.parametrize("kept_by", ["an upload", "damage", "a delayed record"])
async def test_copies_are_not_made_again_while_something_else_keeps_the_log(
    tmp_path: Path, kept_by: str
) -> None:
    """They come to be expired themselves: to copy them at each check would fill the disk."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        if kept_by == "an upload":
            await put(partition, 0, b"z")
        elif kept_by == "damage":
            await held.failed(b"broken")
            await damage(partition, partition.log.last_index - 2)
        else:
            await append(partition, b"later", delivery_times=[int(time.time() * 1000) + HOUR_MS])
        for _ in range(24):
            await held.failed(b"x" * 200_000)
        await held.fill(24)

        retention, sizes = held.retention(Rules(retention_bytes=MIB)), []
        for _ in range(8):
            await start_after(retention, partition)
            await held.carrier.finished()
            sizes.append(retained(partition))
        assert partition.start_offset == 0
        assert sizes[-1] == sizes[0], f"{held.carrier.copied} copies: {sizes}"
        # Of what is known to stay none are made.
        copied = 24 if kept_by == "a delayed record" else 0
        assert held.carrier.copied == copied
        for _ in range(3):
            await held.fill(16)
            await start_after(retention, partition)
            await held.carrier.finished()
        assert (partition.start_offset, held.carrier.copied) == (0, copied), "there is room, but no way"


async def test_copies_and_those_of_delayed_records_free_more_than_they_take_together(tmp_path: Path) -> None:
    """Were each to take half of what the log has, both would be written again and again."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        publisher = Publisher(partition)
        delayed = DelayedCarrier(partition, publisher)
        retention = held.retention(
            Rules(retention_bytes=MIB), keep_delayed=lambda _, before: delayed.keep(before)
        )
        due_ms = int(time.time() * 1000) + HOUR_MS
        for _ in range(40):
            await held.failed(b"x" * 50_000)
            await append(partition, b"y" * 50_000, delivery_times=[due_ms])
            await append(partition, b"z" * 20_000)
            await held.work()
        for _ in range(6):
            for _ in range(3):
                await start_after(retention, partition)
                await held.carrier.finished()
                await delayed.finished()
            await held.fill(1)
        delayed.stop()
        publisher.stop()
        # Copies of 4 MB for 5 MB that are gone, and not for each MiB.
        assert (held.carrier.copied, delayed.copied) == (40, 40)
        assert partition.start_offset >= 80 and len(partition.state.delayed) == 40


async def test_open_and_delayed_records_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Where copies of the delayed ones would free too little by themselves, both wait for more to expire."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        publisher = Publisher(partition)
        delayed = DelayedCarrier(partition, publisher)

        async def checked(rules: Rules) -> int:
            retention = held.retention(rules, keep_delayed=lambda _, before: delayed.keep(before))
            for _ in range(6):
                await start_after(retention, partition)
                await held.carrier.finished()
                await delayed.finished()
            return partition.start_offset

        await held.failed(b"before them")
        await held.fill(3)
        for _ in range(6):
            await append(partition, b"x" * 300_000, delivery_times=[int(time.time() * 1000) + HOUR_MS])
        pending = partition.log.last_index
        await held.failed(b"beside them")
        await held.fill(1)
        (after,) = await held.failed(b"after them")
        await held.fill(6)
        end = min(last for last, _, _ in partition.log.sealed() if last >= pending)
        younger = sum(size for last, _, size in partition.log.sealed() if last > end)

        assert 0 < await checked(Rules(retention_bytes=younger)) < after
        assert held.carrier.copied == 1, "what is beside the delayed ones stays with them"
        assert await checked(EVERYTHING) > after
        delayed.stop()
        publisher.stop()


async def test_copies_go_on_when_the_log_begins_where_they_let_it(tmp_path: Path) -> None:
    """What kept it is over; then there are new ones for a later place."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        await put(partition, 0, b"z")
        for _ in range(6):
            await held.failed(b"x" * 100_000)
        await held.fill(8)
        assert await held.trimmed() == 0 and not held.carrier.copied
        await publish(partition, b"z")
        await held.fill(2)
        assert await held.trimmed() > 6
        for _ in range(6):
            await held.failed(b"y" * 100_000)
        await held.fill(8)
        assert await held.trimmed() > 12 and retained(partition) < 4 * MIB
        assert len(partition.state.channels.copies) == 12


async def test_copies_that_failed_are_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left frees too little by itself. It goes with what follows, and keeps that not for ever."""
    monkeypatch.setattr(carrier_module, "COPY_BYTES", 100_000)
    append_copies, entries = Carrier._append, 0

    async def one_alone(carrier: Carrier, chosen: Any) -> None:
        nonlocal entries
        entries += 1
        if entries == 2:
            raise Problem("not_leader", "too much is not committed", outcome="not_applied")
        await append_copies(carrier, chosen)

    async with carrying(tmp_path) as held:
        await held.failed(b"a" * 60_000)
        await held.fill(4)
        for _ in range(3):
            await held.failed(b"x" * 300_000)
        await held.fill(1)
        monkeypatch.setattr(Carrier, "_append", one_alone)

        assert await held.trimmed() < 20 and held.carrier.copied == 1
        await held.fill(6)
        assert await held.trimmed() > 20


async def test_delayed_records_that_stay_after_all_are_not_waited_for(tmp_path: Path) -> None:
    """They were to follow. Since one of them is cancelled, their copies free too little by themselves."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        publisher = Publisher(partition)
        delayed = DelayedCarrier(partition, publisher)
        retention = held.retention(keep_delayed=lambda _, before: delayed.keep(before))
        due_ms = int(time.time() * 1000) + HOUR_MS

        async def check() -> None:
            await start_after(retention, partition)
            await held.carrier.finished()
            await delayed.finished()

        first = partition.state.delayed.next_count
        await append(partition, b"first", delivery_times=[due_ms])
        await held.failed(b"before them")
        await held.fill(2)
        for _ in range(6):
            await append(partition, b"x" * 300_000, delivery_times=[due_ms])
        await held.fill(1)
        while not held.carrier.copied:
            await check()
        await partition.appends.append_control(delayed_entry(Changed([first, CANCELLED, due_ms])))
        (after,) = await held.failed(b"after them")
        await held.fill(8)

        for _ in range(6):
            await check()
        assert partition.start_offset > after
        delayed.stop()
        publisher.stop()


async def test_what_stays_unknown_after_it_was_read_is_not_read_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index of an earlier version holds no offsets of a hole: such damage may be noted at no entry."""
    async with carrying(tmp_path) as held:
        (unknown,) = await held.failed(b"in a hole")
        await held.fill(3)
        reads = 0

        async def refused(source: Source, at: int, end: int) -> None:
            nonlocal reads
            reads += 1
            assert reads < 100, "its leader does nothing else"
            raise DamagedRange(
                first_index=2, last_index=2, first_offset=at, next_offset=end, file="0.log", position=0
            )

        monkeypatch.setattr(Source, "read", refused)
        assert await held.trimmed() <= unknown and not held.carrier.copied
        assert held.partition.leads


async def test_small_records_among_large_ones_are_copied(tmp_path: Path) -> None:
    """Most records of the log are open, but not most of its bytes."""
    async with carrying(tmp_path) as held:
        await held.failed(*[b"small"] * 100)
        await held.fill(6)

        assert await held.trimmed() >= 100 and held.carrier.copied == 100


async def test_what_goes_without_copies_is_not_what_copies_free(tmp_path: Path) -> None:
    """Segments without open records before one that has mostly such: these go, and that one stays."""
    async with carrying(tmp_path) as held:
        await held.fill(4)
        for _ in range(3):
            await held.failed(b"x" * 300_000)
        await held.fill(1)

        start = await held.trimmed()
        assert held.carrier.copied == 0 and 8 < start <= 16
        await held.fill(3)
        assert await held.trimmed() > 19 and held.carrier.copied == 3


async def test_large_records_among_small_ones_stay(tmp_path: Path) -> None:
    """They are few of the log's records, and most of its bytes. That is known before one is written."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        for _ in range(12):
            await held.failed(b"x" * (MIB // 3))
            await append(partition, *[b"y"] * 100)
            await held.work()
        before = partition.log.last_index

        assert await held.trimmed() == 0
        assert (held.carrier.copied, partition.log.last_index) == (0, before)


async def test_in_the_active_segment_of_a_sealed_partition_it_is_the_same(tmp_path: Path) -> None:
    """It expires, too, but copies of most of its records would free nothing."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        for _ in range(3):
            await held.failed(b"x" * 100_000)
        seal = SealRecord(7, 1, [Output(1, 0, 65_536, b"1" * 16)], "strict")
        await partition.propose_seal(seal)
        retention = held.retention(Rules(retention_ms=HOUR_MS))

        for _ in range(3):
            await start_after(retention, partition)
            await held.carrier.finished()
        assert (held.carrier.copied, partition.start_offset) == (0, 0)
        await held.delivery.drop_dead(CHANNEL, [0, 1])
        for _ in range(3):
            await start_after(retention, partition)
            await held.carrier.finished()
        assert (held.carrier.copied, partition.start_offset) == (1, 3)


async def test_copies_may_fill_the_segment_of_the_seal_that_they_make_way_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the log may not begin after the seal any more, but after that segment."""
    monkeypatch.setattr(carrier_module, "COPY_BYTES", 100_000)
    async with carrying(tmp_path) as held:
        partition = held.partition
        await held.failed(*[b"x" * 100_000] * 3)
        await append(partition, *[b"y" * 33_000] * 20)
        await held.work()
        await partition.propose_seal(SealRecord(7, 1, [Output(1, 0, 65_536, b"1" * 16)], "strict"))
        assert not list(partition.log.sealed())
        retention = held.retention(Rules(retention_ms=HOUR_MS))

        for _ in range(4):
            await start_after(retention, partition)
            await held.carrier.finished()
        assert partition.start_offset == partition.end_offset


async def test_what_would_free_little_is_not_copied(tmp_path: Path) -> None:
    """Where most records are open a copy of them takes what it frees: the log stays as it is."""
    async with carrying(tmp_path) as held:
        for _ in range(12):
            await held.failed(b"x" * (MIB // 3), b"y")
        before = held.partition.log.last_index

        assert await held.trimmed() == 0
        assert (held.carrier.copied, held.partition.log.last_index) == (0, before)


async def test_a_record_larger_than_a_batch_keeps_the_log(tmp_path: Path) -> None:
    """Others before it are copied; it is looked at once."""
    async with carrying(tmp_path) as held:
        partition, delivery = held.partition, held.delivery
        (first,) = await held.failed(b"small")
        await held.fill(4)
        await put(partition, 0, b"z" * 1000)
        await publish(partition, b"z" * 1000)
        jobs = await given(delivery, 1)
        await delivery.settle(CHANNEL, steps("nack", jobs))
        (large,) = offsets(jobs)
        await held.fill(6)

        start = await held.trimmed()
        assert first < start <= large
        copied = held.carrier.copied
        await held.fill(3)
        assert await held.trimmed() == start and held.carrier.copied == copied
        await delivery.drop_dead(CHANNEL, [large])
        assert await held.trimmed() > large


async def test_a_record_that_nobody_can_take_apart_keeps_the_log_and_stops_nothing(tmp_path: Path) -> None:
    """No client's batch is taken like that. If one is there, no leader after the other may stop at it."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        (first,) = await held.failed(b"small")
        await held.fill(4)
        none: Any = dict.fromkeys(("keys", "timestamps", "tags", "delivery_times", "traces"))
        frame = _build([b"bad"], headers=[b"\xc1"], **none)
        await partition.appends.append_frame(frame, Header.unpack(frame))
        jobs = await given(held.delivery)
        await held.delivery.settle(CHANNEL, steps("nack", jobs))
        (bad,) = offsets(jobs)
        await held.fill(4)

        assert first < await held.trimmed() <= bad
        assert partition.leads and held.carrier.copied == 1
        await held.delivery.drop_dead(CHANNEL, [bad])
        assert await held.trimmed() > bad
