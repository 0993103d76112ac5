"""Records that channels have open leave old segments as copies, and nothing else of them changes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from laminar.batch import HEADER_SIZE, Batch, Codec, Header, build
from laminar.batch.builder import _build
from laminar.batch.header import Flag
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange
from laminar.node.api.channels.states import state_of
from laminar.node.channels.given_records import GivenRecords
from laminar.node.channels.open_records import carrier as carrier_module
from laminar.node.channels.open_records.carrier import Carrier
from laminar.node.channels.open_records.jobs import Source, frames_of
from laminar.node.channels.requests import Step, Verb
from laminar.node.delay.carrier import Carrier as DelayedCarrier
from laminar.node.delay.publisher import Publisher
from laminar.node.partition.partition import Partition
from laminar.node.partition.retention import Rules
from laminar.node.partition.state.channels import Why
from laminar.node.partition.state.delayed_records import CANCELLED, Changed, delayed_entry
from laminar.node.partition.state.pins import PartAcks
from laminar.node.partition.state.succession import Output, SealRecord
from laminar.node.transactions.participant import Batch as StagedBatch
from laminar.node.transactions.participant import Participant
from laminar.wire.channels import ChannelSettings, Named
from tests.node.channels.carrying import CHANNEL, MIB, ONCE, TWO_YEARS_MS, Carried, carrying
from tests.node.channels.test_delivery import append, attempts, given, nothing, offsets, steps, values
from tests.node.channels.test_retention import EVERYTHING, start_after
from tests.node.partition.test_retention import HOUR_MS
from tests.node.transactions.test_uploads import publish, put

OTHER = 8


def retained(partition: Partition) -> int:
    """The bytes of the segments that the log has."""
    return sum(segment.size for segment in partition.log.segments())


async def test_a_dead_record_does_not_keep_what_follows_it(tmp_path: Path) -> None:
    """Without a copy one dead letter keeps the whole log; with one, a segment or two. It is replayed once."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        await append(partition, b"before")
        await held.work()
        (dead,) = await held.failed(
            b"invoice 12", keys=[b"k"], tags=["eu"], headers=[{"h": b"v"}], timestamps=[77]
        )
        await held.fill(20)

        held.carries = False
        assert await held.trimmed() <= dead
        assert retained(partition) > 20 * MIB
        held.carries = True
        assert await held.trimmed() > dead
        assert retained(partition) < 2 * MIB, "the active segment, and the copy"
        assert held.carrier.copied == 1

    async with carrying(tmp_path) as held:
        partition, delivery = held.partition, held.delivery
        with pytest.raises(Problem, match="earliest"):
            await partition.reader.frames(dead, max_bytes=1)
        aside = partition.state.channels.by_id[CHANNEL].aside[dead]
        assert (aside.why, aside.attempts, aside.reason) == (Why.DEAD, 1, "no luck")
        assert await delivery.retry_dead(CHANNEL, None) == 1
        jobs = await given(delivery)
        assert (offsets(jobs), values(jobs)) == ([dead], [b"invoice 12"])
        (batch,) = map(Batch, jobs.frames)
        assert (batch.keys, batch.tags, batch.headers) == ([b"k"], ["eu"], [{"h": b"v"}])
        assert list(batch.given_timestamps or ()) == [77]
        assert (await delivery.settle(CHANNEL, steps("ack", jobs))).done == 1
        assert not partition.state.channels.copies
        await nothing(delivery)


async def test_what_waits_two_years_is_copied_once_a_retention_and_comes_in_the_end(tmp_path: Path) -> None:
    """Each copy is copied again before its own segment goes; the log does not grow."""
    async with carrying(tmp_path, ChannelSettings(retry_ms=0)) as held:
        partition = held.partition
        waiting = await held.failed(*(b"job %d" % number for number in range(5)))
        written = retained(partition)
        append_ms = partition.log.index_entry(partition.log.last_index - 2).append_time_ms
        places = []
        for round_ in range(1, 5):
            await held.fill(6)
            await held.trimmed()
            places.append(min(copy.entry for copy in partition.state.channels.copies.values()))
            (entry,) = await partition.log.read(places[-1], places[-1], max_bytes=1)
            assert Header.unpack(entry).flags & Flag.SYNCED, "the originals are deleted after it"
            assert held.carrier.copied == 5 * round_
            assert retained(partition) < written + 2 * MIB
        assert sorted(set(places)) == places, "each time in another entry"
        assert {copy.time_ms for copy in partition.state.channels.copies.values()} == {append_ms}
        channel = partition.state.channels.by_id[CHANNEL]
        state = await state_of(partition, channel, end=partition.end_offset, full=False)
        assert (state.aside, state.oldest_ms) == (5, append_ms)

        # `seek` back as far as the log goes brings nothing back that is done, and what waits at once.
        await held.delivery.seek(CHANNEL, partition.start_offset)
        for offset in waiting:
            assert channel.aside[offset].attempts == 1
        assert await held.trimmed() == partition.start_offset


async def test_many_among_others_are_given_out_as_they_were(tmp_path: Path) -> None:
    """In several entries, of several batches, next to each other or alone."""
    async with carrying(tmp_path) as held:
        partition, delivery = held.partition, held.delivery
        wanted: dict[int, bytes] = {}
        for number in range(60):
            await append(partition, *(b"%d.%d" % (number, row) * 9_000 for row in range(4)))
            jobs = await given(delivery, 4)
            fails = {0, 1} if number % 3 == 0 else {2}
            for row, offset in enumerate(offsets(jobs)):
                verb: Verb = "nack" if row in fails and number % 2 == 0 else "ack"
                one = Named(0, offset, offset + 1, jobs.runs[0].delivery)
                await delivery.settle(CHANNEL, [Step(verb, one)])
                if verb == "nack":
                    wanted[offset] = b"%d.%d" % (number, row) * 9_000
        await held.fill(4)

        assert await held.trimmed() > max(wanted)
        entries = {copy.entry for copy in partition.state.channels.copies.values()}
        assert len(entries) > 1 and partition.state.channels.copies.keys() == wanted.keys()
        assert max(partition.log.index_entry(entry).size for entry in entries) < MIB + 64 * 1024

        assert await delivery.retry_dead(CHANNEL, None) == len(wanted)
        jobs = await given(delivery, 1_000)
        assert dict(zip(offsets(jobs), values(jobs), strict=True)) == wanted
        await delivery.settle(CHANNEL, steps("ack", jobs))
        assert not partition.state.channels.open and not partition.state.channels.copies


async def test_what_ends_while_it_is_copied_stays_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log holds its copy, the table does not; so nothing keeps that copy."""
    async with carrying(tmp_path) as held:
        partition, delivery = held.partition, held.delivery
        dropped, kept = await held.failed(b"dropped", b"kept")
        await held.fill(5)
        read = Carrier._append

        async def appended_late(carrier: Carrier, chosen: Any) -> None:
            assert await delivery.drop_dead(CHANNEL, [dropped]) == 1
            await read(carrier, chosen)

        monkeypatch.setattr(Carrier, "_append", appended_late)
        assert await held.trimmed() > kept

        assert held.carrier.copied == 2
        assert list(partition.state.channels.copies) == [kept]
        assert list(partition.state.channels.by_id[CHANNEL].aside) == [kept]
        await delivery.drop_dead(CHANNEL, None)
        await held.fill(5)
        assert partition.log.start.index < await last_end(held)


@pytest.mark.parametrize("done", [True, False])
async def test_what_a_transaction_has_pinned_is_copied_and_ends_with_it(tmp_path: Path, done: bool) -> None:
    """Also by the next process. If the batch is not decided, the job comes again from its copy."""
    batch = (b"s" * 16, 0, 1)
    async with carrying(tmp_path) as held:
        await append(held.partition, b"pinned")
        jobs = await given(held.delivery, timeout_ms=3_000)
        named = Named(0, 0, 1, jobs.runs[0].delivery)
        index = await held.delivery.pin(batch, [PartAcks(CHANNEL, [named])])
        await held.fill(5)
        assert await held.trimmed() > 0

    async with carrying(tmp_path) as held:
        partition, delivery = held.partition, held.delivery
        assert list(partition.state.channels.copies) == [0]
        await delivery.end_pins(batch, done=done, index=index)
        assert list(partition.state.channels.copies) == ([] if done else [0])
        if done:
            await nothing(delivery)
            return
        assert partition.state.channels.by_id[CHANNEL].out[0].delivery == named.delivery
        await delivery.settle(CHANNEL, [Step("release", named)])
        again = await given(delivery)
        assert (values(again), attempts(again)) == ([b"pinned"], [1])


async def last_end(held: Carried) -> int:
    """The last entry of the sealed segments, once retention has done what it can."""
    end = max(last for last, _, _ in held.partition.log.sealed())
    await held.trimmed()
    assert held.partition.log.start.index >= end
    return held.partition.log.last_index


async def test_channels_share_a_copy_and_it_goes_with_the_last(tmp_path: Path) -> None:
    """One of them is closed, the other has its record acknowledged."""
    async with carrying(tmp_path) as held:
        partition, delivery = held.partition, held.delivery
        (dead,) = await held.failed(b"for both")
        await delivery.open(OTHER, "audit", 2, ONCE)
        jobs = await delivery.receive(OTHER, wanted=1, wait_s=5)
        assert jobs is not None and offsets(jobs) == [dead]
        await held.fill(5)
        while await held.work(OTHER):
            pass

        assert await held.trimmed() > dead
        assert held.carrier.copied == 1
        await delivery.drop_dead(CHANNEL, None)
        assert list(partition.state.channels.copies) == [dead], "the other has it out"
        await delivery.settle(OTHER, steps("release", jobs))
        again = await delivery.receive(OTHER, wanted=1, wait_s=5)
        assert again is not None and values(again) == [b"for both"]
        await delivery.close(OTHER)
        assert not partition.state.channels.copies


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


async def test_what_was_compressed_is_compressed_in_its_copy(tmp_path: Path) -> None:
    """Else copies take many times what they free."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        for _ in range(4):
            await held.failed(b"j" * (2 * MIB), codec=Codec.ZSTD)
        await held.fill(2)
        before = retained(partition)

        assert await held.trimmed() > 3
        assert retained(partition) < before
        await held.delivery.retry_dead(CHANNEL, None)
        jobs = await given(held.delivery)
        assert values(jobs) == [b"j" * (2 * MIB)] * 4


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


async def test_a_copy_has_all_that_its_record_had(tmp_path: Path) -> None:
    """Whoever appended it, and however it was stored."""
    async with carrying(tmp_path) as held:
        partition, delivery = held.partition, held.delivery
        columns: list[dict[str, Any]] = [
            {"keys": [b"", None, b"k"], "tags": ["eu", None, ""], "trace_ids": [b"t" * 16, None, None]},
            {"headers": [{"a": b""}, None, {}], "timestamps": [0, None, 10**12], "codec": Codec.ZSTD},
            {"delivery_times": [None, 5, 10**12], "keys": [b"k" * 500] * 3, "codec": Codec.ZSTD},
            {},
        ]
        for number, each in enumerate(columns):
            frame = build([b"", b"v", b"w" * 3_000], **each)
            header = Header.unpack(frame)
            await partition.appends.append_frame(bytearray(frame), header)
            batch, staging = StagedBatch(sink=b"s" * 16, number=number, epoch=1), Participant(partition)
            await staging.stage(batch, 0, frame, header)
            await staging.prepare(batch, [0])
            await staging.publish(batch)
        jobs = await given(delivery, 100)
        before = cells(await frames_of(partition, jobs.runs))
        await delivery.settle(CHANNEL, steps("nack", jobs, delay_ms=TWO_YEARS_MS))
        await held.fill(8)
        assert await held.trimmed() >= 24
        assert partition.state.channels.copies.keys() == before.keys() == set(range(24))

        assert cells(await frames_of(partition, jobs.runs)) == before


def cells(read: tuple[list[Any], int]) -> dict[int, tuple[Any, ...]]:
    """All that records have, by offset."""
    return {
        record.offset: (
            *(record.value, record.key, record.tag, dict(record.headers)),
            *(record.timestamp, record.delivery_time, record.trace_id),
            (batch.given_timestamps or [None] * len(batch))[record.offset - batch.base_offset],
        )
        for batch in map(Batch, read[0])
        for record in batch
    }


async def test_another_entry_in_the_place_of_one_that_is_read_gives_no_wrong_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An election takes an entry of copies back, and the next leader writes another one there."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        first, second, third = await held.failed(b"a", b"b", b"c")
        await held.fill(5)
        assert await held.trimmed() > third
        others = [first, third, second]
        monkeypatch.setattr("laminar.node.channels.open_records.jobs.copied_offsets", lambda change: others)

        stretch = await Source(partition).read(first, third + 1)

        assert stretch is not None and (stretch.first, stretch.length) == (first, 1)


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


async def test_a_person_deletes_copies_too(tmp_path: Path) -> None:
    """What is deleted by hand is lost to the channel, where it was copied and where it was not."""
    async with carrying(tmp_path, ChannelSettings(retry_ms=0, order="key")) as held:
        partition, delivery = held.partition, held.delivery
        channel = partition.state.channels.by_id[CHANNEL]
        (moved,) = await held.failed(b"its copy lies after what is deleted", keys=[b"m"])
        await held.fill(5)
        held.carrier.carry([last for last, _, _ in partition.log.sealed()])
        await held.carrier.finished()
        assert list(partition.state.channels.copies) == [moved] and partition.start_offset == 0
        await partition.start_mover.delete(await partition.start_mover.index_before(moved + 1))
        assert (channel.open, channel.lost, partition.start_offset) == (0, 1, moved + 1)

        (copied,) = await held.failed(b"a", keys=[b"k"])
        await held.fill(5)
        assert await held.trimmed() > copied
        (left,) = await held.failed(b"b", keys=[b"l"])
        await held.fill(1)
        lost = channel.lost

        await partition.start_mover.delete(partition.committed_index)
        assert (channel.open, channel.lost - lost) == (0, 2) and not partition.state.channels.copies
        assert left < partition.start_offset == partition.end_offset
        await append(partition, b"after", keys=[b"k"])
        assert values(await given(delivery)) == [b"after"], "its key is free"


async def test_a_deletion_that_ends_between_its_two_entries_is_repeated(tmp_path: Path) -> None:
    """The first one alone takes no more than was asked for, and the second counts nothing twice."""
    async with carrying(tmp_path, ChannelSettings(retry_ms=0)) as held:
        partition = held.partition
        channel = partition.state.channels.by_id[CHANNEL]
        (moved,) = await held.failed(b"its copy lies after what is deleted")
        await held.fill(5)
        held.carrier.carry([last for last, _, _ in partition.log.sealed()])
        await held.carrier.finished()
        (later,) = await held.failed(b"after what is deleted")

        await partition.start_mover.delete_copies(moved + 1)  # what a crash leaves: the first entry

        assert (list(channel.aside), channel.lost, partition.start_offset) == ([later], 1, 0)
        await partition.start_mover.delete(await partition.start_mover.index_before(moved + 1))
        assert (list(channel.aside), channel.lost, partition.start_offset) == ([later], 1, moved + 1)


async def test_a_copy_that_is_damaged_everywhere_is_a_dead_record(tmp_path: Path) -> None:
    """As an original is: attempts fail, and then it waits for a person."""
    async with carrying(tmp_path, ChannelSettings(retry_ms=0, max_attempts=2)) as held:
        partition, delivery = held.partition, held.delivery
        await append(partition, b"lost", b"kept")
        jobs = await given(delivery)
        await delivery.settle(CHANNEL, steps("nack", jobs, delay_ms=1_000))
        await held.fill(5)
        assert await held.trimmed() > 1
        await damage(partition, partition.state.channels.copies[0].entry)

        channel = partition.state.channels.by_id[CHANNEL]
        async with asyncio.timeout(60):
            while channel.dead != 2:
                await delivery.receive(CHANNEL, wanted=1, wait_s=0.2)
        assert {each.reason for each in channel.aside.values()} == {"damaged"}


async def test_what_lies_beside_damage_is_given_out(tmp_path: Path) -> None:
    """Only what cannot be read fails, though it was to be given out together with others."""
    async with carrying(tmp_path, ChannelSettings(retry_ms=0, max_attempts=2)) as held:
        partition, delivery = held.partition, held.delivery
        for value in (b"before", b"damaged", b"after"):
            await append(partition, value)
        await damage(partition, partition.log.last_index - 1)

        channel = partition.state.channels.by_id[CHANNEL]
        found: list[bytes] = []
        async with asyncio.timeout(60):
            while len(found) < 2 or not channel.dead:
                jobs = await delivery.receive(CHANNEL, wanted=3, wait_s=0.2)
                if jobs is not None and jobs.total:
                    found += values(jobs)
                    await delivery.settle(CHANNEL, steps("ack", jobs))
        assert found == [b"before", b"after"]
        assert {offset: each.why for offset, each in channel.aside.items()} == {1: Why.DEAD}


async def damage(partition: Partition, index: int) -> None:
    """Have an entry read from its file, where it is not what it was."""
    log, storage = partition.log, partition.context.driver._storage
    await storage.sync()
    await storage.checkpoint()
    storage._changes.written = storage._changes.recorded
    storage._changes.evict_written()
    with open(log.segment_of(index).file.path, "r+b") as file:  # noqa: ASYNC230  # a disk that errs
        file.seek(log.index_entry(index).position + HEADER_SIZE)
        file.write(b"\xff\xff\xff\xff")


async def test_what_is_deleted_before_it_is_read_fails_no_other(tmp_path: Path) -> None:
    """The records beside it were given to nobody: they come again, with the same attempt."""
    async with carrying(tmp_path) as held:
        partition, delivery = held.partition, held.delivery
        await append(partition, b"a", b"b")
        await append(partition, b"c", b"d")
        read = GivenRecords.read

        async def deleted_first(self: GivenRecords, *arguments: Any) -> Any:
            if partition.start_offset == 0:
                await partition.start_mover.delete(await partition.start_mover.index_before(2))
            return await read(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GivenRecords, "read", deleted_first)
            jobs = await delivery.receive(CHANNEL, wanted=4, wait_s=5)
        assert jobs is not None and not jobs.total

        channel = partition.state.channels.by_id[CHANNEL]
        assert (partition.start_offset, channel.lost) == (2, 2)
        again = await given(delivery)
        assert (values(again), attempts(again)) == ([b"c", b"d"], [1, 1])
        assert not channel.dead


async def test_readers_skip_copies(tmp_path: Path) -> None:
    """They have no offsets: a reader from the start gets what was appended, and no more."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        await held.failed(*[b"v" * 200_000] * 4)
        await held.fill(9)
        start = await held.trimmed()
        await append(partition, b"last")
        assert max(partition.log.index_entry(copy.entry).size for copy in copies(partition)) > 700_000

        found: list[bytes] = []
        while len(found) < partition.end_offset - start:
            frames = await partition.reader.frames(start + len(found), max_bytes=MIB)
            found += [bytes(value) for frame in frames for value in Batch(frame).values]
        assert found[-1] == b"last" and b"v" * 200_000 not in found


def copies(partition: Partition) -> list[Any]:
    return list(partition.state.channels.copies.values())


async def test_no_copy_is_written_before_all_nodes_know_it(tmp_path: Path) -> None:
    """An older program would stop at the entry."""
    async with carrying(tmp_path) as held:
        partition = held.partition
        await held.failed(b"a")
        await held.fill(5)
        partition.context._code_version = lambda: carrier_module.CARRIED_SINCE - 1

        assert await held.trimmed() == 0 and not held.carrier.copied
        partition.context._code_version = lambda: carrier_module.CARRIED_SINCE
        assert await held.trimmed() > 0
