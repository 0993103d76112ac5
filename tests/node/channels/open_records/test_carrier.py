"""Records that channels have open leave old segments as copies, and nothing else of them changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from laminar.batch import Batch, Codec, Header, build
from laminar.batch.header import Flag
from laminar.http.api.problems import Problem
from laminar.node.api.channels.states import state_of
from laminar.node.channels.open_records import carrier as carrier_module
from laminar.node.channels.open_records.carrier import Carrier
from laminar.node.channels.open_records.jobs import Source, frames_of
from laminar.node.channels.requests import Step, Verb
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.channels import Why
from laminar.node.partition.state.pins import PartAcks
from laminar.node.transactions.participant import Batch as StagedBatch
from laminar.node.transactions.participant import Participant
from laminar.wire.channels import ChannelSettings, Named
from tests.node.channels.carrying import CHANNEL, MIB, ONCE, TWO_YEARS_MS, Carried, carrying, retained
from tests.node.channels.delivering import append, attempts, given, nothing, offsets, steps, values

OTHER = 8


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
