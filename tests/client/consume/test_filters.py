"""Readers and members that choose records by tag and headers: by text, at their true offsets."""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from typing import Any

import pytest

import laminar
from laminar import aio
from laminar.batch import tag_bit
from laminar.testing.nodes import serve

PARTITIONS = 4
WANTED = "paid"
# Another tag with the same bit: a node cannot tell a batch with it from one with the tag.
TWIN = next(tag for tag in map("t{}".format, count()) if tag_bit(tag) == tag_bit(WANTED))
FAR = next(tag for tag in map("f{}".format, count()) if tag_bit(tag) != tag_bit(WANTED))


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """One node of two shards."""
    with serve(shards=2) as found:
        yield found


@pytest.fixture
def topic(url: str, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own."""
    name = re.sub(r"[^A-Za-z0-9_]+", "-", request.node.name)
    with laminar.connect(url) as client:
        client.create_topic(name, partitions=PARTITIONS)
    return str(name)


async def eventually(condition: Callable[[], Awaitable[object]]) -> None:
    """Wait for what members do in their own time."""
    deadline = time.monotonic() + 60
    while not await condition():
        assert time.monotonic() < deadline, "not within 60 s"
        await asyncio.sleep(0.02)


async def mixed(topic: aio.Topic[bytes], rounds: int) -> None:
    """Of each partition: a batch without the tag's bit, one with the twin only, one of all."""
    for _ in range(rounds):
        for tags in ((FAR, None), (TWIN, TWIN), (None, WANTED, TWIN, WANTED, FAR)):
            async with topic.producer() as producer:
                for partition in range(PARTITIONS):
                    for tag in tags:
                        fields = {"by": b"card"} if tag == WANTED else {"by": b"cash"}
                        producer.send(b"v", partition=partition, tag=tag, headers=fields)


def places(records: Any) -> dict[int, list[int]]:
    """By partition the offsets."""
    found = defaultdict(list)
    for record in records:
        found[record.partition].append(record.offset)
    return {partition: found[partition] for partition in sorted(found)}


EVERY = range(PARTITIONS)


@pytest.mark.parametrize(
    ("chosen", "offsets"),
    [
        ({"tag": WANTED}, [5, 7, 14, 16]),
        ({"tag": TWIN}, [2, 3, 6, 11, 12, 15]),
        ({"tag": "none"}, []),
        ({"headers": {"by": "card"}}, [5, 7, 14, 16]),
        ({"headers": {"by": b"cash"}, "tag": TWIN}, [2, 3, 6, 11, 12, 15]),
        ({"headers": {"by": "card", "of": "x"}}, []),
        ({"headers": {"by": "card"}, "tag": TWIN}, []),
    ],
    ids=str,
)
async def test_what_is_chosen_is_read_at_its_own_offsets(
    url: str, topic: str, chosen: Any, offsets: list[int]
) -> None:
    """Also in small fetches; and what is left out is passed."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        await mixed(handle, 2)
        for fetch_bytes in (1 << 20, 300):
            reader = handle.read(fetch_bytes=fetch_bytes, **chosen)
            found = places([record async for record in reader])
            assert found == (dict.fromkeys(EVERY, offsets) if offsets else {})
            assert reader.positions == dict.fromkeys(EVERY, 18) == reader.ends
        batches = [batch async for batch in handle.read(partitions=[1], **chosen).batches()]
        table = await handle.read(partitions=[1], **chosen).to_arrow()

    assert offsets == [offset for batch in batches for offset in batch.offsets]
    assert [b"v"] * len(offsets) == [value for batch in batches for value in batch.values]
    assert len(offsets) == sum(map(len, batches)) == sum(len(batch.keys) for batch in batches)
    assert [0, *(batch.next_offset for batch in batches)] == [*(each.start_offset for each in batches), 18]
    assert offsets == table["offset"].to_pylist()


@pytest.mark.parametrize("chosen", [{"tag": 7}, {"headers": {"by": 7}}, {"headers": {7: "by"}}], ids=str)
async def test_a_filter_that_no_record_can_pass_is_refused(url: str, topic: str, chosen: Any) -> None:
    async with aio.connect(url) as client:
        for use in (client.topic(topic).read, lambda **how: client.topic(topic).subscribe("g", **how)):
            with pytest.raises(laminar.ConfigError, match=next(iter(chosen))):
                use(**chosen)


async def test_a_cursor_passes_what_is_left_out_and_no_record_in_hand(url: str, topic: str) -> None:
    """It is committed within the loop: behind the record, and behind what follows up to the next one."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        await mixed(handle, 2)
        committed = []
        async with handle.read(cursor="c", partitions=[0], tag=WANTED) as reader:
            async for _ in reader:
                await reader.commit()
                committed.append((await handle.cursor("c"))[0])
        after = await handle.cursor("c")
        again = [record async for record in handle.read(cursor="c", partitions=[0])]

    assert ([6, 13, 15, 18], {0: 18}, []) == (committed, after, again)


@pytest.mark.parametrize("follow", [False, True], ids=str)
def test_a_loop_that_breaks_off_goes_on_behind_the_record(url: str, topic: str, follow: bool) -> None:
    """Without a loop, where what was read ahead is dropped in between."""
    with laminar.connect(url) as client:
        handle = client.topic(topic)
        asyncio.run(_fill(url, topic))
        reader = handle.read(tag=WANTED, partitions=[2], follow=follow, cursor="c")
        found = []
        for _ in range(4):
            for record in reader:
                found.append((record.offset, reader.positions[2]))
                break
        reader.commit()
        reader.close()

        assert ([(5, 6), (7, 13), (14, 15), (16, 18)], {2: 18}) == (found, handle.cursor("c"))


async def _fill(url: str, topic: str) -> None:
    async with aio.connect(url) as client:
        await mixed(client.topic(topic), 2)


async def test_what_passes_while_nobody_takes_is_one_batch(url: str, topic: str) -> None:
    """The queue does not grow with what is left out; and a followed filter asks once for what came."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        reader = handle.read(tag=WANTED, partitions=[0], follow=True)
        waiting = asyncio.ensure_future(reader.next_batch())
        await handle.append(b"first", partition=0, tag=WANTED)
        first = await waiting
        before = dict(client.session.reads_by_node)
        for _ in range(50):
            await handle.append(b"x", partition=0, tag=FAR)
        end = (await handle.offsets())[0]

        async def there() -> bool:
            newest = reader._fetchers._newest.get(0)
            return newest is not None and newest.next_offset == end

        await eventually(there)
        asked = sum(client.session.reads_by_node.values()) - sum(before.values())
        ready = await reader.take_ready()
        await reader.close()

    assert first is not None and (0, 1, 1) == (first.start_offset, first.next_offset, len(first))
    assert [(1, 51, 0)] == [(each.start_offset, each.next_offset, len(each)) for each in ready]
    assert asked <= 51


async def test_a_member_that_gets_nothing_moves_its_group_on(url: str, topic: str) -> None:
    """Its loop's body never runs, so nobody else could commit that; and it reads nothing twice."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        await mixed(handle, 3)
        async with handle.subscribe("g", tag="none") as records:
            waiting = asyncio.ensure_future(anext(aiter(records)))
            await eventually(lambda: _lag_is(handle, 0))
            before = sum(client.session.reads_by_node.values())
            await asyncio.sleep(1.5)
            idle = sum(client.session.reads_by_node.values()) - before
            await handle.append(b"more", partition=0)
            await eventually(lambda: _lag_is(handle, 0))
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            positions = await handle.cursor("g")

    assert ({0: 28, 1: 27, 2: 27, 3: 27}, 0) == (positions, idle)


async def _lag_is(handle: aio.Topic[bytes], lag: int) -> bool:
    described = await handle.describe_cursor("g")
    return len(described.positions) == PARTITIONS and described.total_lag == lag


async def test_a_record_in_hand_is_not_passed(url: str, topic: str) -> None:
    """However much after it is left out: it is committed by its program, and with it all that was passed."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        await handle.append(b"job", partition=0, tag=WANTED)
        async with handle.subscribe("g", tag=WANTED, commit_ends=False) as records:
            stream = aiter(records)
            assert (0, 0) == ((record := await anext(stream)).partition, record.offset)
            waiting = asyncio.ensure_future(anext(stream))
            for _ in range(3):
                await handle.append(b"x", partition=0, tag=FAR)
                await handle.append(b"x", partition=1, tag=FAR)
                await asyncio.sleep(1.1)

            async def passed() -> bool:
                return (await handle.cursor("g")).get(1) == 3 and records._held.leases[0].seen == 4

            await eventually(passed)
            held = (await handle.cursor("g"))[0]
            await records.commit()
            freed = (await handle.cursor("g"))[0]
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    assert (0, 4) == (held, freed)


async def test_members_come_and_go_over_a_split(url: str, topic: str) -> None:
    """Each chosen record once for its group, also of partitions that end with what nobody reads."""
    async with aio.connect(url) as client:
        handle = client.topic(topic)
        seen: list[tuple[int, int]] = []
        wanted: list[tuple[int, int]] = []

        uncommitted: set[str] = set()

        async def member(name: str) -> None:
            async with handle.subscribe("g", tag=WANTED, session=20.0) as records:
                async for record in records:
                    assert record.tag == WANTED
                    uncommitted.add(name)
                    seen.append((record.partition, record.offset))
                    await records.commit()
                    uncommitted.discard(name)

        async def write(rounds: int) -> None:
            for number in range(rounds):
                for tag in (WANTED, FAR, TWIN, None, None):
                    receipt = await handle.append(b"v", key=b"k%d" % number, tag=tag)
                    if tag == WANTED:
                        wanted.append((receipt.partition, receipt.offset))

        async def all_read() -> bool:
            return len(seen) >= len(wanted)

        async def first_has_committed() -> bool:
            return "first" not in uncommitted

        async def drained() -> bool:
            return (await handle.describe_cursor("g")).total_lag == 0

        members = [asyncio.ensure_future(member("first"))]
        await write(20)
        members.append(asyncio.ensure_future(member("second")))
        await handle.split(0)
        await write(20)
        # Else the record in its hand is read again.
        await eventually(first_has_committed)
        members[0].cancel()
        await asyncio.gather(members[0], return_exceptions=True)
        await handle.merge([1, 2])
        await write(20)
        members.append(asyncio.ensure_future(member("third")))
        await eventually(all_read)
        await eventually(drained)
        ended = (await handle.route()).ends
        positions = await handle.cursor("g")
        for task in members:
            task.cancel()
        failures = await asyncio.gather(*members, return_exceptions=True)

    assert all(isinstance(each, asyncio.CancelledError) for each in failures), failures
    assert sorted(wanted) == sorted(set(seen)) == sorted(seen)
    assert ended == {number: positions[number] for number in ended}
