"""One log: what it takes, what it refuses, what it finds, and what it reads from disk."""

from __future__ import annotations

import asyncio
import hashlib
import random
from itertools import count, takewhile
from typing import Any

import pytest

from laminar.batch import Batch, Kind, build_control, stamp
from laminar.log import BrokenChain, DamagedRange, EntriesTrimmed, LogStart, RealDisk, Storage
from laminar.log.segment.segment_file import index_name, segment_name
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import LOGS, History, contents, frame_for, in_segments, open_inline, run


async def test_frames_come_back_whole_and_in_order(storage: Storage) -> None:
    """From memory, from files, over segment borders; a read gives one frame at least, and keeps its limit."""
    log = storage.create_log("t-0")
    frames = []
    for number in range(100):
        frames.append(frame_for(log, [b"%d" % number * 40, b"second"]))
        log.append(frames[-1:])
    assert frames == log.read_nowait(1, 100, max_bytes=1 << 20)
    await in_segments(storage)

    found: list[bytes] = []
    while len(found) < 100:
        part = await log.read(len(found) + 1, 100, max_bytes=3000)
        assert sum(map(len, part)) <= 3000
        found += [bytes(frame) for frame in part]

    assert frames == found
    assert 1 == len(await log.read(50, 60, max_bytes=1))
    assert len(log.segment_first_indexes) > 5
    assert hashlib.sha256(b"".join(frames[:77])).hexdigest() == await log.digest(77)


async def test_durability_is_counted_per_entry(storage: Storage) -> None:
    """`durable_index` moves with the sync, and a sync covers what was recorded before its call."""
    log = storage.create_log("t-0")
    log.append([frame_for(log, [b"a"])])
    assert 0 == log.durable_index
    first = storage.sync()
    log.append([frame_for(log, [b"b"])])
    await first
    assert log.durable_index >= 1
    await storage.sync()
    assert 2 == log.durable_index
    log.append([frame_for(log, [b"c"])])
    assert 2 == log.durable_index


async def test_what_counts_is_not_kept_where_no_one_asks_for_it(storage: Storage) -> None:
    """A log that is only appended to holds no more than what is under way."""
    log = storage.create_log("t-0")
    for _ in range(5):
        log.append([frame_for(log, [b"a"])])
        await storage.sync()
    assert 1 == len(log._undurable)
    assert 5 == log.durable_index
    assert not log._undurable


def test_a_completion_never_confirms_an_overwrite() -> None:
    """ABA: the frame under way holds another entry at the same index than the log by then does."""

    class Slow:
        def __init__(self, name: str) -> None:
            self.tasks: list[object] = []

        def submit(self, task: object) -> None:
            self.tasks.append(task)

        def close(self) -> None:
            return None

    async def main() -> None:
        made: dict[str, Slow] = {}

        def slow(name: str) -> Slow:
            return made.setdefault(name, Slow(name))

        disk = FaultDisk()
        storage = Storage.open(disk, "d/h", LOGS, workers=slow, rng=random.Random(1))
        log = storage.create_log("t-0", 1)
        log.append([frame_for(log, [b"a"]), frame_for(log, [b"a"])][:1])
        log.append([frame_for(log, [b"old"])])
        done = storage.sync()
        await asyncio.sleep(0)
        log.truncate(2)
        log.append([frame_for(log, [b"new"], term=2)])
        again = storage.sync()
        task = made["journal"].tasks.pop(0)
        assert callable(task)
        task()
        await done
        assert 1 == log.durable_index
        assert not again.done()
        task = made["journal"].tasks.pop(0)
        assert callable(task)
        task()
        await again
        assert 2 == log.durable_index
        disk.kill()
        found = contents(open_inline(disk, home="d/h").logs[1])
        assert [b"a", b"new"] == [Batch(frame).values[0] for frame in found]

    run(main())


async def test_what_does_not_follow_is_refused(storage: Storage) -> None:
    """Index, previous term, offset, time, length, header checksum: each one is looked at."""
    log = storage.create_log("t-0")
    log.append([frame_for(log, [b"a", b"b"], term=3, time_ms=100)])
    good: dict[str, Any] = {
        "index": 2,
        "term": 3,
        "prev_term": 3,
        "base_offset": 2,
        "append_time_ms": 100,
        "committed_index": 0,
    }
    for field, value in (
        ("index", 1),
        ("index", 3),
        ("prev_term", 2),
        ("base_offset", 1),
        ("term", 2),
        ("append_time_ms", 99),
    ):
        frame = build_control(Kind.NOOP)
        stamp(frame, **(good | {field: value}))
        with pytest.raises(BrokenChain):
            log.append([frame])
    frame = build_control(Kind.NOOP, b"payload")
    stamp(frame, **good)
    with pytest.raises(BrokenChain):
        log.append([frame[:-1]])
    damaged = bytearray(frame)
    damaged[100] ^= 1
    with pytest.raises(BrokenChain):
        log.append([damaged])
    assert 1 == log.last_index
    log.append([frame])
    assert (2, 3, 2) == (log.last_index, log.last_term, log.next_offset)


async def test_entries_are_found_by_offset_and_by_time(storage: Storage) -> None:
    """Every offset and every time, against a linear search; entries without records hold no offset."""
    log = storage.create_log("t-0")
    rng = random.Random(5)
    owner: list[int] = []
    times: list[int] = []
    for index in range(1, 200):
        count = rng.choice([0, 0, 1, 2, 5])
        times.append(max(times[-1] if times else 0, index // 3 * 10))
        values = [b"v" * rng.randrange(50) for _ in range(count)]
        log.append([frame_for(log, values, time_ms=times[-1], opens=rng.random() < 0.1)])
        owner += [index] * count
    log.set_start(index=20, term=1, offset=log.index_entry(20).next_offset)

    for offset, index in enumerate(owner):
        assert (index if index > 20 else None) == log.index_of_offset(offset)
    assert log.index_of_offset(len(owner)) is None
    for time_ms in range(-5, times[-1] + 20, 5):
        wanted = next((i + 1 for i, at in enumerate(times) if at >= time_ms and i >= 20), log.last_index + 1)
        assert wanted == log.index_of_time(time_ms)


async def test_terms_are_known_from_the_start_entry_on(storage: Storage) -> None:
    """The entry before the first has its term; what lies before it or behind the end has none."""
    log = storage.create_log("t-0")
    log.set_start(index=10, term=4, offset=33)
    assert (11, 10, 4, 33) == (log.first_index, log.last_index, log.last_term, log.next_offset)
    log.append([frame_for(log, [b"a"], term=5)])
    assert [None, 4, 5, None] == [log.term(index) for index in (9, 10, 11, 12)]
    await storage.sync()
    assert 11 == log.durable_index


async def test_a_truncation_takes_segments_and_waiting_frames_with_it(storage: Storage) -> None:
    """Cut in the middle of what is written, in flight and pending; the files hold only what came after."""
    log = storage.create_log("t-0")
    for number in range(30):
        log.append([frame_for(log, [b"%d" % number * 300], opens=number % 7 == 0)])
        if number == 20:
            await storage.sync()
    log.truncate(5)
    frames = [bytes(frame) for frame in log.read_nowait(1, 4, max_bytes=1 << 20) or []]
    for number in range(10):
        frames.append(frame_for(log, [b"new %d" % number * 10], term=2, opens=number == 7))
        log.append(frames[-1:])
    await in_segments(storage)
    assert [1, 12] == log.segment_first_indexes
    assert frames == contents(log)
    names = RealDisk().list(log.files.directory)
    assert {index_name(1), segment_name(1), index_name(12), segment_name(12)} == set(names)
    assert sum(map(len, frames)) == log.size_bytes


async def test_damage_is_named_and_can_be_skipped(storage: Storage) -> None:
    """A read stops before a damaged frame; at it, the error says which entries, offsets and bytes."""
    log = storage.create_log("t-0")
    frames = []
    for number in range(9):
        frames.append(frame_for(log, [b"%d" % number * 100, b"x"]))
        log.append(frames[-1:])
    await in_segments(storage)
    row = log.index_entry(5)
    disk = RealDisk()
    file = disk.open(f"{log.files.directory}/{segment_name(1)}")
    file.pwritev([b"\xff"], row.position + 150)
    file.close()

    assert 4 == len(await log.read(1, 9, max_bytes=1 << 20))
    with pytest.raises(DamagedRange) as damage:
        await log.read(5, 9, max_bytes=1 << 20)
    assert (5, 5, 8, 10, row.position) == (
        damage.value.first_index,
        damage.value.last_index,
        damage.value.first_offset,
        damage.value.next_offset,
        damage.value.position,
    )
    assert frames[5:] == [bytes(frame) for frame in await log.read(6, 9, max_bytes=1 << 20)]


def test_a_cold_read_waits_in_the_pool_and_a_truncation_meanwhile_is_noticed() -> None:
    """What the page cache lacks is not read on the loop."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        for value in (b"a", b"b"):
            history.write(1, value)
        await history.sync()
        history.storage._changes.evict_written()
        disk.cold = True
        log = history.storage.logs[1]
        assert log.read_nowait(1, 2, max_bytes=1000) is None
        assert 2 == len(await log.read(1, 2, max_bytes=1000))

    run(main())


async def test_readers_and_writers_at_once(storage: Storage) -> None:
    """Checkpoints, journal files and segments turn over while a reader follows and old entries go."""
    log = storage.create_log("t-0")
    frames: dict[int, bytes] = {}
    finished = False

    def has_turned_over() -> bool:
        return storage.statistics()["checkpoints"] > 2

    async def write() -> None:
        nonlocal finished
        # A checkpoint waits for syncs that may take seconds, while the journal's go on.
        for number in takewhile(lambda number: number < 1500 or not has_turned_over(), count()):
            frame = frame_for(log, [b"%d" % number * 60])
            frames[log.last_index + 1] = frame
            log.append([frame])
            if number % 5 == 0:
                await storage.sync()
            if number >= 1500:
                await asyncio.sleep(0.01)
            if number % 400 == 399:
                index = log.last_index - 150
                log.set_start(index=index, term=1, offset=log.index_entry(index).next_offset)
        await storage.sync()
        finished = True

    async def follow() -> None:
        rng = random.Random(1)
        while not finished:
            if log.durable_index > log.first_index:
                first = rng.randrange(log.first_index, log.durable_index + 1)
                try:
                    found = await log.read(first, log.durable_index, max_bytes=20_000)
                except EntriesTrimmed:
                    assert first < log.first_index, "gone, it says, and is there"
                    continue
                for place, frame in enumerate(found):
                    assert frames[first + place] == bytes(frame)
            await asyncio.sleep(0)

    async with asyncio.timeout(120):
        await asyncio.gather(write(), follow(), follow())
    assert has_turned_over()
    assert LogStart(log.start.index, 1, log.start.index, 0) == log.start
