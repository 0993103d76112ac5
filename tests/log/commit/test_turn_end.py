"""How a turn of the loop ends: first leaves what it sends, then the journal gets what it recorded."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Callable

import pytest

from laminar.log import Storage
from laminar.log.disk.errors import StorageClosed
from tests.disks.fault_disk import FaultDisk
from tests.log.histories import SMALL, frame_for, open_inline, run
from tests.log.stepped import Steps, open_stepped


def append(storage: Storage, value: bytes) -> None:
    log = storage.logs.get(1) or storage.create_log("log", 1)
    log.append([frame_for(log, [value])])


def test_what_a_turn_sends_leaves_before_the_journal_has_it() -> None:
    """The one turn's end that hears of a sync also hands over what the sync is to cover."""

    async def main() -> None:
        steps = Steps(random.Random(1))
        storage = open_stepped(FaultDisk(), steps, settings=SMALL)
        seen: list[str] = []

        def at_turn_end() -> None:
            seen.append(f"sends, {len(steps.worker('journal').tasks)} handed over")
            storage.when_stored(lambda failure: seen.append(f"stored: {failure}"))

        storage.end_turns_with(at_turn_end)
        append(storage, b"a")
        await asyncio.sleep(0)
        assert ["sends, 0 handed over"] == seen and 1 == len(steps.worker("journal").tasks)
        storage.end_turns_with(lambda: seen.append("another end of a turn"))
        await steps.drain()

        assert ["sends, 0 handed over", "stored: None"] == seen

    run(main())


async def gathering() -> tuple[Steps, Storage, list[str], Callable[[], None]]:
    """A storage that says when a turn ends, and what records a change and says so."""
    steps = Steps(random.Random(1))
    storage = open_stepped(FaultDisk(), steps, settings=SMALL)
    append(storage, b"a")
    await steps.drain()
    seen: list[str] = []

    def gathered() -> None:
        seen.append("gathered")
        append(storage, b"b")

    storage.end_turns_with(lambda: seen.append("end"))
    return steps, storage, seen, gathered


def test_what_is_gathered_up_to_the_end_of_a_turn_leaves_with_it() -> None:
    """It is recorded in the pass in which a change of the pass before leaves, and leaves then, too."""

    async def main() -> None:
        steps, storage, seen, gathered = await gathering()
        storage.before_turn_end(gathered)
        storage.before_turn_end(gathered)
        await asyncio.sleep(0)
        assert [] == seen
        append(storage, b"c")
        await asyncio.sleep(0)
        assert ["gathered", "gathered", "end"] == seen
        assert 1 == len(steps.worker("journal").tasks)
        for _ in range(3):
            await asyncio.sleep(0)
        assert ["gathered", "gathered", "end"] == seen, "the turn ended twice"
        storage.before_turn_end(gathered)
        await steps.drain()
        assert ["gathered", "end"] == seen[3:]
        assert storage.logs[1].last_index == 5 and storage.statistics()["frames"] == 3

    run(main())


@pytest.mark.parametrize("first", ["gathered", "scheduled"])
def test_what_is_gathered_leaves_with_what_else_leaves_then(first: str) -> None:
    """In one hand-over and one end, whether something was recorded before, or comes in the next pass."""

    async def main() -> None:
        steps, storage, seen, gathered = await gathering()
        if first == "scheduled":
            asyncio.get_running_loop().call_soon(storage.schedule_turn_end)
        storage.before_turn_end(gathered)
        if first == "gathered":
            append(storage, b"c")
        for _ in range(5):
            await asyncio.sleep(0)
        assert ["gathered", "end"] == seen
        assert 1 == len(steps.worker("journal").tasks)

    run(main())


def test_a_mistake_of_what_gathers_ends_the_process() -> None:
    """Those that wait for what it would have recorded would wait for ever."""

    async def main() -> None:
        storage = open_inline(FaultDisk())
        errors: list[BaseException] = []
        storage.on_failure = errors.append

        def broken() -> None:
            raise RuntimeError("a mistake")

        storage.before_turn_end(broken)
        append(storage, b"a")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        assert ["a mistake"] == [str(error) for error in errors]
        with pytest.raises(StorageClosed):
            await storage.sync()

    run(main())


def test_what_was_recorded_is_handed_over_although_sending_failed() -> None:
    async def main() -> None:
        storage = open_inline(FaultDisk())
        asked = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: asked.append(context))

        def broken() -> None:
            raise RuntimeError("a mistake")

        storage.end_turns_with(broken)
        append(storage, b"a")
        await storage.sync()

        assert ["a mistake"] == [str(context["exception"]) for context in asked]

    run(main())


def test_who_waits_hears_of_a_failed_journal_once_and_later_ones_too() -> None:
    async def main() -> None:
        disk = FaultDisk()
        storage = open_inline(disk)
        failures: list[BaseException | None] = []
        ends: list[str] = []
        storage.on_failure = lambda error: ends.append(f"{type(error).__name__} after {len(failures)}")
        append(storage, b"a")
        storage.when_stored(failures.append)
        await storage.sync()
        assert [None] == failures
        storage.when_stored(failures.append)
        assert [None] == failures, "it is called within the call"
        await asyncio.sleep(0)
        assert [None, None] == failures
        disk.error = lambda operation, path: errno.EIO if operation == "sync" and "journal-" in path else None
        append(storage, b"b")
        storage.when_stored(failures.append)
        with pytest.raises(StorageClosed):
            await storage.sync()
        storage.when_stored(failures.append)
        await asyncio.sleep(0)
        await asyncio.sleep(0)

        assert [None, None, StorageClosed, StorageClosed] == [
            failure if failure is None else type(failure) for failure in failures
        ]
        assert ["DiskError after 2"] == ends, "who waits hears of it before the process has its reason"

    run(main())
