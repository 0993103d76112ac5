"""What writing to the log costs: appends, group commit, and commits while a checkpoint syncs."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from crc32c import crc32c

from benches.common.floors import percentile
from benches.log.laminarmq_format import write_all
from benches.log.log_rig import (
    BATCH_BYTES,
    MIB,
    BareWriter,
    Rig,
    UnsyncedDisk,
    append_all,
    batch_values,
    fill,
    forget_log,
    interleave,
    place,
)
from benches.log.log_targets import DIRTY, SIZES, Found
from laminar.batch import build
from laminar.log import Log, Storage, StorageError, StorageSettings

PARTITIONS = 16
COMMIT_BYTES = 4096
# A generation's journal files grow to their full size, and its spares are made, in the first such bytes.
WARM_UP_BYTES = 192 * MIB


def append(rig: Rig, *, batches: int, rounds: int) -> dict[str, Found]:
    """MB/s of batches through the log and through bare files; nothing is synced on either side.

    Both write and sum every byte twice: into a journal and a segment.

    `append`: each batch is built of 1 KiB values and stamped; the bare loop joins the same values.
    `append_frames`: the same with batches that are ready, as those that came over a wire.
    """
    values = batch_values(1024)
    ready = bytes(build(values))
    with rig.directory() as bare_path, rig.directory() as path, rig.storage(path, UnsyncedDisk()) as storage:
        names = itertools.count()
        bare = BareWriter(bare_path)

        def ours(make: Callable[[], bytearray]) -> float:
            frames = (make() for _ in range(batches))
            return rig.run(_appended(storage, f"append-{next(names)}", frames))

        def theirs(make: Callable[[], bytes]) -> float:
            return batches * len(ready) / 1e6 / bare.write(batches, make)

        def bare_records() -> bytes:
            body = b"".join(values)
            crc32c(body)
            return body

        for _ in range(1 + min(3, batches // 64)):
            ours(lambda: build(values))
        found = interleave(
            rounds,
            lambda: ours(lambda: build(values)),
            lambda: theirs(bare_records),
            lambda: ours(lambda: bytearray(ready)),
            lambda: theirs(lambda: ready),
        )
        bare.close()
    names_found = ("append", "append_frames")
    return {name: Found(found[2 * at], found[2 * at + 1]) for at, name in enumerate(names_found)}


async def _appended(storage: Storage, name: str, frames: Iterator[bytearray]) -> float:
    """MB/s into a new log, which is deleted."""
    log = storage.create_log(name)
    await storage.sync()
    began = time.perf_counter()
    written = await append_all(storage, log, frames)
    rate = written / 1e6 / (time.perf_counter() - began)
    await forget_log(storage, log)
    return rate


def group_commit(rig: Rig, *, turns: int, rounds: int) -> dict[str, Found]:
    """Turns/s of one 4 KiB append to each of 16 logs and a sync, against one file's write and fdatasync.

    In `group_commit` the appends of a turn are made while the turn before is being synced, as those of many
    clients are; in `group_commit_lockstep` every turn waits for the one before, as those of one would. The
    bare file holds what the journal does; in `group_commit_written` the bare loop also writes the segments,
    as the log does behind its commits.
    """
    value = os.urandom(COMMIT_BYTES)
    with rig.directory() as bare_path, rig.directory() as path, rig.storage(path) as storage:
        logs = [storage.create_log(f"p-{number}") for number in range(PARTITIONS)]
        rig.run(_turns(storage, logs, value, turns=min(turns, 50), ahead=1))
        block = os.urandom(PARTITIONS * len(build([value])) + COMMIT_BYTES)
        block = block[: -(len(block) % COMMIT_BYTES) or None]
        found = interleave(
            rounds,
            lambda: rig.run(_turns(storage, logs, value, turns=turns, ahead=1)),
            lambda: _bare_turns(bare_path / "floor", block, turns),
            lambda: rig.run(_turns(storage, logs, value, turns=turns, ahead=0)),
            lambda: _bare_turns(bare_path / "floor", block, turns, segments=PARTITIONS),
        )
    return {
        "group_commit": Found(found[0], found[1]),
        "group_commit_lockstep": Found(found[2], found[1]),
        "group_commit_written": Found(found[0], found[3]),
    }


async def _turns(storage: Storage, logs: list[Log], value: bytes, *, turns: int, ahead: int) -> float:
    ready = build([value])
    waiting: list[asyncio.Future[None]] = []
    began = time.perf_counter()
    for _ in range(turns):
        for log in logs:
            frame = ready[:]
            place(log, frame)
            log.append([frame])
        waiting.append(storage.sync())
        # The turn of the loop ends here, as it does between the requests of clients: what was recorded is
        # handed over. To await a future that is done would go on in the same turn, and make it two's.
        await asyncio.sleep(0)
        if len(waiting) > ahead:
            await waiting.pop(0)
    for future in waiting:
        await future
    return turns / (time.perf_counter() - began)


def _bare_turns(path: Path, block: bytes, turns: int, *, segments: int = 0) -> float:
    """One zero-filled file, used again from its beginning: a sum, a write and an fdatasync a turn.

    With `segments` the same bytes go into so many files, too, whenever as many wait as the log gathers.
    """
    others = [
        os.open(path.with_name(f"segment-{number}"), os.O_CREAT | os.O_TRUNC | os.O_RDWR, 0o600)
        for number in range(segments)
    ]
    gathered = max(1, StorageSettings().gather_bytes // len(block))
    piece = block[: len(block) // segments] * gathered if segments else b""
    fd = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    size = max(64, min(turns, 512)) * len(block)
    try:
        if os.fstat(fd).st_size < size:
            os.pwrite(fd, bytes(size), 0)
            os.fdatasync(fd)
        position = 0
        began = time.perf_counter()
        for turn in range(turns):
            if position + len(block) > size:
                position = 0
            crc32c(block)
            position += os.pwrite(fd, block, position)
            os.fdatasync(fd)
            if turn % gathered == gathered - 1:
                for each in others:
                    os.write(each, piece)
        return turns / (time.perf_counter() - began)
    finally:
        for each in (fd, *others):
            os.close(each)


def checkpoints(rig: Rig, *, dirty: tuple[int, ...] = DIRTY, rounds: int) -> dict[str, Found]:
    """p99 in ms of one 4 KiB commit after the other while a checkpoint syncs so many partitions' files.

    Beside it the p99 of as many commits without a checkpoint, right after. And the longest commit of each:
    one that waits for seconds among ten thousand is in no p99.
    """
    found = {}
    for each, count in zip(DIRTY, dirty, strict=True):
        with rig.directory() as path, rig.storage(path) as storage:
            logs = [storage.create_log(f"p-{number}") for number in range(count)]
            try:
                pairs = [rig.run(_checkpoint(storage, logs)) for _ in range(rounds)]
            except StorageError as error:
                print(f"checkpoint of {count}: not measured: {error}")
                pairs = [([math.nan], [math.nan])]
        for name, figure in (("p99", lambda commits: percentile(commits, 0.99)), ("max", max)):
            found[f"checkpoint_{name}_{each}"] = Found(
                [figure(during) for during, _ in pairs], [figure(quiet) for _, quiet in pairs]
            )
    return found


async def _checkpoint(storage: Storage, logs: list[Log]) -> tuple[list[float], list[float]]:
    """ms of each commit while a checkpoint runs, then of commits without one."""
    value = os.urandom(COMMIT_BYTES)
    small = build([b"dirty"])
    for first in range(0, len(logs), 500):
        for log in logs[first : first + 500]:
            frame = small[:]
            place(log, frame)
            log.append([frame])
        await storage.sync()
    under_way = asyncio.ensure_future(storage.checkpoint())
    during = await _commits(storage, logs[0], value, under_way, at_least=20)
    await under_way
    quiet = await _commits(storage, logs[0], value, None, at_least=max(200, min(len(during), 2000)))
    return [1000 * each for each in during], [1000 * each for each in quiet]


async def _commits(
    storage: Storage, log: Log, value: bytes, until: asyncio.Future[None] | None, *, at_least: int
) -> list[float]:
    """Seconds of each commit, until `until` is done, and at least so many."""
    ready = build([value])
    took: list[float] = []
    while len(took) < at_least or (until is not None and not until.done()):
        frame = ready[:]
        began = time.perf_counter()
        place(log, frame)
        log.append([frame])
        await storage.sync()
        took.append(time.perf_counter() - began)
    return took


def sizes_appended(rig: Rig, *, records: int, rounds: int) -> dict[str, Found]:
    """µs a record through the batching writer, and through laminarmq's format; nothing is synced."""
    return {
        f"append_{size}_us": _size_appended(rig, [os.urandom(size) for _ in range(records)], rounds=rounds)
        for size in SIZES
    }


def _size_appended(rig: Rig, values: list[bytes], *, rounds: int) -> Found:
    size, records = len(values[0]), len(values)
    each = max(1, BATCH_BYTES // size)
    names = itertools.count()
    with (
        rig.directory() as bare_path,
        rig.directory() as path,
        rig.storage(path, UnsyncedDisk()) as storage,
    ):
        warm_up_bytes = min(WARM_UP_BYTES, 2 * records * size)
        rig.run(fill(storage, storage.create_log("warm"), total_bytes=warm_up_bytes, values=values[:each]))

        def theirs() -> float:
            began = time.perf_counter()
            segment = write_all(bare_path, values)
            took = time.perf_counter() - began
            segment.close()
            return took / records * 1e6

        found = interleave(
            rounds, lambda: rig.run(_batched(storage, f"log-{next(names)}", values, each)), theirs
        )
    return Found(found[0], found[1])


async def _batched(storage: Storage, name: str, values: list[bytes], each: int) -> float:
    log = storage.create_log(name)
    await storage.sync()
    began = time.perf_counter()
    await append_all(storage, log, (build(values[at : at + each]) for at in range(0, len(values), each)))
    took = time.perf_counter() - began
    await forget_log(storage, log)
    return took / len(values) * 1e6
