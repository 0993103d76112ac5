"""A checkpoint syncs segments in a thread of its own, and their files go meanwhile: trimmed, cut, deleted.

What is gone needs no sync. That it is gone is no error of the disk: the log goes on, and the process too.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from laminar.log import Log, Storage
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import SMALL, contents, frame_for, open_inline, run
from tests.log.stepped import Steps, open_stepped


def trim(storage: Storage, log: Log) -> None:
    row = log.index_entry(log.last_index - 1)
    log.set_start(index=row.index, term=row.term, offset=row.next_offset)


def cut_and_write_again(storage: Storage, log: Log) -> None:
    log.truncate(3)
    log.append([frame_for(log, [b"anew" * 100], term=9, opens=False)])


def cut_everything(storage: Storage, log: Log) -> None:
    log.truncate(1)


def delete(storage: Storage, log: Log) -> None:
    storage.delete_log(log.log_id)


GOING = [trim, cut_and_write_again, cut_everything, delete]


@pytest.mark.parametrize("go", GOING)
def test_files_that_go_before_they_are_synced_fail_nobody(go: Callable[[Storage, Log], None]) -> None:
    """The picture is taken, its syncs have not begun, and the next frame removes what they are to cover."""
    disk = FaultDisk()
    steps = Steps(random.Random(1))
    failures: list[BaseException] = []

    async def main() -> list[bytes]:
        storage = open_stepped(disk, steps, settings=SMALL)
        storage.on_failure = failures.append
        log = storage.create_log("log", 1)
        other = storage.create_log("other", 2)
        for number in range(20):
            log.append([frame_for(log, [b"%d" % number * 200])])
        await steps.until(storage.sync())
        steps.held.add("checkpoints")
        done = asyncio.ensure_future(storage.checkpoint())
        await steps.drain()
        go(storage, log)
        await steps.until(storage.sync())
        await steps.drain()
        steps.held.clear()
        await steps.until(done)
        other.append([frame_for(other, [b"x"])])
        await steps.until(storage.sync())
        await steps.until(storage.checkpoint())
        assert log.files.failure is None
        return contents(log) if 1 in storage.logs else []

    kept = run(main())

    assert [] == failures
    disk.kill()
    recovered = open_inline(disk, seed=2)
    assert kept == (contents(recovered.logs[1]) if 1 in recovered.logs else [])


@pytest.mark.parametrize("go", GOING)
@pytest.mark.parametrize("at", range(1, 9))
def test_files_that_go_while_they_are_synced_fail_nobody(go: Callable[[Storage, Log], None], at: int) -> None:
    """The writer removes them between two calls of the thread that syncs."""
    disk = FaultDisk()
    steps = Steps(random.Random(1))
    failures: list[BaseException] = []
    seen: list[str] = []

    async def main() -> list[bytes]:
        storage = open_stepped(disk, steps, settings=SMALL)
        storage.on_failure = failures.append
        log = storage.create_log("log", 1)
        for number in range(20):
            log.append([frame_for(log, [b"%d" % number * 200])])
        await steps.until(storage.sync())
        # The change is durable, and waits for the writer.
        steps.held |= {"checkpoints", "segments"}

        def interrupt(operation: str, path: str) -> None:
            if operation == "sync" and "/logs/" in path:
                seen.append(path)
                if len(seen) == at:
                    while steps.workers["segments"].tasks:
                        steps.workers["segments"].tasks.popleft()()

        done = asyncio.ensure_future(storage.checkpoint())
        steps.held.discard("segments")
        await steps.drain()
        steps.held.add("segments")
        go(storage, log)
        await steps.until(storage.sync())
        await steps.drain()
        disk.error = interrupt
        steps.held.discard("checkpoints")
        await steps.drain()
        disk.error = None
        steps.held.clear()
        await steps.until(done)
        await steps.until(storage.checkpoint())
        assert log.files.failure is None
        return contents(log) if 1 in storage.logs else []

    kept = run(main())

    assert [] == failures
    assert len(seen) >= at
    disk.kill()
    recovered = open_inline(disk, seed=2)
    assert kept == (contents(recovered.logs[1]) if 1 in recovered.logs else [])
