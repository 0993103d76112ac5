"""`laminar.log` as a library: logs in a user's own loop, without server or cluster."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

import laminar
from laminar.batch import BatchError
from laminar.log import (
    COMMIT,
    AppendRefused,
    DamagedRange,
    DiskError,
    FlushPolicy,
    FolderInUse,
    LogFolder,
    NotALogFolder,
    OffsetOutOfRange,
    RecordsLost,
    StorageClosed,
    StorageSettings,
    open_folder,
    open_log,
)
from laminar.log.disk.disk import Buffer, File, RealDisk
from laminar.log.disk.document import Document
from laminar.log.disk.trash import Trash
from laminar.log.tools.verification import verify
from tests.disks.fault_disk import FaultDisk

SMALL = StorageSettings(first_journal_file_bytes=1 << 18, journal_file_bytes=1 << 18)
FULL = ("create", True)
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


@pytest.mark.parametrize("loop", LOOPS, ids=["asyncio", "uvloop"])
def test_a_log_is_opened_appended_to_and_read_in_any_loop(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    """X1, X2: the engine of a node's shard, under whichever loop the user runs."""

    async def main() -> None:
        async with laminar.log.open_log(tmp_path / "data", settings=SMALL) as log:
            receipt = await log.append([b"a", b"b"], keys=[b"k", None], tags=["x", "y"])
            assert (0, 2, 2) == (receipt.offset, receipt.count, receipt.next_offset)
            assert 2 == (await log.append([b"c"])).offset
        async with laminar.log.open_log(tmp_path / "data", settings=SMALL) as log:
            assert 3 == (await log.append([b"d"])).offset
            found = [(each.offset, each.key, each.tag, each.value) async for each in log.read()]
            assert found == [
                (0, b"k", "x", b"a"),
                (1, None, "y", b"b"),
                (2, None, None, b"c"),
                (3, None, None, b"d"),
            ]

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())


async def test_logs_of_a_folder_share_one_journal(tmp_path: Path) -> None:
    """Named logs, each with offsets of its own; both are there when the folder is opened again."""
    async with open_folder(tmp_path, settings=SMALL) as folder:
        a, b = await folder.log("a"), await folder.log("b")
        await asyncio.gather(a.append([b"1"]), b.append([b"2"]), a.append([b"3"]))
        assert ["a", "b"] == folder.names
        assert a is await folder.log("a")

    async with open_folder(tmp_path, settings=SMALL) as folder:
        a, b = await folder.log("a", create=False), await folder.log("b", create=False)
        assert [b"1", b"3"] == [each.value async for each in a.read()]
        assert [b"2"] == [each.value async for each in b.read()]
        with pytest.raises(KeyError):
            await folder.log("c", create=False)
        with pytest.raises(ValueError, match="log name"):
            await folder.log("../c")


async def test_any_offset_is_read_in_any_order(tmp_path: Path) -> None:
    """U6, P4, P7: over many segments, before and after the folder is opened again."""
    rng = random.Random(6)
    sizes = [rng.randint(1, 5) for _ in range(60)]
    count = sum(sizes)

    async def check() -> None:
        async with open_log(tmp_path, segment_size_bytes=2_000, settings=SMALL) as log:
            if not log.end_offset:
                offset = 0
                for size in sizes:
                    await log.append([b"%d" % each for each in range(offset, offset + size)])
                    offset += size
            assert (0, count) == (log.start_offset, log.end_offset)
            wanted = rng.sample(range(count), count)
            assert [b"%d" % each for each in wanted] == [(await log.record(each)).value for each in wanted]
            assert [b"%d" % each for each in wanted] == [bytes(await log.value(each)) for each in wanted]
            for start in rng.sample(range(count), 10):
                stop = rng.randint(start, count)
                found = [each.offset async for each in log.read(start, stop)]
                assert list(range(start, stop)) == found

    await check()
    assert len(list((tmp_path / "logs").rglob("*.log"))) > 5
    await check()


async def test_tasks_share_a_log_without_an_actor(tmp_path: Path) -> None:
    """B14: many tasks append to and read from one log; each sees its own appends, in its own order."""
    async with open_log(tmp_path, settings=SMALL) as log:

        async def work(number: int) -> None:
            own = []
            for step in range(20):
                receipt = await log.append([b"%d:%d" % (number, step)])
                own.append(receipt.offset)
                assert b"%d:%d" % (number, step) == (await log.record(receipt.offset)).value
            assert own == sorted(own)

        await asyncio.gather(*map(work, range(10)))

        values = [each.value async for each in log.read()]
        assert 200 == len(set(values)) == log.end_offset


async def test_appends_get_their_offsets_in_the_order_of_the_calls(tmp_path: Path) -> None:
    """Also when nobody waits in between."""
    async with open_log(tmp_path, settings=SMALL) as log:
        receipts = await asyncio.gather(*(log.append([b"%d" % each]) for each in range(100)))

        assert list(range(100)) == [each.offset for each in receipts]
        assert [b"%d" % each for each in range(100)] == [each.value async for each in log.read()]


async def test_a_follower_gets_what_is_appended_once_it_is_durable(tmp_path: Path) -> None:
    """From the end or from an old offset; when the folder is closed it is told."""
    async with open_log(tmp_path, settings=SMALL) as log:
        await log.append([b"old"])
        seen: asyncio.Queue[bytes] = asyncio.Queue()

        async def follow() -> None:
            async for record in log.read(follow=True):
                assert record.offset < log.end_offset
                seen.put_nowait(record.value)

        follower = asyncio.create_task(follow())
        assert b"old" == await seen.get()
        await log.append([b"new"])
        assert b"new" == await seen.get()
        given_up = asyncio.create_task(log.append([b"unwaited"]))
        await asyncio.sleep(0)
        given_up.cancel()
        assert b"unwaited" == await seen.get()

    with pytest.raises(StorageClosed):
        await follower
    with pytest.raises(StorageClosed):
        await log.append([b"late"])


async def test_old_records_are_given_up_by_whole_batches(tmp_path: Path) -> None:
    """The start moves to the batch that holds the offset; what is before it can't be read any more."""
    async with open_log(tmp_path, segment_size_bytes=1_000, settings=SMALL) as log:
        for _ in range(20):
            await log.append([b"x" * 50] * 3)

        assert 30 == await log.trim_before(31)
        assert 30 == await log.trim_before(5)
        with pytest.raises(OffsetOutOfRange) as found:
            await log.record(29)
        with pytest.raises(OffsetOutOfRange):
            await log.value(29)
        assert (29, 30, 60) == (found.value.offset, found.value.start_offset, found.value.end_offset)
        assert list(range(30, 60)) == [each.offset async for each in log.read()]
        with pytest.raises(OffsetOutOfRange):
            await log.trim_before(61)

    async with open_log(tmp_path, segment_size_bytes=1_000, settings=SMALL) as log:
        assert (30, 60) == (log.start_offset, log.end_offset)


async def test_offsets_are_never_used_again_after_everything_is_given_up(tmp_path: Path) -> None:
    """B5: an emptied log keeps its place, in memory and when it is opened again."""
    async with open_log(tmp_path, settings=SMALL) as log:
        await log.append([b"a", b"b"])
        assert 2 == await log.trim_before(2)
        assert [] == [each async for each in log.read()]

    async with open_log(tmp_path, settings=SMALL) as log:
        assert (2, 2) == (log.start_offset, log.end_offset)
        assert 2 == (await log.append([b"c"])).offset
        assert [b"c"] == [each.value async for each in log.read()]

    async with open_log(tmp_path, settings=SMALL) as log:
        assert b"c" == (await log.record(2)).value


async def test_a_new_log_whose_beginning_was_given_up_survives_a_kill(tmp_path: Path) -> None:
    """Before the first checkpoint the journal alone knows the log, and its start has moved already."""
    async with open_log(tmp_path / "data", settings=SMALL) as log:
        for _ in range(8):
            await log.append([b"x", b"y"])
        assert 6 == await log.trim_before(6)
        await log.append([b"z"])
        await asyncio.to_thread(shutil.copytree, tmp_path / "data", tmp_path / "killed")

    async with open_log(tmp_path / "killed", settings=SMALL) as log:
        assert (6, 17, False) == (log.start_offset, log.end_offset, log.records_lost)
        assert [6, 16] == [(await log.record(offset)).offset for offset in (6, 16)]


async def test_a_reader_that_retention_overtook_is_told(tmp_path: Path) -> None:
    """No silent gap: its next offset is gone, and the error says where the log begins."""
    async with open_log(tmp_path, settings=SMALL) as log:
        for _ in range(4):
            await log.append([b"x"])
        records = log.batches(max_bytes=1)
        assert 0 == (await anext(records)).base_offset
        await log.trim_before(3)

        with pytest.raises(OffsetOutOfRange) as found:
            await anext(records)
        assert 3 == found.value.start_offset


async def test_one_folder_is_open_once(tmp_path: Path) -> None:
    """By this process or another; it is free again when it is closed, or its process is killed."""
    folder = await LogFolder.open(tmp_path / "data", settings=SMALL)
    with pytest.raises(FolderInUse, match="open already"):
        await LogFolder.open(tmp_path / "data")
    await folder.close()

    code = (
        "import asyncio, sys, laminar\n"
        "async def main():\n"
        "    async with laminar.log.open_log(sys.argv[1]) as log:\n"
        "        print(await log.append([b'kept']), flush=True)\n"
        "        await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, tmp_path / "data", stdout=subprocess.PIPE
    )
    assert other.stdout is not None
    assert await other.stdout.readline()
    with pytest.raises(FolderInUse):
        await LogFolder.open(tmp_path / "data")
    other.send_signal(signal.SIGKILL)
    await other.wait()
    async with open_log(tmp_path / "data") as log:
        assert [b"kept"] == [each.value async for each in log.read()]


async def test_a_folder_of_something_else_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")

    with pytest.raises(NotALogFolder, match=r"letter\.txt"):
        await LogFolder.open(tmp_path)

    assert ["letter.txt"] == os.listdir(tmp_path)


async def test_a_refused_append_leaves_no_trace(tmp_path: Path) -> None:
    """P10, P11: sizes and shapes are judged before anything is touched."""
    async with open_log(tmp_path, max_batch_bytes=10_000, settings=SMALL) as log:
        with pytest.raises(BatchError, match="at most 10000") as found:
            await log.append([b"x" * 10_001])
        assert ("too_large", "values", 10_001) == (found.value.code, found.value.field, found.value.value)
        with pytest.raises(BatchError, match="no records"):
            await log.append([])
        with pytest.raises(TypeError, match="values"):
            await log.append(b"text")  # type: ignore[arg-type]  # what is tried here
        with pytest.raises(BatchError):
            await log.append([b"x"], timestamps=[1 << 70])

        assert 0 == log.end_offset
        assert 0 == (await log.append([b"x"])).offset


async def test_a_log_goes_with_all_its_records_when_it_is_deleted(tmp_path: Path) -> None:
    """P16: nothing of it is left under its name; the files are in the trash, other logs untouched."""
    async with open_folder(tmp_path, settings=SMALL) as folder:
        gone, kept = await folder.log("gone"), await folder.log("kept")
        await asyncio.gather(gone.append([b"1"]), kept.append([b"2"]))
        await folder.delete("gone")
        with pytest.raises(StorageClosed, match="deleted"):
            await gone.append([b"3"])
        assert ["kept"] == folder.names
        assert 0 == (await folder.log("gone")).end_offset

    async with open_folder(tmp_path, settings=SMALL) as folder:
        assert [b"2"] == [each.value async for each in (await folder.log("kept")).read()]
        assert [] == [each.value async for each in (await folder.log("gone")).read()]


async def test_damage_is_an_error_at_its_offset_and_reading_goes_on_behind_it(tmp_path: Path) -> None:
    """B9: no silent gap in a stream. The error names file, position and offsets."""
    async with open_log(tmp_path, settings=SMALL) as log:
        for each in range(3):
            await log.append([b"%d" % each] * 2)
    (segment,) = (tmp_path / "logs").rglob("*.log")
    stored = bytearray(segment.read_bytes())
    stored[len(stored) // 2] ^= 1
    segment.write_bytes(stored)

    async with open_log(tmp_path, settings=SMALL) as log:
        records = log.read()
        assert [0, 1] == [(await anext(records)).offset for _ in range(2)]
        with pytest.raises(DamagedRange) as found:
            await anext(records)
        assert (2, 4) == (found.value.first_offset, found.value.next_offset)
        assert str(segment) == found.value.file
        assert [4, 5] == [each.offset async for each in log.read(found.value.next_offset)]


async def test_a_log_that_lost_its_end_takes_no_more_until_that_is_accepted(tmp_path: Path) -> None:
    """Offsets that were given once are not given again in silence."""
    async with open_log(tmp_path, settings=SMALL) as log:
        for each in range(3):
            await log.append([b"%d" % each])
    (segment,) = (tmp_path / "logs").rglob("*.log")
    segment.write_bytes(segment.read_bytes()[: segment.stat().st_size * 2 // 3])

    async with open_log(tmp_path, settings=SMALL) as log:
        assert log.records_lost
        assert [b"0", b"1"] == [each.value async for each in log.read()]
        with pytest.raises(RecordsLost, match="offset 2"):
            await log.append([b"new"])
        await log.accept_loss()
        assert 2 == (await log.append([b"new"])).offset

    async with open_log(tmp_path, settings=SMALL) as log:
        assert not log.records_lost
        assert [b"0", b"1", b"new"] == [each.value async for each in log.read()]


async def test_a_log_of_which_nothing_is_left_is_lost_and_not_new(tmp_path: Path) -> None:
    """Journal and checkpoint gone: the manifest tells that there was a log."""
    async with open_folder(tmp_path, settings=SMALL) as folder:
        await (await folder.log("a")).append([b"1"])
    for file in [*(tmp_path / "store").glob("journal-*"), *(tmp_path / "store").glob("checkpoint-*")]:
        file.unlink()

    async with open_folder(tmp_path, settings=SMALL) as folder:
        with pytest.raises(RecordsLost, match="'a'"):
            await folder.log("a")
        await folder.delete("a")
        assert 0 == (await folder.log("a")).end_offset


async def test_records_are_found_by_their_time_and_as_arrow(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    async with open_log(tmp_path, settings=SMALL) as log:
        first = await log.append([b"a", b"b", b"c"])
        await log.append([b"d", b"e"])

        assert 0 == log.offset_at(first.append_time_ms)
        assert 5 == log.offset_at(first.append_time_ms + 1_000_000)
        assert [b"b", b"c", b"d"] == (await log.to_arrow(1, 4))["value"].to_pylist()
        assert 0 == len(await log.to_arrow(5))


async def test_a_log_can_be_flushed_by_interval(tmp_path: Path) -> None:
    """Acknowledged when it is written; nothing is lost by a clean end, and the policy stays until changed."""
    interval = FlushPolicy(interval_ms=50)
    async with open_log(tmp_path, flush=interval, settings=SMALL) as log:
        receipts = await asyncio.gather(*(log.append([b"%d" % each]) for each in range(50)))
        assert list(range(50)) == [each.offset for each in receipts]
        assert 50 == log.end_offset
        assert b"49" == (await log.record(49)).value
        assert 10 == await log.trim_before(10)

    async with open_folder(tmp_path, settings=SMALL) as folder:
        log = await folder.log("log")
        assert interval == log.flush
        assert not log.records_lost
        assert [b"%d" % each for each in range(10, 50)] == [each.value async for each in log.read()]
        assert log is await folder.log("log", flush=COMMIT)
        assert (COMMIT, 0) == (log.flush, log.unsynced_records)
        assert 50 == (await log.append([b"durable"])).offset

    assert [] == verify(str(tmp_path)).findings
    async with open_log(tmp_path, settings=SMALL) as log:
        assert COMMIT == log.flush
        assert b"durable" == (await log.record(50)).value


class OtherBoot(RealDisk):
    """The same disk after the machine was started again."""

    def boot_id(self) -> bytes:
        return b"another boot ..."


async def test_an_interval_log_goes_on_after_a_loss_of_power(tmp_path: Path) -> None:
    """It may have lost its last interval, which is what was asked for: nobody has to accept it."""
    async with open_log(tmp_path / "data", flush=FlushPolicy(interval_ms=60_000), settings=SMALL) as log:
        for each in range(10):
            await log.append([b"%d" % each])
        await asyncio.to_thread(shutil.copytree, tmp_path / "data", tmp_path / "copy")

    folder = await LogFolder.open(tmp_path / "copy", settings=SMALL, disk=OtherBoot())
    log = await folder.log("log")
    assert not log.records_lost
    left = [each.value async for each in log.read()]
    assert [b"%d" % each for each in range(len(left))] == left
    assert len(left) == (await log.append([b"new"])).offset
    await folder.close()


class SlowDisk(RealDisk):
    """The real disk; while `go` is not set, no checkpoint can be written."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        if "/checkpoint." in path:
            assert self.go.wait(60)
        return super().open(path, create=create, exclusive=exclusive)


async def test_a_close_that_was_cancelled_goes_on_and_can_be_waited_for(tmp_path: Path) -> None:
    disk = SlowDisk()
    folder = await LogFolder.open(tmp_path / "data", settings=SMALL, disk=disk)
    log = await folder.log("log")
    await log.append([b"kept"])
    disk.go.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await folder.close()
    with pytest.raises(StorageClosed):
        await log.append([b"too late"])
    closing = asyncio.ensure_future(folder.close())
    await asyncio.sleep(0)
    assert not closing.done()
    disk.go.set()
    await closing

    async with asyncio.timeout(60), open_folder(tmp_path / "data", settings=SMALL) as again:
        assert 1 == (await again.log("log")).end_offset


def test_a_loop_that_ends_while_a_folder_is_closed_lets_go_of_it(tmp_path: Path) -> None:
    """Ctrl-C: `asyncio.run` cancels what is left, the close among it."""

    async def interrupted() -> None:
        folder = await LogFolder.open(tmp_path / "data", settings=SMALL)
        await (await folder.log("log")).append([b"kept"])
        closing = asyncio.ensure_future(folder.close())
        await asyncio.sleep(0)
        assert not closing.done()

    async def again() -> int:
        async with asyncio.timeout(60), open_folder(tmp_path / "data", settings=SMALL) as folder:
            return (await folder.log("log")).end_offset

    asyncio.run(interrupted())
    assert 1 == asyncio.run(again())


@pytest.mark.parametrize("gone", ["manifest", "store"])
async def test_a_folder_without_a_manifest_is_refused_and_nothing_in_it_is_touched(
    tmp_path: Path, gone: str
) -> None:
    """Its logs hold records: opened as new they would be without names, and so be deleted."""
    async with open_folder(tmp_path / "data", settings=SMALL) as folder:
        await (await folder.log("orders")).append([b"kept"])
    away = tmp_path / "away"
    shutil.copytree(tmp_path / "data" / "store", away)
    if gone == "store":
        shutil.rmtree(tmp_path / "data" / "store")
    else:
        for path in (tmp_path / "data" / "store").glob("manifest-*"):
            path.unlink()
    before = sorted(path.name for path in (tmp_path / "data" / "logs").rglob("*"))

    for _ in range(2):
        with pytest.raises(RecordsLost, match=r"no manifest.*orders-.*laminar log inspect"):
            await LogFolder.open(tmp_path / "data", settings=SMALL)

    assert before == sorted(path.name for path in (tmp_path / "data" / "logs").rglob("*"))
    shutil.rmtree(tmp_path / "data" / "store", ignore_errors=True)
    shutil.copytree(away, tmp_path / "data" / "store")
    async with open_folder(tmp_path / "data", settings=SMALL) as folder:
        assert [b"kept"] == [each.value async for each in (await folder.log("orders")).read()]


async def test_what_was_deleted_leaves_the_folders_trash_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trash = tmp_path / "data" / "trash"
    emptied = asyncio.Event()

    async def purge(self: Trash, *, now_ms: int, everything: bool = False) -> None:
        await original(self, now_ms=now_ms + later_ms.pop(), everything=everything)
        emptied.set()

    original = Trash.purge
    later_ms = [24 * 3600 * 1000, 0]
    async with open_folder(tmp_path / "data", settings=SMALL) as folder:
        await (await folder.log("old")).append([b"x"])
        await folder.delete("old")
    assert 1 == len(list(trash.iterdir()))
    monkeypatch.setattr(Trash, "purge", purge)
    for left in (1, 0):
        emptied.clear()
        async with open_folder(tmp_path / "data", settings=SMALL):
            await emptied.wait()
        assert left == len(list(trash.iterdir()))


async def test_appends_to_a_disk_that_gets_full_are_refused_and_go_on_when_there_is_room(
    tmp_path: Path,
) -> None:
    """No write meets the end of the disk, so that no log stops: nothing has to be opened again."""
    disk = FaultDisk()
    async with asyncio.timeout(60):
        folder = await LogFolder.open("data", settings=SMALL, max_batch_bytes=1 << 20, disk=disk)
        log = await folder.log("log")
        disk.room_bytes = (32 + 1 + 4) << 20
        kept = 0
        with pytest.raises(AppendRefused):
            while True:
                await log.append([bytes(200_000)])
                kept += 1
        assert kept > 5
        for _ in range(3):
            with pytest.raises(AppendRefused):
                await log.append([bytes(200_000)])

        disk.room_bytes = 1 << 30
        assert kept == (await log.append([b"more"])).offset
        assert kept + 1 == len([each async for each in log.read()])
        await folder.close()


async def test_logs_that_are_asked_for_together_are_made_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One manifest names them all: else the bytes written grow with the square of their number. Who only
    looks for one makes none, and who gives up does not stop the others.
    """
    written: list[int] = []
    write = Document.write

    def counted(self: Document, payload: Buffer) -> None:
        if self.name == "manifest":
            written.append(len(payload))
        write(self, payload)

    monkeypatch.setattr(Document, "write", counted)
    async with open_folder(tmp_path / "data", settings=SMALL) as folder:
        first = await folder.log("log-0")
        written.clear()
        asked = [asyncio.ensure_future(folder.log(f"log-{number % 50}")) for number in range(100)]
        looked = asyncio.ensure_future(folder.log("nobody", create=False))
        gone = asyncio.ensure_future(folder.log("gone"))
        await asyncio.sleep(0)
        gone.cancel()
        logs = await asyncio.gather(*asked)
        assert first is logs[0] and logs[:50] == logs[50:] and 50 == len(set(map(id, logs)))
        with pytest.raises(KeyError):
            await looked
        assert len(written) <= 2
        await logs[49].append([b"value"])
        names = set(folder.names)
        assert (
            {f"log-{number}" for number in range(50)}
            <= names
            <= {
                *(f"log-{number}" for number in range(50)),
                "gone",
            }
        )
    async with open_folder(tmp_path / "data", settings=SMALL) as folder:
        assert set(folder.names) == names
        assert 1 == (await folder.log("log-49", create=False)).end_offset


async def test_logs_that_cannot_be_made_together_are_tried_each_for_itself() -> None:
    """A manifest that cannot be written refuses them, and the folder goes on when it can."""
    disk = FaultDisk()
    folder = await LogFolder.open("data", settings=SMALL, disk=disk)
    disk.error = lambda operation, path: errno.ENOSPC if (operation, "manifest" in path) == FULL else None
    before = len(folder._storage.logs)
    told = await asyncio.gather(*(folder.log(f"log-{n}") for n in range(20)), return_exceptions=True)
    assert 20 == sum(isinstance(each, DiskError) for each in told) and [] == folder.names
    assert len(folder._storage.logs) - before <= 2 * 20, "a log for each, and one for each try"
    disk.error = None
    await asyncio.gather(*(folder.log(f"log-{n}") for n in range(20)))
    assert 20 == len(folder.names)
    await folder.close()


async def test_a_deletion_that_is_cancelled_takes_no_log_that_is_asked_for_after_it(tmp_path: Path) -> None:
    """It ends all the same, before anything else: else what is appended meanwhile would go with it."""
    async with open_folder(tmp_path / "data", settings=SMALL) as folder:
        await (await folder.log("one")).append([b"old"])
        may_go_on = threading.Event()
        folder._storage._executor.post_to_writer(may_go_on.wait)  # type: ignore[arg-type]
        deleting = asyncio.ensure_future(folder.delete("one"))
        await asyncio.sleep(0)
        deleting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await deleting
        asking = asyncio.ensure_future(folder.log("one"))
        await asyncio.sleep(0)
        may_go_on.set()
        await (await asking).append([b"new"])
    async with open_folder(tmp_path / "data", settings=SMALL) as folder:
        assert ["one"] == folder.names
        log = await folder.log("one", create=False)
        assert [b"new"] == [each.value async for each in log.read()]
