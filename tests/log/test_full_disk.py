"""No room: for a checkpoint, or for the next file of the journal (48 in docs/pitfalls.md)."""

from __future__ import annotations

import asyncio
import errno
import random
from dataclasses import replace

import pytest

from laminar.log.errors import StorageError
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import SMALL, History, open_inline, run


def test_pitfall_48_a_disk_full_during_a_checkpoint_stops_nothing() -> None:
    """The former checkpoint and the journal stand; commits and votes go on."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        history.write(1, b"before")
        await history.sync()
        disk.error = lambda operation, path: errno.ENOSPC if "checkpoint" in path else None
        with pytest.raises(StorageError):
            await history.storage.checkpoint()
        history.write(1, b"meanwhile")
        history.vote(5, 2, 1)
        await history.sync()
        disk.crash(random.Random(1), keep=0.0)
        storage = open_inline(disk)
        history.check(storage)

    run(main())


def test_pitfall_48_no_room_for_the_next_journal_file_refuses_appends_but_not_votes() -> None:
    """`refusal` names the disk while the present file has room left, and is lifted when room is back."""

    async def main() -> None:
        disk = FaultDisk()
        history = History(open_inline(disk))
        history.create(1)
        disk.error = lambda operation, path: (
            errno.ENOSPC if operation in ("create", "write") and "spare" in path else None
        )
        for _ in range(3):
            history.write(1, b"x" * 3000)
            await history.sync()
        assert "disk" == history.storage.refusal
        history.vote(5, 2, 1)
        await history.sync()
        disk.error = None
        history.vote(5, 3, 1)
        await history.sync()
        async with asyncio.timeout(30):
            while history.storage.refusal:  # noqa: ASYNC110  # it tells nobody
                await asyncio.sleep(0.001)
        disk.crash(random.Random(1), keep=0.0)
        history.check(open_inline(disk))

    run(main())


@pytest.mark.parametrize("what, named", [("spare-", "disk"), ("checkpoint.", "journal")])
def test_pitfall_48_a_refusal_ends_when_there_is_room_though_nobody_appends(what: str, named: str) -> None:
    """While appends are refused no frame comes that could ask: what failed is tried again by itself."""

    async def main() -> None:
        disk = FaultDisk()
        settings = replace(SMALL, retry_ms=5, max_journal_files=3, checkpoint_bytes=16 * 1024)
        history = History(open_inline(disk, settings=settings))
        storage = history.storage
        history.create(1)
        room = False
        tried = asyncio.Event()

        def fail(operation: str, path: str) -> int | None:
            if operation in ("create", "write") and what in path:
                tried.set()
                return None if room else errno.ENOSPC
            return None

        disk.error = fail
        while storage.refusal != named:
            history.write(1, b"x" * 3000)
            await history.sync()
        for _ in range(3):
            tried.clear()
            await asyncio.wait_for(tried.wait(), 20)
        assert named == storage.refusal
        room = True
        tried.clear()
        await asyncio.wait_for(tried.wait(), 20)
        assert not bool(storage.refusal)
        history.write(1, b"again")
        await history.sync()
        disk.crash(random.Random(1), keep=0.0)
        history.check(open_inline(disk))

    run(main())
