"""The scrubber: every sealed segment read again in time, at its rate, wherever it was interrupted."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from laminar.log import DamagedRange, RealDisk, Storage
from laminar.log.format.settings import StorageSettings
from laminar.log.integrity.scrubber import Scrubber
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import SMALL, contents, frame_for, open_inline, run

DAY_MS = 24 * 3_600_000
NOW_MS = 1_000 * DAY_MS


class Time:
    """A clock that goes on only by the pauses asked for, and by hand."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS
        self.slept_s = 0.0
        self.pauses = 0
        self.stop_after: int | None = None

    async def sleep(self, seconds: float) -> None:
        self.slept_s += seconds
        self.pauses += 1
        if self.pauses == self.stop_after:
            raise asyncio.CancelledError
        await asyncio.sleep(0)


def scrubber(storage: Storage, time: Time, **settings: Any) -> Scrubber:
    return Scrubber(
        lambda: storage.logs.values(),
        damage_registry=storage._damage,
        readers=storage._recovered.readers,
        settings=StorageSettings(**settings),
        clock_ms=lambda: time.now_ms,
        sleep=time.sleep,
    )


async def fill(storage: Storage, log_id: int, *, segments: int = 3) -> list[bytes]:
    log = storage.create_log(f"t-{log_id}", log_id)
    for number in range(3 * segments):
        values = [bytes([number]) * 500] * 2
        log.append([frame_for(log, values, opens=number % 3 == 0, time_ms=NOW_MS)])
    await storage.sync()
    return contents(log)


def test_every_sealed_segment_is_verified_and_its_digest_kept_over_restarts() -> None:
    """The last segment is not sealed, and has none. The same bytes on every replica give the same digest."""

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        frames = await fill(storage, 1)
        await storage.checkpoint()
        time = Time()
        await scrubber(storage, time).run_pass()
        disk.crash(random.Random(1), keep=0.0)
        storage = open_inline(disk)
        sealed = storage.logs[1].quarantine.sealed
        assert {1: 3, 4: 6} == {first: each.last_index for first, each in sealed.items()}
        assert [hashlib.sha256(b"".join(frames[at : at + 3])).digest() for at in (0, 3)] == [
            sealed[first].digest for first in (1, 4)
        ]
        again = scrubber(storage, time)
        await again.run_pass()
        last = sum(map(len, frames[6:]))
        assert (0, last) == (again.verified_segments, again.verified_bytes), "a start knows not how old it is"
        time.now_ms += 4 * DAY_MS
        await again.run_pass()
        assert (2, sum(map(len, frames)) + last) == (again.verified_segments, again.verified_bytes)

    run(main())


def test_rot_is_found_told_once_and_everything_else_of_the_segment_is_verified() -> None:
    """Two batches of one segment rot; the segment has no digest, the others have theirs."""

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        frames = await fill(storage, 1)
        await storage.checkpoint()
        told: list[int] = []
        storage.on_damage = lambda log, damage: told.append(damage.first_index)
        log = storage.logs[1]
        for index in (1, 3):
            disk.rot(f"{log.files.directory}/{1:020d}.log", log.index_entry(index).position + 150, 4)
        scrub = scrubber(storage, Time())
        await scrub.run_pass()
        assert [1, 3] == told
        statistics = scrub.statistics()
        assert (2, 2, 2) == tuple(
            statistics[name] for name in ("damaged_batches", "verified_segments", "sealed_segments")
        )
        assert sum(map(len, [frames[1], *frames[3:6]])) == statistics["verified_bytes"]
        assert {1: False, 4: True} == {
            first: bool(each.digest) for first, each in log.quarantine.sealed.items()
        }
        await scrub.run_pass()
        assert [1, 3] == told
        # A repaired segment is looked at again, and then has its digest.
        await storage.checkpoint()
        storage._changes.written = storage._changes.recorded
        storage._changes.evict_written()
        for index in (1, 3):
            await log.repair(index, frames[index - 1])
        await scrub.run_pass()
        assert hashlib.sha256(b"".join(frames[:3])).digest() == log.quarantine.sealed[1].digest

    run(main())


def test_a_repair_counts_also_where_the_scrubber_reads_the_entry_back_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scrubber checks known damage again while the repair's write is on its way back."""

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        frames = await fill(storage, 1)
        await storage.checkpoint()
        log = storage.logs[1]
        disk.rot(f"{log.files.directory}/{1:020d}.log", log.index_entry(3).position + 150, 4)
        scrub = scrubber(storage, Time())
        await scrub.run_pass()
        assert [3] == [damage.first_index for damage in log.quarantine]
        write = storage._damage._in_writer

        def read_back_first(work: Callable[[], None]) -> asyncio.Future[None]:
            async def both() -> None:
                await write(work)
                await scrub._recheck(log)

            return asyncio.ensure_future(both())

        with monkeypatch.context() as patched:
            patched.setattr(storage._damage, "_in_writer", read_back_first)
            await log.repair(3, frames[2])
        assert not log.quarantine
        assert 1 == storage.statistics()["damage_repaired"]

    run(main())


def test_damage_that_a_reader_finds_lets_all_of_its_log_be_verified_again() -> None:
    """Rot rarely comes alone: what was verified a moment ago is due again, that of other logs is not."""

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        await fill(storage, 1)
        await fill(storage, 2)
        await storage.checkpoint()
        told: list[int] = []
        storage.on_damage = lambda log, damage: told.append(damage.first_index)
        scrub = scrubber(storage, Time())
        await scrub.run_pass()
        log = storage.logs[1]
        for index in (2, 5):
            disk.rot(
                f"{log.files.directory}/{3 * (index // 3) + 1:020d}.log",
                log.index_entry(index).position + 150,
                4,
            )
        storage._changes.written = storage._changes.recorded
        storage._changes.evict_written()
        with pytest.raises(DamagedRange):
            await log.read(2, 2, max_bytes=1)
        assert [2] == told
        before = scrub.verified_segments

        await scrub.run_pass()

        assert [2, 5] == told
        assert before + 2 == scrub.verified_segments

    run(main())


async def test_damage_that_is_found_ends_the_rest_between_two_passes() -> None:
    """The next pass follows at once, not when the minute is over."""
    disk = FaultDisk()
    storage = open_inline(disk)
    await fill(storage, 1)
    await storage.checkpoint()
    rested: asyncio.Queue[float] = asyncio.Queue()
    woken = asyncio.Event()

    async def sleep(seconds: float) -> None:
        rested.put_nowait(seconds)
        if seconds == 60.0:
            await woken.wait()

    scrub = Scrubber(
        lambda: storage.logs.values(),
        damage_registry=storage._damage,
        readers=storage._recovered.readers,
        settings=StorageSettings(),
        sleep=sleep,
    )
    storage._damage.on_suspicion = scrub.expedite
    running = asyncio.create_task(scrub.run())
    while await rested.get() != 60.0:
        pass
    before = scrub.verified_segments
    log = storage.logs[1]
    disk.rot(f"{log.files.directory}/{1:020d}.log", log.index_entry(2).position + 150, 4)
    storage._changes.written = storage._changes.recorded
    storage._changes.evict_written()
    with pytest.raises(DamagedRange):
        await log.read(2, 2, max_bytes=1)
    while await rested.get() != 60.0:
        pass
    assert scrub.verified_segments == before + 2
    running.cancel()


def test_a_pass_keeps_its_rate_and_goes_on_behind_what_was_verified_before_a_crash() -> None:
    """The pauses are as long as the bytes take at the rate; a restart verifies no finished segment again."""

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        size = sum(map(len, await fill(storage, 1, segments=5)))
        await storage.checkpoint()
        time = Time()
        whole = scrubber(storage, time, scrub_bytes_per_s=1000)
        time.stop_after = 3
        try:
            await whole.run_pass()
        except asyncio.CancelledError:
            pass
        assert 2 == whole.verified_segments
        disk.crash(random.Random(1), keep=0.0)
        storage = open_inline(disk)
        time.stop_after = None
        rest = scrubber(storage, time, scrub_bytes_per_s=1000)
        await rest.run_pass()
        assert 2 == rest.verified_segments
        # One segment's pause came twice: it was read, but not noted, when the power went.
        assert size / 1000 <= time.slept_s + 0.5 <= 1.3 * size / 1000 + 1

    run(main())


def test_what_was_not_looked_at_for_longest_comes_first_and_its_age_is_told() -> None:
    """The one verified long ago goes before the one verified lately; a clock put back is borne."""

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        await fill(storage, 1, segments=2)
        await storage.checkpoint()
        time = Time()
        scrub = scrubber(storage, time)
        await scrub.run_pass()
        time.now_ms += 2 * DAY_MS
        await fill(storage, 2, segments=2)
        await storage.checkpoint()
        await scrub.run_pass()
        time.now_ms += 5 * DAY_MS
        order: list[str] = []
        verify = scrub._verify

        async def noted(log: Any, first: int) -> None:
            if not order:
                scrub._waiting.append(scrub._waiting[-1])
                assert 5 * DAY_MS // 1000 <= scrub.statistics()["oldest_unverified_age_s"]
                scrub._waiting.pop()
            if first == 1:
                order.append(log.name)
            await verify(log, first)

        scrub._verify = noted  # type: ignore[method-assign, assignment]  # to see the order
        await scrub.run_pass()
        assert ["t-1", "t-2"] == order
        time.now_ms -= 100 * DAY_MS
        await scrub.run_pass()
        assert ["t-1", "t-2"] == sorted(order[2:])

    run(main())


def test_a_log_that_changes_while_it_is_verified_is_left_for_the_next_pass() -> None:
    """A truncation into a sealed segment: no note of what is not there any more."""

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk, settings=SMALL)
        await fill(storage, 1)
        await storage.checkpoint()
        time = Time()
        scrub = scrubber(storage, time)
        log = storage.logs[1]

        async def truncate(seconds: float) -> None:
            if log.last_index > 4:
                log.truncate(3)
                log.append([frame_for(log, [b"new"], term=2, opens=False)])
                log.append([frame_for(log, [b"new"], term=2, opens=True)])

        scrub._sleep = truncate
        await scrub.run_pass()
        assert not log.quarantine.sealed
        scrub._sleep = time.sleep
        await storage.checkpoint()
        await scrub.run_pass()
        assert [1] == list(log.quarantine.sealed)

    run(main())


def test_a_second_look_at_damage_that_comes_to_nothing_ends_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system is short of something, or the entry is given up meanwhile: the other segments are due all
    the same, and so is the process's life.
    """

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk, settings=SMALL)
        await fill(storage, 1)
        await storage.checkpoint()
        scrub = scrubber(storage, Time())
        log = storage.logs[1]
        path = log.segment_of(2).file.path
        disk.rot(path, log.index_entry(2).position + 200, 4)
        await scrub.run_pass()
        assert [2] == [damage.first_index for damage in log.quarantine]
        log.quarantine.sealed.clear()

        log.segment_of(2).file.close()
        disk.error = lambda operation, at: errno.ENOMEM if (operation, at) == ("read", path) else None
        await scrub.run_pass()
        assert (2, [4]) == (scrub.errors, list(log.quarantine.sealed))
        disk.error = None
        find_index_entry = log.find_index_entry

        async def given_up(index: int) -> Any:
            log.set_start(index=3, term=1, offset=log.index_entry(3).next_offset)
            return await find_index_entry(index)

        monkeypatch.setattr(log, "find_index_entry", given_up)
        await scrub.run_pass()
        assert (3, [4]) == (scrub.errors, list(log.quarantine.sealed))

    run(main())


def test_notes_of_verified_segments_are_written_once_a_minute_and_not_for_each() -> None:
    """They are written whole, before the next write of any segment."""

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        await fill(storage, 1, segments=30)
        await storage.checkpoint()
        written: list[str] = []
        disk.on_step = lambda operation, path: (
            written.append(path) if operation == "write" and "/health" in path else None
        )
        time = Time()
        await scrubber(storage, time).run_pass()
        assert 29 == len(storage.logs[1].quarantine.sealed)
        assert len(written) <= 2, "two copies of one document"

    run(main())


def test_the_segment_that_is_written_to_is_verified_when_it_has_been_for_days() -> None:
    """A quiet log's only segment is never sealed: rot in it is found, healed and not found again; when it was
    verified is known over a restart.
    """

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        frames = await fill(storage, 1, segments=1)
        await storage.checkpoint()
        told: list[int] = []
        storage.on_damage = lambda log, damage: told.append(damage.first_index)
        log = storage.logs[1]
        time = Time()
        scrub = scrubber(storage, time)
        disk.rot(f"{log.files.directory}/{1:020d}.log", log.index_entry(2).position + 150, 4)
        await scrub.run_pass()
        assert 0 == scrub.verified_bytes, "what is new is left for now: it may soon be sealed"
        time.now_ms += 4 * DAY_MS

        await scrub.run_pass()

        assert ([2], 1) == (told, scrub.statistics()["damaged_batches"])
        await log.repair(2, frames[1])
        await scrub.run_pass()
        assert [2] == told
        assert not log.quarantine
        await storage.checkpoint()
        disk.crash(random.Random(1), keep=0.0)
        storage = open_inline(disk)
        assert frames == contents(storage.logs[1])
        again = scrubber(storage, time)
        await again.run_pass()
        assert 0 == again.verified_bytes
        storage.logs[1].truncate(3)
        await storage.checkpoint()
        await again.run_pass()
        assert sum(map(len, frames[:2])) == again.verified_bytes, "it is no longer what was verified"

    run(main())


def test_what_is_not_in_its_segment_yet_is_no_damage() -> None:
    """Neither behind what the writer has written, nor in a segment that was sealed before it came so far, nor
    in a log that failed: a start writes that again.
    """

    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        frames = await fill(storage, 1, segments=1)
        await storage.checkpoint()
        log = storage.logs[1]
        time = Time()
        time.now_ms += 4 * DAY_MS
        scrub = scrubber(storage, time)
        for number in range(4):
            log.append([frame_for(log, [b"later"] * 2, opens=number == 2)])

        await scrub.run_pass()

        assert ([], {}) == (list(log.quarantine), log.quarantine.sealed)
        await storage.sync()
        await storage.checkpoint()
        await scrub.run_pass()
        assert sum(map(len, [*frames, *contents(log)[3:]])) == scrub.verified_bytes
        path = f"{log.files.directory}/{6:020d}.log"
        disk.error = lambda operation, at: errno.EIO if (operation, at) == ("write", path) else None
        for number in range(4):
            log.append([frame_for(log, [b"lost"] * 2, opens=number == 2)])
        await storage.sync()
        assert log.failure is not None
        disk.error = None
        time.now_ms += 4 * DAY_MS
        await scrub.run_pass()
        assert not log.quarantine

    run(main())


async def test_a_scrubber_beside_a_writer_takes_nothing_for_damage(tmp_path: Path) -> None:
    """Real threads, segments that are sealed now and then, and truncations."""
    settings = StorageSettings(recent_bytes=1 << 14, segment_size_bytes=1 << 15)
    storage = Storage.open(RealDisk(), str(tmp_path / "home"), str(tmp_path / "logs"), settings=settings)
    log = storage.create_log("t", 1)
    time = Time()
    scrub = scrubber(storage, time, scrub_bytes_per_s=1 << 40)
    rng = random.Random(1)

    async def write() -> None:
        for _ in range(60):
            for _ in range(rng.randint(1, 5)):
                log.append([frame_for(log, [rng.randbytes(rng.randint(1, 2000))], time_ms=NOW_MS)])
            await storage.sync()
            if rng.random() < 0.3:
                await storage.checkpoint()
            if rng.random() < 0.1:
                log.truncate(max(log.first_index + 1, log.last_index - rng.randint(0, 20)))

    writing = asyncio.create_task(write())
    try:
        while not writing.done():
            time.now_ms += 4 * DAY_MS
            await scrub.run_pass()
            await storage._executor.run_in_writer(lambda: None)  # the notes of this pass are written
        await writing
        await storage.checkpoint()
        # Of all that is there: a slow pass may have been the only one beside the writer.
        time.now_ms += 4 * DAY_MS
        await scrub.run_pass()
    finally:
        writing.cancel()
        await storage.close()

    assert scrub.verified_bytes >= log.size_bytes > 0
    assert (0, 0) == (scrub.damaged_batches, len(log.quarantine))
