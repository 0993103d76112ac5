"""Delayed records become visible when they are due, once each: one voter, a real log, real time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from laminar.batch import Batch, Kind, build
from laminar.batch.header import Header
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageError
from laminar.node.api.delayed import steps
from laminar.node.api.delayed.steps import DelayedList
from laminar.node.delay import carrier as carrier_module
from laminar.node.delay.carrier import Carrier
from laminar.node.delay.publisher import NEAR_MS, Publisher, State
from laminar.node.delay.publishers import Publishers
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.retention import Retention, Rules
from laminar.node.partition.state.delayed_records import CANCELLED
from tests.node.alone import lone_partition
from tests.node.partition.seals import SEAL
from tests.node.partition.test_retention import At, fill, settled_start


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@asynccontextmanager
async def publishing(folder: Path) -> AsyncIterator[tuple[Partition, Publisher]]:
    async with lone_partition(folder) as partition:
        publisher = Publisher(partition)
        partition.appends.on_delayed = publisher.wake
        publisher.wake()
        try:
            yield partition, publisher
        finally:
            publisher.stop()


class Held:
    """The wall clock of a replica, which stands still until `go`: before that nothing becomes due."""

    def __init__(self, partition: Partition, publisher: Publisher) -> None:
        self.now_ms = now_ms()
        self._publisher = publisher
        self._replica = partition.replica
        self._replica.wall_ms = lambda: self.now_ms

    def go(self) -> None:
        """Let the clock go on from where it stands."""
        behind_ms = now_ms() - self.now_ms
        self._replica.wall_ms = lambda: now_ms() - behind_ms
        self._publisher.wake()


async def append(partition: Partition, *values: bytes, **columns: Any) -> Receipt:
    frame = build(values, **columns)
    return await partition.appends.append_frame(frame, Header.unpack(frame))


async def read(partition: Partition, count: int, offset: int = 0) -> list[Batch]:
    """Return the batches with the first `count` records, as soon as these are there."""
    assert await partition.reader.wait_past(offset + count - 1, 60.0), "they are not published in time"
    frames = await partition.reader.frames(offset, max_bytes=1 << 30)
    return [Batch(frame) for frame in frames]


def values(batches: list[Batch]) -> list[bytes]:
    return [value for batch in batches for value in batch.values]


async def test_records_are_published_in_the_order_of_their_times_and_never_early(tmp_path: Path) -> None:
    """They have no offset before that; what is appended meanwhile comes first."""
    async with publishing(tmp_path) as (partition, publisher):
        clock = Held(partition, publisher)
        now = clock.now_ms
        due = [now + 300, now + 150, now + 300]
        receipt = await append(
            partition, b"c", b"a", b"d", delivery_times=due, keys=[b"k", None, b"k"], tags=["t", None, None]
        )
        other = await append(partition, b"b", delivery_times=[now + 200])
        at_once = await append(partition, b"now")

        assert (receipt.delayed, receipt.count, other.delayed, at_once.delayed) == (0, 3, 3, None)
        assert (at_once.offset, partition.end_offset, len(partition.state.delayed)) == (0, 1, 4)
        clock.go()
        batches = await read(partition, 5)

        assert values(batches) == [b"now", b"a", b"b", b"c", b"d"]
        assert len(partition.state.delayed) == 0 and publisher.published == 4
        for batch in batches[1:]:
            assert batch.delivery_times is not None
            assert all(batch.header.append_time_ms >= (due_ms or 0) for due_ms in batch.delivery_times)
        assert batches[-1].keys == [b"k", b"k"] and batches[-1].tags == ["t", None]


async def test_pending_records_survive_a_restart(tmp_path: Path) -> None:
    """By replay of the log; those whose time has passed meanwhile come at once."""
    async with publishing(tmp_path) as (partition, _):
        await append(partition, b"late", b"later", delivery_times=[now_ms() + 50, now_ms() + 500])

    async with publishing(tmp_path) as (partition, _):
        assert values(await read(partition, 2)) == [b"late", b"later"]


async def test_how_late_records_were_published_is_known(tmp_path: Path) -> None:
    """Also when none is pending any more, and the partition has no publisher."""
    publishers = Publishers()
    async with lone_partition(tmp_path) as partition:
        await append(partition, b"late", delivery_times=[now_ms() + 50])
        await asyncio.sleep(0.3)  # it is due before anybody looks
        publishers.check([partition])
        before = publishers.statistics()
        assert values(await read(partition, 1)) == [b"late"]
        publishers.check([partition])

        after = publishers.statistics()
        assert (before["pending"], before["late_seconds"]) == (1, 0)
        assert (after["pending"], after["published"]) == (0, 1) and 0.2 < after["late_seconds"] < 60
        publishers.stop()


async def test_a_record_is_cancelled_or_published_and_everyone_is_told_the_same(tmp_path: Path) -> None:
    """A number that was never given is not known; a second cancellation says the same as the first."""
    async with publishing(tmp_path) as (partition, publisher):
        clock = Held(partition, publisher)
        due_ms = clock.now_ms + 200
        receipt = await append(partition, b"a", b"b", delivery_times=[due_ms, due_ms])
        first = receipt.delayed
        assert first is not None

        assert await publisher.change(first, CANCELLED, was_ms=due_ms) is State.PENDING
        assert await publisher.change(first, CANCELLED, was_ms=due_ms) is State.CANCELLED
        clock.go()
        assert values(await read(partition, 1)) == [b"b"]

        assert await publisher.change(first + 1, CANCELLED, was_ms=due_ms) is State.PUBLISHED
        assert await publisher.state(first) is State.CANCELLED
        assert await publisher.state(first + 2) is State.UNKNOWN
        assert partition.end_offset == 1


async def test_a_record_is_moved_to_another_time(tmp_path: Path) -> None:
    """To now, or later; its new time is what readers see."""
    async with publishing(tmp_path) as (partition, publisher):
        clock = Held(partition, publisher)
        far = clock.now_ms + 3_600_000
        soon = clock.now_ms + 200
        receipt = await append(partition, b"far", b"soon", delivery_times=[far, soon])
        first = receipt.delayed
        assert first is not None

        assert await publisher.change(first + 1, soon + 300, was_ms=soon) is State.PENDING
        assert await publisher.change(first, clock.now_ms, was_ms=far) is State.PENDING
        clock.go()
        batches = await read(partition, 2)

        assert values(batches) == [b"far", b"soon"]
        assert batches[-1].delivery_times == [soon + 300]
        assert batches[-1].header.append_time_ms >= soon + 300


async def test_a_retry_gets_the_numbers_of_the_first_attempt(tmp_path: Path) -> None:
    """Whether the records are still pending or not."""
    async with publishing(tmp_path) as (partition, publisher):
        clock = Held(partition, publisher)
        times = [clock.now_ms + 200] * 2
        producer = {"producer_id": b"p" * 16, "sequence": 0, "delivery_times": times}
        receipt = await append(partition, b"a", b"b", **producer)
        again = await append(partition, b"a", b"b", **producer)
        clock.go()
        await read(partition, 2)
        published = await append(partition, b"a", b"b", **producer)
        following = await append(partition, b"c", producer_id=b"p" * 16, sequence=1)

        assert (receipt.delayed, receipt.count, receipt.duplicate) == (0, 2, False)
        for each in (again, published):
            assert (each.delayed, each.count, each.duplicate) == (0, 2, True)
        assert (following.offset, following.delayed) == (2, None)
        assert values(await read(partition, 3)) == [b"a", b"b", b"c"]


async def test_a_retry_that_came_later_gets_the_times_of_the_first_attempt(tmp_path: Path) -> None:
    """A delay counts from when a request comes, and the time is part of an id."""
    async with publishing(tmp_path) as (partition, publisher):
        first_ms = now_ms() + 3_600_000
        producer = {"producer_id": b"p" * 16, "sequence": 0}
        first = await append(partition, b"a", b"b", delivery_times=[first_ms, first_ms + 1], **producer)
        again = await append(partition, b"a", b"b", delivery_times=[first_ms + 50, first_ms + 51], **producer)

        assert again.duplicate and again.delayed_ids == first.delayed_ids
        assert await publisher.written_ms(1) == first_ms + 1


async def test_keys_and_headers_count_for_the_size_of_an_entry(tmp_path: Path) -> None:
    """Else entries of records with small values and large headers would be too large, and never be taken."""
    async with publishing(tmp_path) as (partition, publisher):
        clock = Held(partition, publisher)
        due_ms = clock.now_ms + 100
        headers = [{"h": b"%04d" % place * 15_000} for place in range(60)]
        await append(partition, *[b"v"] * 60, delivery_times=[due_ms] * 60, headers=headers)
        clock.go()
        await read(partition, 60)

        sizes = [
            row.size
            for row in map(partition.log.index_entry, range(1, partition.log.last_index + 1))
            if row.kind == Kind.PUBLISH
        ]
        assert len(sizes) >= 3 and max(sizes) < 1_200_000


async def test_an_entry_that_cannot_be_read_keeps_no_others_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again, and published when it is repaired."""
    async with publishing(tmp_path) as (partition, publisher):
        clock = Held(partition, publisher)
        due_ms = clock.now_ms + 100
        await append(partition, b"damaged", delivery_times=[due_ms])
        damaged = partition.log.last_index
        await append(partition, b"next", delivery_times=[due_ms + 1])
        broken = [True]
        whole = publisher.contents.batch

        async def batch(entry: int) -> Batch:
            if broken and entry == damaged:
                raise StorageError("a disk fault")
            return await whole(entry)

        monkeypatch.setattr(publisher.contents, "batch", batch)
        publisher.forget()
        clock.go()
        assert values(await read(partition, 1)) == [b"next"]
        broken.clear()
        assert values(await read(partition, 2)) == [b"next", b"damaged"]


async def test_a_moved_record_of_an_entry_that_could_not_be_read_comes_when_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry was written with a time that is far away."""
    async with publishing(tmp_path) as (partition, publisher):
        far, broken = now_ms() + 3_600_000, [True]
        await append(partition, b"moved", delivery_times=[far])
        await publisher.change(0, now_ms() + 300, was_ms=far)
        publisher.contents.forget()
        whole = publisher.contents.batch

        async def batch(entry: int) -> Batch:
            if broken:
                raise StorageError("a disk fault")
            return await whole(entry)

        monkeypatch.setattr(publisher.contents, "batch", batch)
        await asyncio.sleep(0.5)
        broken.clear()
        assert await partition.reader.wait_past(0, 60.0), "it is not published soon"


async def test_a_record_that_is_moved_while_it_is_copied_is_published_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy has the time that was there when it was made, and another place."""
    async with publishing(tmp_path) as (partition, publisher):
        far = now_ms() + 3_600_000
        await append(partition, b"moved", b"far", delivery_times=[far, far])
        carrier, records = Carrier(partition, publisher), publisher.contents.records

        async def moved_meanwhile(chosen: Any, **named: Any) -> Any:
            found = await records(chosen, **named)
            if carrier.copied == 0:
                await publisher.change(0, now_ms() + 300, was_ms=far)
            return found

        monkeypatch.setattr(publisher.contents, "records", moved_meanwhile)
        carrier.keep(partition.log.last_index)
        await carrier.finished()
        assert (carrier.copied, partition.end_offset) == (2, 0)
        # The next look at what is near would find the record, too: half of NEAR_MS after the first one.
        in_time_s = 0.8 * NEAR_MS / 2 / 1000
        assert await partition.reader.wait_past(0, in_time_s), "it is not published in time"
        assert values(await read(partition, 1)) == [b"moved"]
        carrier.stop()


async def test_what_is_cancelled_or_moved_while_it_is_read_to_be_published_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer says that it was pending, so it must not come, or not at its first time."""
    async with publishing(tmp_path) as (partition, publisher):
        clock = Held(partition, publisher)
        due_ms, far = clock.now_ms + 200, clock.now_ms + 3_600_000
        await append(partition, b"cancelled", b"moved", b"left", delivery_times=[due_ms] * 3)
        whole = publisher.contents.records
        seen: list[State] = []

        async def changed(*given: Any, **more: Any) -> Any:
            found = await whole(*given, **more)
            if not seen:
                seen.append(await publisher.change(0, CANCELLED, was_ms=due_ms))
                seen.append(await publisher.change(1, far, was_ms=due_ms))
            return found

        monkeypatch.setattr(publisher.contents, "records", changed)
        clock.go()

        assert values(await read(partition, 1)) == [b"left"]
        assert seen == [State.PENDING, State.PENDING]
        assert await publisher.state(1) is State.PENDING
        assert partition.end_offset == 1


async def test_a_partition_that_has_ended_publishes_nothing(tmp_path: Path) -> None:
    """What is pending then is sent on, and published by the partitions that follow."""
    async with publishing(tmp_path) as (partition, publisher):
        clock = Held(partition, publisher)
        await append(partition, b"late", delivery_times=[clock.now_ms + 1])
        task = publisher._task
        assert task is not None
        await partition.propose_seal(SEAL)

        clock.now_ms += 60_000
        publisher.wake()

        await asyncio.wait_for(task, 60)
        assert (publisher.published, partition.end_offset, len(publisher.delayed)) == (0, 0, 1)


async def test_an_entry_that_is_trimmed_while_it_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last record was published or cancelled meanwhile: that is the answer, and lists leave it out."""
    async with publishing(tmp_path) as (partition, publisher):
        far = now_ms() + 3_600_000
        await append(partition, b"a", b"b", delivery_times=[far, far])
        await append(partition, b"c", delivery_times=[far])
        await publisher.change(0, CANCELLED, was_ms=far)
        whole, last = publisher.contents.batch, partition.log.last_index

        async def trimmed(entry: int) -> Batch:
            if entry < last - 1:
                monkeypatch.setattr(publisher.contents, "batch", whole)
                await publisher.change(1, CANCELLED, was_ms=far)
                await partition.start_mover.propose(entry)
            return await whole(entry)

        publisher.contents.forget()
        monkeypatch.setattr(publisher.contents, "batch", trimmed)
        listed = await steps._listing(publisher, DelayedList("t", 0, 0, 2 * far, (-1, -1), 10))
        assert [each.number for each in listed.records] == [2]

        async def published(entry: int) -> Batch:
            monkeypatch.setattr(publisher.contents, "batch", whole)
            await publisher.change(2, CANCELLED, was_ms=far)
            await partition.start_mover.propose(entry)
            publisher.contents.forget()
            return await whole(entry)

        monkeypatch.setattr(publisher.contents, "batch", published)
        assert await publisher.change(2, CANCELLED, was_ms=far) is State.CANCELLED


async def test_other_requests_get_their_turn_while_many_entries_are_read(tmp_path: Path) -> None:
    """All of them may be at hand: to read thousands of them takes seconds."""
    async with publishing(tmp_path) as (partition, publisher):
        due_ms, count = now_ms() + 3_600_000, 100
        for _ in range(count):
            await append(partition, b"a", delivery_times=[due_ms])
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += 1

        task = asyncio.create_task(others())
        publisher.contents.forget()
        for batch in list(partition.state.delayed.batches.values()):
            await publisher.contents.due(batch)
        task.cancel()
        assert turns >= count - 1


async def test_more_records_than_are_known_one_by_one_are_published_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each entry is read a few times at most, though all are due within a second."""
    monkeypatch.setattr("laminar.node.delay.publisher.MAX_NEAR", 400)
    monkeypatch.setattr("laminar.node.delay.publisher.PUBLISH_RECORDS", 50)
    async with publishing(tmp_path) as (partition, publisher):
        clock = Held(partition, publisher)
        due_ms, reads = clock.now_ms + 200, 0
        due = publisher.contents.due

        async def counted(*arguments: Any, **named: Any) -> Any:
            nonlocal reads
            reads += 1
            return await due(*arguments, **named)

        monkeypatch.setattr(publisher.contents, "due", counted)
        for first in range(0, 4_000, 200):
            times = [due_ms + (first + place) % 7 for place in range(200)]
            await append(partition, *[b"%d" % time for time in times], delivery_times=times)
        clock.go()
        found = values(await read(partition, 4_000))

        assert len(found) == 4_000 and partition.end_offset == 4_000
        assert found == sorted(found)
        assert reads < 600


async def test_a_batch_is_delayed_as_a_whole(tmp_path: Path) -> None:
    """Without a time a record would be delayed by its neighbours; a time that has passed delays nothing."""
    async with publishing(tmp_path) as (partition, _):
        with pytest.raises(Problem) as refused:
            await append(partition, b"a", b"b", delivery_times=[now_ms() + 100, None])
        assert (refused.value.code, refused.value.field) == ("invalid", "records[1].deliver_at")

        at_once = await append(partition, b"a", b"b", delivery_times=[5, None])
        assert (at_once.offset, at_once.delayed) == (0, None)


async def test_thousands_of_records_are_published_once_each(tmp_path: Path) -> None:
    """In several entries, while others are cancelled."""
    async with publishing(tmp_path) as (partition, publisher):
        clock = Held(partition, publisher)
        due_ms = clock.now_ms + 200
        sent = [b"%05d" % number for number in range(25_000)]
        numbers = []
        for first in range(0, len(sent), 5_000):
            part = sent[first : first + 5_000]
            receipt = await append(partition, *part, delivery_times=[due_ms + first % 3] * len(part))
            numbers.append(receipt.delayed)
        assert numbers == list(range(0, 25_000, 5_000))
        cancelled = [7, 4_999, 5_000, 24_999]
        clock.go()
        states = await asyncio.gather(
            *(publisher.change(number, CANCELLED, was_ms=due_ms) for number in cancelled)
        )
        published = [
            number
            for number in range(25_000)
            if number
            not in [each for each, state in zip(cancelled, states, strict=True) if state is State.PENDING]
        ]

        found = values(await read(partition, len(published)))

        assert sorted(found) == [sent[number] for number in published]
        assert partition.end_offset == len(published)


async def test_copies_are_not_made_again_before_the_log_begins_where_they_let_it(tmp_path: Path) -> None:
    """Something else may keep its start. Retention asks again and again, for later and later places."""
    async with publishing(tmp_path) as (partition, publisher):
        carrier = Carrier(partition, publisher)

        async def copied(before: int) -> int:
            carrier.keep(before)
            await carrier.finished()
            return carrier.copied

        await append(partition, b"first", b"second", delivery_times=[now_ms() + 3_600_000] * 2)
        place = partition.log.last_index
        assert await copied(place) == 2
        await append(partition, b"third", delivery_times=[now_ms() + 3_600_000])
        for _ in range(3):
            assert await copied(partition.log.last_index) == 2
        await partition.start_mover.propose(place)
        assert await copied(partition.log.last_index) == 5
        carrier.stop()


async def test_retention_asks_for_copies_where_these_free_more_than_they_take(tmp_path: Path) -> None:
    """What goes without them does not count, so a segment of mostly pending records waits for others."""
    async with publishing(tmp_path) as (partition, _):
        asked: list[int] = []
        clock = At()
        clock.wall = now_ms() + 1_000_000
        retention = Retention(
            clock=clock,
            rules_of=lambda topic: Rules(retention_bytes=0),
            space_is_low=lambda: False,
            hold_ms=0,
            keep_delayed=lambda partition, before: asked.append(before),
        )
        await fill(partition, 8)
        for _ in range(3):
            await append(partition, b"x" * 300_000, delivery_times=[now_ms() + 3_600_000])
        pending = partition.log.last_index
        await fill(partition, 4, first=8)
        for _ in range(3):
            retention.check(partition)
            await settled_start(partition)
        assert not asked and 0 < partition.start_offset <= 16

        await fill(partition, 8, first=12)
        retention.check(partition)
        assert [before > pending for before in asked] == [True]


async def test_batches_are_joined_only_where_fewer_come_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be too many with one large record each: to copy these again and again would fill the disk."""
    monkeypatch.setattr(carrier_module, "MAX_BATCHES", 4)
    async with publishing(tmp_path) as (partition, publisher):
        carrier, batches = Carrier(partition, publisher), partition.state.delayed.batches
        for _ in range(6):
            await append(partition, b"x" * 700_000, delivery_times=[now_ms() + 3_600_000])
        for _ in range(3):
            carrier.check()
            await carrier.finished()
        assert (carrier.copied, len(batches)) == (0, 6)

        for _ in range(6):
            await append(partition, b"small", delivery_times=[now_ms() + 3_600_000])
        for _ in range(3):
            carrier.check()
            await carrier.finished()
        assert (carrier.copied, len(batches)) == (6, 7), "one that is small is left, and joined with nothing"
        carrier.stop()


async def test_copies_are_made_of_some_thousand_records_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million small ones have few bytes: to sort them all in one turn of the loop takes seconds."""
    monkeypatch.setattr(carrier_module, "SORTED_RECORDS", 50)
    async with publishing(tmp_path) as (partition, publisher):
        far = now_ms() + 3_600_000
        for _ in range(6):
            await append(partition, *[b"a"] * 20, delivery_times=[far] * 20)
        carrier, most, records = Carrier(partition, publisher), 0, publisher.contents.records

        async def counted(chosen: Any, **named: Any) -> Any:
            nonlocal most
            most = max(most, len(chosen))
            return await records(chosen, **named)

        monkeypatch.setattr(publisher.contents, "records", counted)
        carrier.keep(partition.log.last_index)
        await carrier.finished()
        assert (carrier.copied, most) == (120, 40)
        carrier.stop()


async def test_copies_let_the_log_begin_later_and_lose_nothing(tmp_path: Path) -> None:
    """What is pending in old entries is copied; numbers, changed times and cancellations count as before."""
    async with publishing(tmp_path) as (partition, publisher):
        clock = Held(partition, publisher)
        soon, far = clock.now_ms + 200, clock.now_ms + 3_600_000
        await append(partition, b"first", b"gone", b"moved", delivery_times=[soon, far, far])
        await append(partition, b"second", delivery_times=[soon + 1], tags=["t"], headers=[{"a": b"b"}])
        await publisher.change(1, CANCELLED, was_ms=far)
        await publisher.change(2, soon + 2, was_ms=far)
        last = partition.log.last_index
        assert partition.start_mover.possible_start(last) < last

        carrier = Carrier(partition, publisher)
        carrier.keep(last)
        await carrier.finished()
        assert partition.start_mover.possible_start(last) == last
        await partition.start_mover.propose(last)

        assert (partition.log.start.index, carrier.copied) == (last, 3)
        clock.go()
        batches = await read(partition, 3)
        assert values(batches) == [b"first", b"second", b"moved"]
        tags = [tag for batch in batches for tag in batch.tags or [None] * len(batch)]
        assert tags == [None, "t", None]
        carrier.stop()

    async with publishing(tmp_path) as (partition, _):
        assert values(await read(partition, 3)) == [b"first", b"second", b"moved"]
