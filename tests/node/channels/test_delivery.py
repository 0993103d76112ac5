"""Records that are given out, come back, and end: one voter, a real log, real time."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from laminar.batch import Batch, build
from laminar.batch.header import Header
from laminar.http.api.problems import Problem
from laminar.node.channels.deliveries import Deliveries
from laminar.node.channels.delivery import Delivery
from laminar.node.channels.open_records.jobs import Jobs
from laminar.node.channels.queue import MIN_OUTDATED
from laminar.node.channels.requests import Step, Verb
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.channel_changes import Acknowledged, channel_entry
from laminar.node.partition.state.channels import Why
from laminar.node.partition.state.succession import Output, SealRecord
from laminar.wire.channels import ChannelSettings, CursorStart, Filter, Named
from tests.node.alone import lone_partition

CHANNEL = 7
QUICK = ChannelSettings(retry_ms=0)
SHORT_MS = 1_000
HOURS_MS = 12 * 3_600_000


@asynccontextmanager
async def delivering(
    folder: Path, settings: ChannelSettings = QUICK
) -> AsyncIterator[tuple[Partition, Delivery]]:
    async with lone_partition(folder) as partition:
        delivery = Delivery(partition)
        try:
            await delivery.open(CHANNEL, "billing", 1, settings)
            yield partition, delivery
        finally:
            delivery.stop()


async def append(partition: Partition, *values: bytes, **columns: Any) -> None:
    frame = build(values, **columns)
    await partition.appends.append_frame(frame, Header.unpack(frame))


async def given(delivery: Delivery, wanted: int = 10, wait_s: float = 60.0, **named: Any) -> Jobs:
    jobs = await delivery.receive(CHANNEL, wanted=wanted, wait_s=wait_s, **named)
    assert jobs is not None, "nothing was given out in time"
    return jobs


async def nothing(delivery: Delivery, wait_s: float = 0.0) -> None:
    jobs = await delivery.receive(CHANNEL, wanted=10, wait_s=wait_s)
    assert jobs is None, jobs


@contextmanager
def disk_held(partition: Partition) -> Iterator[None]:
    """Nothing is written to the journal, so nothing is committed, before the block ends."""
    gate = threading.Event()

    def hold() -> None:
        gate.wait()

    partition.context.driver._storage._journal_worker.submit(hold)
    try:
        yield
    finally:
        gate.set()


def offsets(jobs: Jobs) -> list[int]:
    return [offset for run in jobs.runs for offset in range(run.first, run.end)]


def attempts(jobs: Jobs) -> list[int]:
    return [run.attempt for run in jobs.runs for _ in range(run.length)]


def values(jobs: Jobs) -> list[bytes]:
    held = {
        batch.base_offset + at: value
        for batch in map(Batch, jobs.frames)
        for at, value in enumerate(batch.values)
    }
    return [held[offset] for offset in offsets(jobs)]


def steps(verb: Any, jobs: Jobs, **named: Any) -> list[Step]:
    return [Step(verb, Named(0, run.first, run.end, run.delivery), **named) for run in jobs.runs]


async def test_each_record_goes_to_one_consumer_and_is_done_when_acknowledged(tmp_path: Path) -> None:
    """Two that ask at once share; what is acknowledged never comes again, in any order."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, *(b"%d" % i for i in range(10)))

        first, second = await asyncio.gather(given(delivery, 4), given(delivery, 4))
        third = await given(delivery, 100)

        assert (offsets(first), offsets(second), offsets(third)) == ([0, 1, 2, 3], [4, 5, 6, 7], [8, 9])
        assert values(second) == [b"4", b"5", b"6", b"7"]
        for jobs in (second, third, first):
            assert await delivery.settle(CHANNEL, steps("ack", jobs)) == (jobs.total, [])
        channel = partition.state.channels.by_id[CHANNEL]
        assert (channel.open, channel.next, channel.floor) == (0, 10, 10)
        await nothing(delivery)


async def test_a_consumer_waits_for_a_record_and_gets_it_when_it_is_committed(tmp_path: Path) -> None:
    """Without a record it is answered after its wait; one that only asks is told when there is one."""
    async with delivering(tmp_path) as (partition, delivery):
        await nothing(delivery, 0.05)
        asked = asyncio.create_task(delivery.receive(CHANNEL, wanted=0, wait_s=60.0))
        await asyncio.sleep(0)
        await append(partition, b"a")

        told = await asked
        assert told is not None and told.runs == [], "it is told, and given nothing"
        waiting = asyncio.create_task(given(delivery))
        assert values(await waiting) == [b"a"]
        await append(partition, b"b")
        assert values(await given(delivery)) == [b"b"]


async def test_a_snapshot_made_while_a_channel_is_opened_changes_nothing(tmp_path: Path) -> None:
    """It rolls the opening back and does it again; consumers that wait by then get each record once."""
    async with delivering(tmp_path) as (partition, delivery):
        await nothing(delivery)  # the memory of this term begins with the first turn
        with disk_held(partition):
            opening = asyncio.ensure_future(delivery.open(CHANNEL + 1, "mails", 2, QUICK))
            committed = partition.log.last_index
            # The opening is proposed after two turns of the loop, and committed when it is on the disk.
            async with asyncio.timeout(60):
                while CHANNEL + 1 not in partition.state.channels.by_id:  # noqa: ASYNC110  # turns of the loop
                    await asyncio.sleep(0)
            waiting = asyncio.ensure_future(delivery.receive(CHANNEL + 1, wanted=1, wait_s=60.0))
            await asyncio.sleep(0)
            assert not opening.done(), "it is committed already: the snapshot has nothing to roll back"

            stored = partition.state.channels.stored_at(committed)

            assert [each.channel for each in stored] == [CHANNEL]
        await opening
        await append(partition, b"a", b"b")
        first = await waiting
        second = await delivery.receive(CHANNEL + 1, wanted=10, wait_s=60.0)
        assert first is not None and second is not None
        assert (offsets(first), offsets(second)) == ([0], [1])
        assert await delivery.settle(CHANNEL + 1, steps("nack", first)) == (1, [])
        again = await delivery.receive(CHANNEL + 1, wanted=10, wait_s=60.0)
        assert again is not None and (offsets(again), attempts(again)) == ([0], [2])


async def test_a_record_comes_again_until_it_is_dead(tmp_path: Path) -> None:
    """By nack with its attempts counted, by release without; the dead wait for a person."""
    async with delivering(tmp_path, ChannelSettings(retry_ms=0, max_attempts=3)) as (partition, delivery):
        await append(partition, b"a", b"b")
        seen = []
        for verb in ("nack", "release", "nack"):
            jobs = await given(delivery, 1)
            seen.append((offsets(jobs), attempts(jobs)))
            await delivery.settle(CHANNEL, steps(verb, jobs, reason="no luck"))
        assert seen == [([0], [1]), ([0], [2]), ([0], [2])]
        jobs = await given(delivery, 1)
        assert attempts(jobs) == [3]
        await delivery.settle(CHANNEL, steps("nack", jobs, reason="no luck"))

        assert values(await given(delivery, 10)) == [b"b"]
        aside = partition.state.channels.by_id[CHANNEL].aside[0]
        assert (aside.why, aside.attempts, aside.reason) == (Why.DEAD, 3, "no luck")
        assert await delivery.retry_dead(CHANNEL, None) == 1
        jobs = await given(delivery)
        assert (values(jobs), attempts(jobs)) == ([b"a"], [1])


async def test_of_a_reason_so_many_bytes_are_kept(tmp_path: Path) -> None:
    """Characters of four bytes would make the table too large for the entry that moves the log's start."""
    async with delivering(tmp_path, ChannelSettings(max_attempts=1)) as (partition, delivery):
        kept = {"x" * 200: "x" * 200, "🙂" * 200: "🙂" * 50, "x" * 199 + "é": "x" * 199}
        for offset, (reason, wanted) in enumerate(kept.items()):
            await append(partition, b"a")
            await delivery.settle(CHANNEL, steps("nack", await given(delivery), reason=reason))
            assert partition.state.channels.by_id[CHANNEL].aside[offset].reason == wanted


async def test_a_stream_is_told_which_of_its_deliveries_are_over(tmp_path: Path) -> None:
    """Acknowledged, failed, released, moved past, or out under another number; at once if it is so."""
    async with delivering(tmp_path, ChannelSettings(retry_ms=3_600_000)) as (partition, delivery):
        await append(partition, *(b"%d" % i for i in range(6)))
        number = (await given(delivery, 5)).runs[0].delivery

        def of(*offsets: int) -> list[Named]:
            return [Named(0, offset, offset + 1, number) for offset in offsets]

        async def ended(left: list[int], wait_s: float) -> tuple[list[Named], int]:
            return await delivery.ended(CHANNEL, 1, of(*left), wait_s=wait_s)

        left = [0, 1, 2, 3, 4]
        ways: list[tuple[Verb, int]] = [("ack", 1), ("nack", 2), ("release", 0)]
        for verb, offset in ways:
            waits = asyncio.create_task(ended(left, 20.0))
            await asyncio.sleep(0)
            await delivery.settle(CHANNEL, [Step(verb, of(offset)[0])])
            assert (of(offset), 0) == await waits == await ended(left, 0.0)
            left.remove(offset)
        assert ([], 0) == await ended(left, 0.05)
        assert [0, 5] == offsets(await given(delivery))
        assert (of(0), 0) == await ended([0], 0.0)

        waits = asyncio.create_task(ended(left, 20.0))
        await asyncio.sleep(0)
        await delivery.seek(CHANNEL, 6, drop=True)
        assert (of(3, 4), 0) == await waits


async def test_a_stream_is_told_of_what_was_late(tmp_path: Path) -> None:
    """Also with the record, when that comes again before the stream has asked."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        first = await given(delivery, 1, timeout_ms=1_000)
        named = steps("ack", first)[0].named
        asked = asyncio.create_task(delivery.ended(CHANNEL, 1, [named], wait_s=20.0))

        assert ([named], 1) == await asked
        again = await given(delivery, 2)
        assert ([0, 1], [0]) == (offsets(again), list(again.late))
        await delivery.settle(CHANNEL, steps("nack", again))
        assert [] == list((await given(delivery, 2)).late)


async def test_of_a_stream_one_question_waits(tmp_path: Path) -> None:
    """A later one ends it: who asked has given up. Others go on, and all end with the delivery."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a")
        named = [steps("ack", await given(delivery))[0].named]
        asked = []
        for stream in (1, 2, 1):
            asked.append(asyncio.create_task(delivery.ended(CHANNEL, stream, named, wait_s=20.0)))
            await asyncio.sleep(0)
        assert ([], 0) == await asked[0]
        assert not asked[1].done() and not asked[2].done()

        delivery.stop()
        for each in asked[1:]:
            with pytest.raises(Problem, match="not_leader"):
                await each


async def test_a_consumer_whose_time_is_over_is_late(tmp_path: Path) -> None:
    """Its record goes to another under another delivery; only that one may end it."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a")
        slow = await given(delivery, timeout_ms=1_000)

        quick = await given(delivery)

        assert (offsets(quick), attempts(quick)) == ([0], [2])
        named = steps("ack", slow)[0].named
        assert await delivery.settle(CHANNEL, steps("ack", slow)) == (0, [named])
        assert await delivery.settle(CHANNEL, steps("ack", quick)) == (1, [])
        assert await delivery.settle(CHANNEL, steps("ack", slow)) == (1, []), "it is done, whoever did it"
        assert (await delivery.settle(CHANNEL, steps("nack", slow))).late == [named]


async def test_an_extended_record_stays_out(tmp_path: Path) -> None:
    """The time counts from the extension; without one the record comes again."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        both = await given(delivery, timeout_ms=3_000)  # by one entry: no second sync takes of its time
        first = Named(0, 0, 1, both.runs[0].delivery)
        assert await delivery.settle(CHANNEL, [Step("extend", first, timeout_ms=60_000)]) == (1, [])

        assert offsets(await given(delivery)) == [1]
        assert await delivery.settle(CHANNEL, [Step("ack", first)]) == (1, [])


@pytest.mark.parametrize("verb", ["ack", "extend"])
async def test_a_leader_remembers_no_deadline_of_what_is_over(tmp_path: Path, verb: Verb) -> None:
    """Else it would keep one of each delivery, and of each extension, for up to twelve hours."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"shorter", b"longer")
        shorter = await given(delivery, 1, timeout_ms=60_000)
        longer = await given(delivery, 1, timeout_ms=60_000)
        await delivery.settle(CHANNEL, steps("extend", shorter, timeout_ms=HOURS_MS))
        await delivery.settle(CHANNEL, steps("extend", longer, timeout_ms=HOURS_MS))
        jobs = longer
        for _ in range(3 * MIN_OUTDATED):
            if verb == "ack":
                await append(partition, b"a")
                jobs = await given(delivery, 1, timeout_ms=HOURS_MS)
            assert await delivery.settle(CHANNEL, steps(verb, jobs, timeout_ms=HOURS_MS)) == (1, [])
        queue = delivery._lines.by_id[CHANNEL].queue
        assert len(queue._deadlines) <= 2 * len(queue.channel.out) + MIN_OUTDATED

        await delivery.settle(CHANNEL, steps("extend", shorter, timeout_ms=SHORT_MS))
        assert offsets(await given(delivery)) == offsets(shorter)
        await nothing(delivery, 1.0)
        assert await delivery.settle(CHANNEL, steps("ack", longer)) == (1, [])


async def test_what_ends_while_the_leader_is_confirmed_is_not_extended(tmp_path: Path) -> None:
    """Its consumer is not to believe that it has more time."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        jobs = await given(delivery)
        first = Named(0, 0, 1, jobs.runs[0].delivery)

        extended, acknowledged = await asyncio.gather(
            delivery.settle(CHANNEL, steps("extend", jobs)), delivery.settle(CHANNEL, [Step("ack", first)])
        )

        assert ((1, [first]), (1, [])) == (extended, acknowledged)


async def test_a_request_that_ends_as_it_is_answered_is_given_nothing(tmp_path: Path) -> None:
    """Its records are out by then: they are released, and it costs no attempt."""
    async with delivering(tmp_path) as (partition, delivery):
        asked = [asyncio.create_task(delivery.receive(CHANNEL, wanted=1, wait_s=60.0)) for _ in range(2)]
        await asyncio.sleep(0)
        # Of two that are answered in one turn the second is cancelled before it runs.
        one, _ = [each.future for each in delivery._lines.by_id[CHANNEL].waiting]
        one.add_done_callback(lambda done: asked[1].cancel())
        await append(partition, b"a", b"b")
        await asyncio.wait(asked)

        assert [False, True] == [each.cancelled() for each in asked]
        jobs = await given(delivery, wait_s=0.5)
        assert ([1], [1]) == (offsets(jobs), attempts(jobs))


@pytest.mark.parametrize("opens", [True, False])
async def test_a_channel_begins_behind_a_start_of_the_log_that_is_not_committed_yet(
    tmp_path: Path, opens: bool
) -> None:
    """Opened, or moved back, while records are deleted: it gives out no record that is not there."""
    async with lone_partition(tmp_path) as partition:
        await append(partition, b"0", b"1")
        first = partition.log.last_index
        await append(partition, b"2", b"3")
        delivery = Delivery(partition)
        if not opens:
            await delivery.open(CHANNEL, "billing", 1, QUICK)
            await delivery.seek(CHANNEL, 4)
        moved = asyncio.ensure_future(partition.start_mover.propose(first))
        await asyncio.sleep(0)

        await (delivery.open(CHANNEL, "billing", 1, QUICK) if opens else delivery.seek(CHANNEL, 0))

        await moved
        assert values(await given(delivery)) == [b"2", b"3"]
        delivery.stop()


async def test_what_a_consumer_that_is_gone_was_given_is_released(tmp_path: Path) -> None:
    """A request that is cancelled, before or after its entry is committed, costs no attempt and no wait."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b", b"c")
        for turns in range(12):
            asked = asyncio.create_task(delivery.receive(CHANNEL, wanted=2, wait_s=60.0))
            for _ in range(turns):
                await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
            if not asked.cancelled():  # it was answered before
                jobs = asked.result()
                assert jobs is not None
                await delivery.settle(CHANNEL, steps("release", jobs))
            await delivery.settle(CHANNEL, [])

        jobs = await given(delivery)
        assert (sorted(offsets(jobs)), attempts(jobs)) == ([0, 1, 2], [1, 1, 1])


async def test_in_order_by_key_one_record_of_a_key_is_out(tmp_path: Path) -> None:
    """Others go on; a poisoned key stops itself alone, and goes on when its record is dead."""
    settings = ChannelSettings(order="key", retry_ms=0, max_attempts=2)
    async with delivering(tmp_path, settings) as (partition, delivery):
        await append(partition, b"0", b"1", b"2", b"3", b"4", keys=[b"k", b"k", b"l", None, b"k"])

        first = await given(delivery)
        assert values(first) == [b"0", b"2", b"3"]
        await nothing(delivery)
        await delivery.settle(CHANNEL, steps("nack", first)[:1])
        again = await given(delivery)
        assert (offsets(again)[:1], attempts(again)[:1]) == ([0], [2])
        await nothing(delivery)
        await delivery.settle(CHANNEL, steps("nack", again))

        one = await given(delivery)
        assert values(one) == [b"1"], "0 is dead, and 4 waits for 1"
        await delivery.settle(CHANNEL, steps("ack", one))
        assert values(await given(delivery)) == [b"4"]


async def test_a_dead_record_parks_its_key_if_the_channel_says_so(tmp_path: Path) -> None:
    """Until a person drops it, or has it tried again."""
    settings = ChannelSettings(order="key", retry_ms=0, max_attempts=1, on_dead="park")
    async with delivering(tmp_path, settings) as (partition, delivery):
        await append(partition, b"0", b"1", b"2", keys=[b"k", b"k", b"l"])
        jobs = await given(delivery)
        await delivery.settle(CHANNEL, steps("nack", jobs))
        await nothing(delivery)

        assert await delivery.drop_dead(CHANNEL, [0]) == 1

        assert values(await given(delivery)) == [b"1"]


async def test_a_filter_passes_over_what_it_does_not_take(tmp_path: Path) -> None:
    """By any tag and all headers; what is passed over is done, and nothing of it is kept."""
    settings = ChannelSettings(filter=Filter(tags=["red", "blue"], headers={"to": "me"}))
    async with delivering(tmp_path, settings) as (partition, delivery):
        mine = {"to": b"me"}
        await append(
            partition,
            *(b"0", b"1", b"2", b"3"),
            tags=["red", "green", "blue", "red"],
            headers=[mine, mine, {"to": b"you"}, mine],
        )
        jobs = await given(delivery)
        assert values(jobs) == [b"0", b"3"]
        await delivery.settle(CHANNEL, steps("ack", jobs))
        channel = partition.state.channels.by_id[CHANNEL]
        assert (channel.next, channel.open) == (4, 0)


async def test_a_channel_begins_ends_and_is_moved_where_it_is_told(tmp_path: Path) -> None:
    """`latest` leaves out what was there; `seek` gives out again, and settings change in flight."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        await delivery.open(8, "later", 2, ChannelSettings(start="latest"))
        assert await delivery.receive(8, wanted=1, wait_s=0) is None
        jobs = await given(delivery)
        await delivery.settle(CHANNEL, steps("ack", jobs))

        await delivery.seek(CHANNEL, 1)
        assert values(await given(delivery)) == [b"b"]
        await delivery.open(CHANNEL, "billing", 3, ChannelSettings(paused=True))
        await append(partition, b"c")
        await nothing(delivery)
        await delivery.open(CHANNEL, "billing", 2, QUICK)
        await nothing(delivery)  # an older version changes nothing
        await delivery.open(CHANNEL, "billing", 4, QUICK)
        assert values(await given(delivery)) == [b"c"]
        await delivery.close(8)
        with pytest.raises(Problem, match="not open"):
            await delivery.receive(8, wanted=1, wait_s=0)


async def test_what_is_out_survives_a_restart_with_its_whole_time(tmp_path: Path) -> None:
    """The next leader has it out, and takes its acknowledgement; it gives it to no other meanwhile."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b", b"c")
        jobs = await given(delivery, 2)
        await delivery.settle(
            CHANNEL,
            steps("nack", jobs, delay_ms=3_600_000)[:0]
            + [Step("nack", Named(0, 1, 2, jobs.runs[0].delivery), delay_ms=3_600_000)],
        )

    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        assert values(await given(delivery)) == [b"c"]
        channel = partition.state.channels.by_id[CHANNEL]
        assert (sorted(channel.out), sorted(channel.aside)) == ([0, 2], [1])
        named = Named(0, 0, 1, jobs.runs[0].delivery)
        assert await delivery.settle(CHANNEL, [Step("ack", named)]) == (1, [])
        delivery.stop()


async def test_a_channel_begins_where_a_cursor_stood_when_it_was_opened(tmp_path: Path) -> None:
    """The place is in the log: the cursor may move or go, and the next leader gives out from there."""
    start = CursorStart("billing")
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await append(partition, b"a", b"b", b"c", b"d")
        await set_cursor(partition, "billing", 2)
        await delivery.open(CHANNEL, "new", 1, ChannelSettings(start=start))
        await delivery.open(8, "other", 2, ChannelSettings(start=CursorStart("unknown")))
        await delivery.open(9, "later", 3, ChannelSettings(start=start), from_start=True)
        await set_cursor(partition, "billing", 4)
        await delivery.open(CHANNEL, "new", 4, ChannelSettings(start=start, retry_ms=0))
        delivery.stop()

    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await set_cursor(partition, "billing", None)
        found = partition.state.channels.by_id
        assert {CHANNEL: 2, 8: 0, 9: 0} == {number: each.next for number, each in found.items()}
        assert ChannelSettings(start=start, retry_ms=0) == found[CHANNEL].settings
        assert values(await given(delivery)) == [b"c", b"d"]
        delivery.stop()


async def set_cursor(partition: Partition, name: str, position: int | None) -> None:
    await partition.cursor_commands.set(
        name, position, expected=None, check=False, owner="", now_ms=partition.context.now_ms()
    )


async def test_a_channel_at_a_cursor_that_is_behind_begins_with_what_is_left(tmp_path: Path) -> None:
    async with lone_partition(tmp_path) as partition:
        delivery = Delivery(partition)
        await append(partition, b"a")
        first = partition.log.last_index
        await append(partition, b"b")
        await set_cursor(partition, "billing", 0)
        await partition.start_mover.propose(first)
        await delivery.open(CHANNEL, "new", 1, ChannelSettings(start=CursorStart("billing")))
        assert values(await given(delivery)) == [b"b"]
        delivery.stop()


async def test_what_the_start_of_the_log_takes_holds_no_key(tmp_path: Path) -> None:
    """A person deletes records that are aside, and not looked at yet: what is left of their keys comes."""
    async with delivering(tmp_path, ChannelSettings(order="key")) as (partition, delivery):
        await append(partition, b"0", b"1", keys=[b"k", b"k"])
        first = partition.log.last_index
        await append(partition, b"2", b"3", keys=[b"k", b"l"])
        jobs = await given(delivery, 1)
        await delivery.settle(CHANNEL, steps("nack", jobs, delay_ms=3_600_000))
        assert values(await given(delivery)) == [b"3"]
        await nothing(delivery)
        waiting = asyncio.create_task(given(delivery, 5))

        await partition.start_mover.propose(first)

        assert partition.start_offset == 2
        assert values(await waiting) == [b"2"]
        assert partition.state.channels.by_id[CHANNEL].lost == 2


async def test_a_channel_is_drained_when_that_is_committed(tmp_path: Path) -> None:
    """An acknowledgement that comes after all was committed that the leader looked at may be lost."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a")
        jobs = await given(delivery)
        await partition.propose_seal(SealRecord(7, 1, [Output(1, 0, 65_536, b"1" * 16)], "strict"))
        assert not await delivery.is_drained(CHANNEL)
        when_committed = partition.appends.when_committed

        async def seen(*arguments: Any, **named: Any) -> Receipt:
            receipt = await when_committed(*arguments, **named)
            partition.appends.propose(channel_entry([Acknowledged(CHANNEL, [0, 1])], synced=True), [])
            return receipt

        partition.appends.when_committed = seen  # type: ignore[method-assign,assignment]
        drained = await delivery.is_drained(CHANNEL)
        assert not (drained and partition.committed_index < partition.log.last_index)
        partition.appends.when_committed = when_committed  # type: ignore[method-assign]

        await delivery.settle(CHANNEL, steps("ack", jobs))
        assert await delivery.is_drained(CHANNEL)


async def test_so_much_may_be_out_and_no_more(tmp_path: Path) -> None:
    """`max_in_flight` bounds what is out; a request that names too many records is refused."""
    async with delivering(tmp_path, ChannelSettings(max_in_flight=3)) as (partition, delivery):
        await append(partition, *([b"x"] * 5))
        jobs = await given(delivery)
        assert offsets(jobs) == [0, 1, 2]
        await nothing(delivery)
        with pytest.raises(Problem, match="10,000 records at most"):
            await delivery.settle(CHANNEL, [Step("ack", Named(0, 0, 1 << 40, 1))])
        await delivery.settle(CHANNEL, steps("ack", jobs))
        assert offsets(await given(delivery)) == [3, 4]


@pytest.mark.parametrize("seed", range(6))
async def test_consumers_that_fail_stall_and_repeat_lose_nothing(tmp_path: Path, seed: int) -> None:
    """Each record is done once by a consumer that held it; in order by key, one of a key at a time."""
    chance = random.Random(seed)
    ordered = seed % 2 == 1
    settings = ChannelSettings(
        order="key" if ordered else "none",
        retry_ms=0,
        max_attempts=0,
        max_in_flight=50,
        timeout_ms=60_000 if ordered else 1_000,
    )
    count = 300
    async with delivering(tmp_path, settings) as (partition, delivery):
        done: set[int] = set()
        order: dict[bytes, list[int]] = {}
        held: dict[bytes, int] = {}

        async def produce() -> None:
            at = 0
            while at < count:
                size = min(chance.randint(1, 40), count - at)
                keys = [b"k%d" % chance.randint(0, 9) if chance.random() < 0.9 else None for _ in range(size)]
                await append(partition, *(b"%d" % i for i in range(at, at + size)), keys=keys)
                at += size

        async def consume() -> None:
            while len(done) < count:
                jobs = await delivery.receive(CHANNEL, wanted=chance.randint(1, 20), wait_s=0.2)
                if jobs is None:
                    continue
                keys = {
                    batch.base_offset + at: key
                    for batch in map(Batch, jobs.frames)
                    for at, key in enumerate(batch.keys or [None] * len(batch))
                }
                for run in jobs.runs:
                    for offset in range(run.first, run.end):
                        named = Named(0, offset, offset + 1, run.delivery)
                        verb: Any = chance.choice([*["ack"] * 12, *["nack"] * 4, *["release"] * 4, "forget"])
                        if ordered and verb == "forget":
                            verb = "nack"
                        key = keys[offset]
                        if verb == "forget":
                            continue  # its time runs out
                        if ordered and key is not None:
                            assert held.setdefault(key, offset) == offset, f"two of {key!r} are out"
                        if chance.random() < 0.2:
                            await asyncio.sleep(0)
                        settled = await delivery.settle(CHANNEL, [Step(verb, named)] * chance.randint(1, 2))
                        if ordered and key is not None:
                            held.pop(key, None)
                        if verb == "ack" and not settled.late and offset not in done:
                            done.add(offset)
                            if key is not None:
                                order.setdefault(key, []).append(offset)

        async with asyncio.timeout(60):
            await asyncio.gather(produce(), *(consume() for _ in range(5)))
        assert done == set(range(count))
        if ordered:
            assert all(found == sorted(found) for found in order.values())
        channel = partition.state.channels.by_id[CHANNEL]
        assert (channel.open, channel.next) == (0, count)


async def test_what_becomes_of_records_is_counted_by_channel_until_that_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what came again later than it was due; another channel has its own counts, and none is kept."""
    monkeypatch.setattr("laminar.node.channels.giver.OVERDUE_MS", 20)
    async with lone_partition(tmp_path) as partition:
        deliveries = Deliveries()
        delivery = deliveries.of(partition)
        await delivery.open(CHANNEL, "billing", 1, ChannelSettings(retry_ms=0, max_attempts=2))
        await delivery.open(8, "idle", 1, QUICK)
        await append(partition, b"a", b"b", b"c")
        jobs = await given(delivery)
        await delivery.settle(CHANNEL, steps("ack", jobs)[:1])
        assert deliveries.counts.rows() == [("t", "billing", 3, 0, 0, 0, 0)]

        await append(partition, b"d", b"e")
        jobs = await given(delivery)
        await delivery.settle(CHANNEL, steps("nack", jobs))
        late = await delivery.settle(CHANNEL, steps("nack", jobs))
        assert late.done == 0
        await asyncio.sleep(0.05)  # it is the time that counts
        again = await given(delivery)
        await delivery.settle(CHANNEL, steps("nack", again))
        assert attempts(again) == [2, 2]
        assert deliveries.counts.rows() == [("t", "billing", 3, 2, 2, 2, 2)]

        await delivery.close(CHANNEL)
        deliveries.check([partition])
        assert deliveries.counts.rows() == []
        deliveries.stop()


async def test_a_full_disk_has_a_reserve_for_those_who_work_off_what_is_there(tmp_path: Path) -> None:
    """Records are refused before. What is acknowledged is taken always: it is of what was given out."""

    def full() -> Problem:
        return Problem("disk_full", outcome="not_applied")

    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        partition.appends.refusal = full
        with pytest.raises(Problem) as refused:
            await append(partition, b"c")
        assert refused.value.code == "disk_full"

        jobs = await given(delivery, 1)
        await partition.cursor_commands.set("c", 1, expected=None, check=False, owner="", now_ms=1)

        partition.appends.consumer_refusal = full
        assert await delivery.settle(CHANNEL, steps("ack", jobs)) == (1, [])
        with pytest.raises(Problem) as refused:
            await given(delivery, 1)
        assert refused.value.code == "disk_full"
        with pytest.raises(Problem) as refused:
            partition.cursor_commands.set("c", 2, expected=None, check=False, owner="", now_ms=2)
        assert refused.value.code == "disk_full"
        partition.appends.consumer_refusal = lambda: None
        assert offsets(await given(delivery)) == [1]


async def test_a_new_leader_knows_of_which_keys_a_record_is_out(tmp_path: Path) -> None:
    """What its memory lacks is in the log: else two records of a key are out."""
    async with delivering(tmp_path, ChannelSettings(order="key")) as (partition, delivery):
        await append(partition, b"a", b"b", b"c", keys=[b"k", b"k", b"other"])
        assert offsets(await given(delivery, 1)) == [0]
        delivery.stop()

        later = Delivery(partition)
        assert offsets(await given(later)) == [2]
        assert 1 in partition.state.channels.by_id[CHANNEL].aside
        later.stop()


async def test_what_waited_for_a_key_waits_again_when_an_earlier_one_is_replayed(tmp_path: Path) -> None:
    """It was free to go when the dead one left its key, and no consumer has taken it."""
    settings = ChannelSettings(order="key", max_attempts=1)
    async with delivering(tmp_path, settings) as (partition, delivery):
        await append(partition, b"a", b"b", keys=[b"k", b"k"])
        first = await given(delivery, 1)
        await nothing(delivery)
        assert partition.state.channels.by_id[CHANNEL].aside[1].why is Why.BUSY
        await delivery.settle(CHANNEL, steps("nack", first))
        assert await delivery.retry_dead(CHANNEL, None) == 1

        replayed = await given(delivery)
        assert offsets(replayed) == [0]
        await nothing(delivery)
        await delivery.settle(CHANNEL, steps("ack", replayed))
        assert offsets(await given(delivery)) == [1]


async def test_a_change_of_settings_gives_no_more_time_to_what_is_out(tmp_path: Path) -> None:
    """A consumer that is gone would keep its jobs as long as something is changed again and again."""
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a")
        await given(delivery, timeout_ms=SHORT_MS)
        stopped = asyncio.Event()

        async def change() -> None:
            version = 1
            while not stopped.is_set():
                version += 1
                await delivery.open(CHANNEL, "billing", version, QUICK)
                await asyncio.sleep(SHORT_MS / 5_000)

        changing = asyncio.create_task(change())
        again = await given(delivery, wait_s=5 * SHORT_MS / 1_000)
        stopped.set()
        await changing
        assert (offsets(again), attempts(again)) == ([0], [2])


async def test_more_time_that_was_given_is_kept_when_settings_change(tmp_path: Path) -> None:
    async with delivering(tmp_path) as (partition, delivery):
        await append(partition, b"a", b"b")
        jobs = await given(delivery, timeout_ms=SHORT_MS)
        longer = Step("extend", Named(0, 0, 1, jobs.runs[0].delivery), timeout_ms=HOURS_MS)
        assert await delivery.settle(CHANNEL, [longer]) == (1, [])
        await delivery.open(CHANNEL, "billing", 2, QUICK)

        assert offsets(await given(delivery)) == [1]
        await nothing(delivery)
