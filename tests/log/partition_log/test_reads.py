"""Reading: few system calls for small reads, few bytes for filtered ones, and nobody waits for the disk."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from laminar.batch import Batch, Codec, build, stamp, tag_bit
from laminar.log import DamagedRange, Log, Storage, StorageSettings
from laminar.log.disk.fair_queue import FairLimiter
from tests.log.counting_disk import CountingDisk
from tests.log.histories import frame_for

_SETTINGS = StorageSettings(
    segment_size_bytes=512 * 1024, first_journal_file_bytes=64 * 1024, recent_bytes=0, reader_threads=2
)


class Home:
    """A storage on a counting disk, and the way to open it again."""

    def __init__(self, path: Path) -> None:
        self.disk = CountingDisk()
        self._path = path
        self.storage = self._open()

    def _open(self) -> Storage:
        return Storage.open(self.disk, f"{self._path}/home", f"{self._path}/logs", settings=_SETTINGS)

    async def again(self) -> Log:
        """Opened anew: nothing is in memory, and nothing was read yet but what a start reads."""
        await self.storage.close()
        self.storage = self._open()
        self.disk.forget()
        return next(iter(self.storage.logs.values()))


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Home]:
    home = Home(tmp_path)
    yield home
    await home.storage.close()


async def test_small_reads_in_sequence_cost_far_fewer_system_calls_than_records(home: Home) -> None:
    """10,000 records taken one by one from 4 KiB batches, each batch verified when it was read."""
    log = home.storage.create_log("t-0")
    for first in range(0, 10_000, 40):
        log.append([frame_for(log, [b"%090d" % number for number in range(first, first + 40)])])
    log = await home.again()

    for offset in range(10_000):
        index = await log.find_offset(offset)
        assert index is not None
        (frame,) = await log.read(index, index, max_bytes=1)
        batch = Batch(frame, verified=True)
        assert b"%090d" % offset == bytes(batch.value(offset - batch.base_offset))

    assert sum(home.disk.reads.values()) < 100
    assert home.disk.bytes["log"] < 2 * log.size_bytes


async def test_a_reader_that_jumps_reads_what_it_asks_for(home: Home) -> None:
    """Reading ahead is for sequences: whoever picks records anywhere does not pay for their neighbours."""
    log = home.storage.create_log("t-0")
    for _ in range(1000):
        log.append([frame_for(log, [b"x" * 400])])
    log = await home.again()
    size = log.index_entry(1).size
    jumps = random.Random(1).sample(range(1, 1000, 3), 200)

    for index in jumps:
        await log.read(index, index, max_bytes=1)

    assert 200 * size == home.disk.bytes["log"]


async def test_frames_read_ahead_are_never_served_after_a_truncation(home: Home) -> None:
    """They were right when they were read; the log has others at their place since."""
    log = home.storage.create_log("t-0")
    for number in range(300):
        log.append([frame_for(log, [b"old %d" % number])])
    await home.storage.sync()
    await home.storage.checkpoint()
    home.storage._changes.evict_written()
    for index in range(1, 60):
        await log.read(index, index, max_bytes=1)
    assert home.storage.statistics()["ahead_bytes"] > 0
    log.truncate(50)
    for number in range(49, 300):
        log.append([frame_for(log, [b"new %d" % number], term=2)])
    await home.storage.sync()
    await home.storage.checkpoint()
    home.storage._changes.evict_written()

    for index in range(1, 301):
        (frame,) = await log.read(index, index, max_bytes=1)
        assert (b"old %d" if index < 50 else b"new %d") % (index - 1) == bytes(Batch(frame).values[0])


async def test_a_prompt_read_of_what_is_in_memory_lets_no_other_task_run(home: Home) -> None:
    """Not after other reads either: what those took of a bound for reads from the disk made it negative."""
    log = home.storage.create_log("t-0")
    log.append([frame_for(log, [b"x" * 300_000])])
    await home.storage.sync()
    await log.read(1, 1, max_bytes=1)

    for _ in range(8):
        with pytest.raises(StopIteration):
            log.read_promptly(1, 1, max_bytes=1).send(None)


def _tagged(log: Log, tag: str | None, size: int) -> bytes:
    frame = build([b"v" * size], tags=[tag])
    stamp(
        frame,
        index=log.last_index + 1,
        term=1,
        prev_term=1 if log.last_index else 0,
        base_offset=log.next_offset,
        append_time_ms=0,
        committed_index=0,
        opens_segment=log.segment_full,
    )
    return bytes(frame)


def _flip(log: Log, position: int) -> None:
    """Rot: one bit of the log's first segment file."""
    (first, *_) = sorted(Path(log.files.directory).glob("*.log"))
    with open(first, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1]))


async def test_a_single_value_is_that_of_its_batch_whatever_the_batches_hold(home: Home) -> None:
    """Batches of all sizes, over several segments: the short way may say "ask the other", nothing else."""
    rng = random.Random(9)
    log = home.storage.create_log("t-0")
    values: list[bytes] = []
    plain = 0
    while log.last_index < 400:
        batch = [rng.randbytes(rng.choice([0, 1, 100, 3000])) for _ in range(rng.choice([1, 1, 7, 60]))]
        how = rng.randrange(3)
        if how == 0:
            frame = build(
                batch, keys=[b"k"] * len(batch), tags=["t"] * len(batch), timestamps=[5] * len(batch)
            )
        elif how == 1:
            frame = build([bytes(len(value)) for value in batch], codec=Codec.ZSTD)
            batch = [bytes(len(value)) for value in batch]
        else:
            frame = build(batch)
        plain += len(batch) if how != 1 else 0
        stamp(
            frame,
            index=log.last_index + 1,
            term=1,
            prev_term=log.last_term,
            base_offset=log.next_offset,
            append_time_ms=0,
            committed_index=0,
            opens_segment=log.segment_full,
        )
        log.append([frame])
        values += batch
    log = await home.again()
    assert len(log.segment_first_indexes) > 2
    await log.read(1, log.last_index, max_bytes=1)

    found = 0
    for offset in range(len(values)):
        await log.find_offset(offset)
        for index in log.segment_first_indexes:
            log.segment_of(index).file.data()
        value = log.value_nowait(offset)
        assert value is None or value == values[offset], offset
        found += value is not None
    assert found >= plain, "only compressed values take the long way"
    assert log.value_nowait(len(values)) is None
    assert log.value_nowait(-1) is None


async def test_a_single_value_is_verified_at_every_read(home: Home) -> None:
    """A bit that rots anywhere in a batch after a good read is never served: nothing is taken on trust."""
    log = home.storage.create_log("t-0")
    log.append([frame_for(log, [b"a" * 50, b"b" * 50])])
    log.append([frame_for(log, [b"c" * 50])])
    log = await home.again()
    size = log.index_entry(1).size
    log.segment_of(1).file.data()
    assert bytes(log.value_nowait(1) or b"") == b"b" * 50
    for position in range(size):
        _flip(log, position)
        assert log.value_nowait(1) is None, f"byte {position}"
        _flip(log, position)
        assert bytes(log.value_nowait(1) or b"") == b"b" * 50
    _flip(log, size - 1)
    with pytest.raises(DamagedRange):
        log.read_here(1, 1, max_bytes=1)
    assert log.value_nowait(1) is None
    assert log.value_nowait(2) is None, "beside known damage the long way decides"


async def test_rows_lead_to_the_batches_of_a_tag_without_reading_others(home: Home) -> None:
    """At one match in a hundred the bytes of the other 99 stay on the disk."""
    log = home.storage.create_log("t-0")
    for number in range(2000):
        tag = "rare" if number % 100 == 37 else ("common" if number % 2 else None)
        log.append([_tagged(log, tag, 1000)])
    log = await home.again()
    assert len(log.segment_first_indexes) > 3
    found: list[int] = []
    index = 1

    while index <= log.last_index:
        first, behind = await log.find_tagged(index, log.last_index, tag_bit("rare"))
        for each in range(first, behind):
            (frame,) = await log.read(each, each, max_bytes=1)
            found += [each] if Batch(frame).tagged("rare") else []
        index = max(behind, first)

    assert list(range(38, 2001, 100)) == found
    assert home.disk.bytes["log"] < log.size_bytes / 50


async def test_pitfall_45_cold_reads_run_in_their_own_few_threads_and_take_turns(home: Home) -> None:
    """A consumer that replays cold data has no thread of the writers and none of the loop.

    Its reads are limited in number and bytes, and another reader does not wait behind all of them.
    """
    log = home.storage.create_log("t-0", 1)
    other = home.storage.create_log("u-0", 2)
    for _ in range(1500):
        log.append([frame_for(log, [b"x" * 1000])])
    other.append([frame_for(other, [b"y" * 1000])])
    await home.again()
    log, other = home.storage.logs[1], home.storage.logs[2]
    readers = home.storage._recovered.readers
    gate = threading.Event()
    pool = ThreadPoolExecutor(_SETTINGS.reader_threads, thread_name_prefix="reader")
    for _ in range(_SETTINGS.reader_threads):
        pool.submit(gate.wait)
    readers._executor = pool
    home.disk.cold = True
    done: list[str] = []

    async def read(which: Log, index: int, name: str) -> None:
        (frame,) = await which.read(index, index, max_bytes=1)
        assert which.term(index) == Batch(frame).header.term
        done.append(name)

    replays = [asyncio.create_task(read(log, index, "replay")) for index in range(1, 1400, 20)]
    await asyncio.sleep(0)
    late = asyncio.create_task(read(other, 1, "late"))
    # The loop and the writers go on while every reader thread is stuck.
    log.append([frame_for(log, [b"written meanwhile"])])
    await home.storage.sync()
    assert log.durable_index == log.last_index
    assert not done
    assert readers.statistics()["reads_waiting"] >= len(replays) - _SETTINGS.reader_threads
    gate.set()
    await asyncio.gather(*replays, late)

    assert done.index("late") < len(replays) // 4
    assert readers._turns.most_running <= _SETTINGS.reader_threads
    assert {name.partition("_")[0] for name in home.disk.threads} <= {"reader"}
    home.disk.cold = False


async def test_turns_are_limited_by_bytes_and_one_that_is_too_large_goes_alone() -> None:
    """Memory is bounded whatever is asked for, and nothing waits for ever."""
    turns = FairLimiter(limit=4, limit_bytes=100)
    await turns.acquire("a", 60)
    second = asyncio.create_task(turns.acquire("a", 60))
    await asyncio.sleep(0)
    assert not second.done()
    turns.release(60)
    await second
    huge = asyncio.create_task(turns.acquire("b", 1000))
    await asyncio.sleep(0)
    assert not huge.done()
    turns.release(60)
    await huge
    assert (1, 1000) == (turns.running, turns.running_bytes)
    turns.release(1000)


async def test_a_reader_that_gives_up_leaves_its_turn_to_others() -> None:
    """Cancelled while it waits, or in the moment in which it is called."""
    turns = FairLimiter(limit=1, limit_bytes=100)
    await turns.acquire("a", 1)
    waiting = [asyncio.create_task(turns.acquire(name, 1)) for name in "bcd"]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    turns.release(1)
    waiting[1].cancel()
    await asyncio.gather(*waiting[:2], return_exceptions=True)
    await waiting[2]
    assert (1, 0) == (turns.running, turns.waiting)
    turns.release(1)
