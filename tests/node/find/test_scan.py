"""A search of a replica finds what a loop over all that fetches show finds, in whatever steps it is made."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from laminar.batch import Batch, Codec, Record, build
from laminar.batch.header import Header
from laminar.http.api.problems import Problem
from laminar.node.delay.publisher import Publisher
from laminar.node.find import scan as scan_module
from laminar.node.find.examine import Found, Skipped, Wanted
from laminar.node.find.pace import MOST_WAITING, Cost, Pace
from laminar.node.find.scan import NO_END, Scanned, Span, scan
from laminar.node.find.where import JsonEquals, Where
from laminar.node.partition.partition import Partition
from laminar.node.partition.retention import Rules
from laminar.node.transactions.participant import Batch as Transaction
from laminar.node.transactions.participant import Participant
from tests.node.alone import lone_partition
from tests.node.partition.test_retention import At, keeper, settled_start, until

FAST = 1 << 40
ANY = Wanted(Where(), newest=False, limit=1000, value_bytes=100, most_bytes=1 << 20)
WORDS = ("ab", "b", "abc", "é", "", "needle", "x" * 300)


def frame_of(rng: random.Random, count: int) -> bytearray:
    """A batch of records, some of them with keys, tags, headers, trace ids and JSON."""

    def some(make: Callable[[], Any]) -> list[Any]:
        return [make() if rng.random() < 0.6 else None for _ in range(count)]

    values = [
        msgspec.json.encode({"a": {"id": rng.choice([1, 7, 7.0, True, "7", None])}, "w": rng.choice(WORDS)})
        if rng.random() < 0.7
        else rng.choice([b"plain needle", b"\xff\xfe", b"", b"x" * 500])
        for _ in range(count)
    ]
    return build(
        values,
        keys=some(lambda: rng.choice(WORDS).encode()),
        tags=some(lambda: rng.choice(WORDS[:4])),
        headers=some(lambda: {rng.choice("nm"): rng.choice(WORDS[:4]).encode()}),
        trace_ids=some(lambda: bytes([rng.randrange(3)]) * 16),
        codec=rng.choice([Codec.NONE, Codec.ZSTD]),
    )


def rot(path: str, position: int) -> None:
    """Change bytes of a file."""
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(b"rot")


async def append(partition: Partition, frame: bytearray) -> None:
    await partition.appends.append_frame(frame, Header.unpack(frame))


async def fill(partition: Partition, rng: random.Random, batches: int) -> None:
    """Append batches; some by transactions, of which one is never published and one dropped."""
    participant = Participant(partition)
    for number in range(batches):
        frame = frame_of(rng, rng.choice([1, 1, 3, 40]))
        if rng.random() < 0.7:
            await append(partition, frame)
            continue
        transaction = Transaction(sink=number.to_bytes(16, "big"), number=0, epoch=0)
        await participant.stage(transaction, 0, frame, Header.unpack(frame))
        other = frame_of(rng, 2)
        await participant.stage(transaction, 1, other, Header.unpack(other))
        if rng.random() < 0.3:
            continue
        await append(partition, frame_of(rng, 2))
        await participant.prepare(transaction, [0, 1])
        await participant.publish(transaction)


async def shown(partition: Partition) -> list[Record]:
    """All records that fetches show."""
    records: list[Record] = []
    while not records or records[-1].offset + 1 < partition.end_offset:
        at = records[-1].offset + 1 if records else partition.start_offset
        frames = await partition.reader.frames(at, max_bytes=1 << 16)
        records += [each for frame in frames for each in Batch(frame).records(at, None)]
    return records


def is_wanted(record: Record, where: Where) -> bool:
    """The plain rule, for each record alone."""
    found = where.key in (None, record.key)
    found &= where.trace_id in (None, record.trace_id)
    found &= where.tag in (None, record.tag)
    found &= all(record.headers.get(name) == value for name, value in where.headers.items())
    found &= where.contains is None or where.contains in record.value
    if where.json is not None:
        try:
            value = record.json()
            for step in where.json.path:
                value = value[step]
            same = isinstance(value, bool) == isinstance(where.json.equals, bool)
            found &= same and value == where.json.equals
        except (ValueError, KeyError, TypeError):
            return False
    return found


def questions(rng: random.Random) -> Iterator[Where]:
    """Searches, each for one thing or for two."""
    single: list[dict[str, Any]] = [
        {"key": rng.choice(WORDS).encode()},
        {"key": b"no such key"},
        {"tag": rng.choice(WORDS[:4])},
        {"trace_id": bytes([rng.randrange(4)]) * 16},
        {"headers": {"n": rng.choice(WORDS[:4]).encode()}},
        {"contains": rng.choice([b"needle", b"x", "é".encode(), b"\xff", b'"w"'])},
        {"json": JsonEquals(["a", "id"], rng.choice([1, 7, True, "7", None, 3.5]))},
        {},
    ]
    for first, second in itertools.product(single, [{}, rng.choice(single)]):
        yield Where(**(first | second))


async def search(
    partition: Partition, wanted: Wanted, low: int, high: int, *, until_s: Callable[[], float]
) -> tuple[list[Found], list[Skipped]]:
    """Search in steps, each with what the one before has left."""
    found: list[Found] = []
    skipped: list[Skipped] = []
    pace = Pace(FAST)
    for _ in range(10_000):
        span = Span(0, partition.replica.group, low, high)
        answer = await scan(partition, span, wanted, pace, until_s=until_s())
        assert not answer.ended and len(answer.found) <= wanted.limit
        assert low <= answer.low <= answer.high <= high
        assert (answer.low, answer.high) != (low, high), "a step has not moved"
        found += answer.found
        skipped += answer.skipped
        low, high = answer.low, answer.high
        if low == high:
            return found, skipped
    raise AssertionError("the search does not end")


@pytest.mark.parametrize("seed", range(4))
async def test_random_steps_find_what_a_loop_over_all_finds(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oldest first and newest first, whatever is asked for, with slices of any size."""
    rng = random.Random(seed)
    monkeypatch.setattr(scan_module, "SLICE_BYTES", rng.choice([200, 3_000, 1 << 20]))
    monkeypatch.setattr(scan_module, "SLICE_FRAMES", rng.choice([1, 4, 256]))
    monkeypatch.setattr(scan_module, "FIRST_WINDOW", rng.choice([1, 50, 1024]))
    async with lone_partition(tmp_path) as partition:
        await fill(partition, rng, 40)
        records = await shown(partition)
        loop = asyncio.get_running_loop()
        for where in questions(rng):
            low = rng.randrange(len(records))
            high = rng.randrange(low, len(records)) + 1
            for newest in (False, True):
                wanted = Wanted(where, newest, rng.choice([1, 7, 1000]), 100, rng.choice([1, 2_000, 1 << 20]))
                found, skipped = await search(
                    partition, wanted, low, high, until_s=lambda: loop.time() + rng.choice([-1, 0.001, 9])
                )
                expected = [each.offset for each in records[low:high] if is_wanted(each, where)]
                assert expected[:: -1 if newest else 1] == [each.offset for each in found], where
                assert not skipped


async def test_a_record_is_shown_as_a_fetch_shows_it(tmp_path: Path) -> None:
    """And no more of its value than was asked for, cut between two characters."""
    async with lone_partition(tmp_path) as partition:
        frame = build(
            ["éé".encode(), b"\xff\xff", b""],
            keys=[b"k", None, b"\xff"],
            tags=["t", None, None],
            headers=[{"h": b"v"}, None, None],
            trace_ids=[b"\x11" * 16, None, None],
        )
        await append(partition, frame)
        wanted = msgspec.structs.replace(ANY, value_bytes=3)
        found, _ = await search(partition, wanted, 0, 3, until_s=lambda: 1e9)

    first, second, third = (msgspec.json.decode(each.document) for each in found)
    assert first.pop("timestamp") and second.pop("timestamp") and third.pop("timestamp")
    assert first == {
        "partition": 0,
        "offset": 0,
        "key": "k",
        "tag": "t",
        "headers": {"h": "v"},
        "trace_id": "11" * 16,
        "size": 4,
        "value": "é",
        "truncated": True,
    }
    assert second == {"partition": 0, "offset": 1, "size": 2, "value_base64": "//8=", "truncated": False}
    assert third == {
        "partition": 0,
        "offset": 2,
        "key_base64": "/w==",
        "size": 0,
        "value": "",
        "truncated": False,
    }


async def test_only_what_is_published_is_found(tmp_path: Path) -> None:
    """Not what is staged, delayed or cancelled; and a delayed record once it is due."""
    async with lone_partition(tmp_path) as partition:
        publisher = Publisher(partition)
        partition.appends.on_delayed = publisher.wake
        publisher.wake()
        staged = build([b"needle staged"])
        transaction = Transaction(sink=b"s" * 16, number=0, epoch=0)
        await Participant(partition).stage(transaction, 0, staged, Header.unpack(staged))
        now_ms = partition.replica.wall_ms()
        await append(partition, build([b"needle later"], delivery_times=[now_ms + 3_600_000]))
        await append(partition, build([b"needle soon"], delivery_times=[now_ms + 100]))
        await append(partition, build([b"needle now"]))
        assert await partition.reader.wait_past(1, 20.0)
        wanted = msgspec.structs.replace(ANY, where=Where(contains=b"needle"))
        found, _ = await search(partition, wanted, 0, 2, until_s=lambda: 1e9)
        publisher.stop()

    values = sorted(msgspec.json.decode(each.document)["value"] for each in found)
    assert values == ["needle now", "needle soon"]


async def test_what_is_not_searched_is_said(tmp_path: Path) -> None:
    """What retention took; and values that cannot be looked into."""
    async with lone_partition(tmp_path) as partition:
        for _ in range(12):
            await append(partition, build([b"x" * 300_000]))
        await append(partition, build([b'{"a": "%b"}' % (b"y" * (1 << 20))]))
        keeper(At(), Rules(retention_bytes=2 << 20)).check(partition)
        await settled_start(partition)
        start = partition.start_offset
        assert 0 < start < 12
        for newest in (False, True):
            wanted = msgspec.structs.replace(ANY, where=Where(json=JsonEquals(["a"], "y")), newest=newest)
            found, skipped = await search(partition, wanted, 0, 13, until_s=lambda: 1e9)
            assert not found
            assert skipped == [Skipped(0, start, "expired"), Skipped(12, 13, "unreadable")]


@pytest.mark.parametrize("newest", [False, True])
async def test_a_scan_ends_at_damage_and_names_it(tmp_path: Path, newest: bool) -> None:
    """What lies before it, in the order of the search, is looked at; what follows is left."""
    async with lone_partition(tmp_path) as partition:
        for _ in range(9):
            await append(partition, build([b"x" * 300_000, b"y"]))
        await until(lambda: partition.log.read_nowait(3, 3, max_bytes=1) is not None)
        (first, *_), row = partition.log.segment_first_indexes, partition.log.index_entry(4)
        path = partition.log.segment_of(first).file.path
    async with lone_partition(tmp_path) as partition:
        await until(lambda: partition.end_offset == 18)
        rot(path, row.position + row.size - 100)
        wanted = msgspec.structs.replace(ANY, newest=newest)
        span = Span(0, partition.replica.group, 0, 18)
        answer = await scan(partition, span, wanted, Pace(FAST), until_s=1e9)
        bad = row.base_offset, row.base_offset + 2

    assert (answer.ended, answer.damaged) == ("damaged", bad)
    expected = range(17, bad[1] - 1, -1) if newest else range(bad[0])
    assert [each.offset for each in answer.found] == list(expected)
    assert (answer.low, answer.high) == ((0, bad[1]) if newest else (bad[0], 18))


async def test_a_replica_says_why_it_goes_no_further(tmp_path: Path) -> None:
    """It is another partition's, it lags behind, or it is at its end for now."""
    async with lone_partition(tmp_path) as partition:
        await append(partition, build([b"a", b"b"]))
        group, pace = partition.replica.group, Pace(FAST)

        async def scanned(group: bytes, high: int, *, newest: bool = False) -> Scanned:
            wanted = msgspec.structs.replace(ANY, newest=newest)
            return await scan(partition, Span(0, group, 0, high), wanted, pace, until_s=1e9)

        assert (await scanned(b"x" * 16, 2)).ended == "absent"
        behind = await scanned(group, 5)
        assert (behind.ended, behind.low, len(behind.found)) == ("behind", 2, 2)
        newest = await scanned(group, 5, newest=True)
        assert (newest.ended, newest.high, newest.found) == ("behind", 5, [])
        following = await scanned(group, NO_END)
        assert (following.ended, following.low, following.is_at_end) == ("", 2, True)
        assert not following.is_final


async def test_more_scans_than_may_wait_are_refused() -> None:
    """One reads, eight take turns with it, and the next hears 503."""
    pace = Pace(FAST)
    async with asyncio.TaskGroup() as group:
        ended = asyncio.Event()

        async def wait() -> None:
            async with pace.admitted():
                await ended.wait()

        for _ in range(MOST_WAITING + 1):
            group.create_task(wait())
        await asyncio.sleep(0)
        with pytest.raises(Problem) as refused:
            async with pace.admitted():
                pass
        ended.set()
    assert (refused.value.code, refused.value.limit) == ("overloaded", MOST_WAITING + 1)
    async with pace.admitted():
        pass


async def test_slices_are_read_at_the_rate_that_is_set() -> None:
    """The next turn begins when the rate allows it."""
    pace, loop = Pace(1 << 20), asyncio.get_running_loop()
    began_s = loop.time()
    for _ in range(2):
        cost = Cost()
        async with pace.turn(cost):
            cost.bytes = 1 << 17
    assert loop.time() - began_s >= 0.24
    assert pace.bytes == 1 << 18
