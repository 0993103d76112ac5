"""`verify` reads every byte and finds each that is wrong; `inspect` tells what is there; both only look."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import laminar
from laminar.log import NotALogFolder, StorageSettings, open_folder, open_log
from laminar.log.disk.disk import ReadOnlyDisk, RealDisk
from laminar.log.disk.errors import DiskError
from laminar.log.key_index.writer import KeyIndexWriter
from laminar.log.tools.inspection import inspect
from laminar.log.tools.verification import Finding, total_bytes, verify

SMALL = StorageSettings(first_journal_file_bytes=1 << 17, journal_file_bytes=1 << 17)


async def fill(path: Path) -> None:
    """Two logs, one of several segments with its start moved, opened twice so that nothing is the first."""
    for turn in range(2):
        async with open_folder(path, segment_size_bytes=4_000, settings=SMALL) as folder:
            log, other = await folder.log("log"), await folder.log("other")
            for each in range(12):
                await log.append([b"%d" % each * 50] * 3, keys=[b"k", None, b"l"], tags=["a", None, "b"])
                await other.append([b"x"])
            await log.trim_before(10 if turn else 3)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that nobody writes to; tests put back what they change."""
    path = tmp_path_factory.mktemp("verify") / "data"
    asyncio.run(fill(path))
    return path


def files_of(path: Path) -> list[Path]:
    """All that holds something: locks are empty, and a spare is a file for a journal to come."""
    return sorted(
        each
        for each in path.rglob("*")
        if each.is_file() and each.stat().st_size and not each.name.startswith("spare-")
    )


def snapshot(path: Path) -> dict[Path, tuple[bytes, int]]:
    return {each: (each.read_bytes(), each.stat().st_mtime_ns) for each in files_of(path)}


def flips(path: Path, *, count: int, rng: random.Random) -> Iterator[tuple[Path, int]]:
    """Positions, as many for each kind of file, anywhere in it, and its first and last byte."""
    kinds: dict[str, list[Path]] = {}
    for file in files_of(path):
        kind = "journal" if file.name.startswith("journal") else file.suffix or file.name
        if file.suffix in (".a", ".b"):
            kind = file.name.rsplit("-", 1)[0] + file.suffix
        kinds.setdefault(kind, []).append(file)
    for kind, members in kinds.items():
        for turn in range(count):
            file = rng.choice(members)
            size = file.stat().st_size
            if kind == "journal":
                size = min(size, 40 * 4096)  # the rest is room that was never used
            yield file, [0, size - 1][turn] if turn < 2 else rng.randrange(size)


def covers(finding: Finding, file: Path, position: int) -> bool:
    return finding.file == str(file) and finding.position <= position < finding.position + finding.size


def test_a_whole_folder_has_no_findings_and_is_not_changed(filled: Path) -> None:
    """Everything is read, nothing is written, and the progress adds up to what was read."""
    before = snapshot(filled)
    done: list[int] = []

    verified = verify(str(filled), progress=done.append)

    assert ([], [], False, "logs") == (
        verified.findings,
        verified.unverified,
        verified.live,
        verified.kind,
    )
    assert sum(len(data) for data, _ in before.values()) == verified.bytes == sum(done)
    assert 0 < total_bytes(str(filled)) <= verified.bytes
    assert before == snapshot(filled)


def test_every_flipped_bit_is_found(filled: Path) -> None:
    """In every kind of file and every region: named with file and position, and damage, not a note.

    What carries no meaning is room of the journal that no frame uses: there it is a note.
    """
    rng = random.Random(9)
    tried = 0
    for file, position in flips(filled, count=60, rng=rng):
        whole = file.read_bytes()
        rotten = bytearray(whole)
        rotten[position] ^= 1 << rng.randrange(8)
        file.write_bytes(rotten)
        try:
            found = verify(str(filled)).findings
        finally:
            file.write_bytes(whole)
        hits = [each for each in found if covers(each, file, position)]
        unused = file.name.startswith("journal") and not any(whole[position // 4096 * 4096 :])
        assert hits, (file, position, found)
        assert unused or any(each.severity == "damage" for each in hits), (file, position, found)
        tried += 1

    assert tried > 400
    assert not verify(str(filled)).findings


async def index_keys(path: Path) -> None:
    """Key indexes of all sealed segments, as a node would have built them."""
    async with open_folder(path, segment_size_bytes=4_000, settings=SMALL) as folder:
        log = (await folder.log("log"))._log
        for segment in log.sealed_segments():
            file = RealDisk().open(segment.file.key_index_path, create=True)
            writer = KeyIndexWriter(file, segment.covered, ["key"])
            writer.add("key", [b"k" * 8], segment.first_offset)
            writer.finish()


def test_a_key_index_is_read_and_what_is_wrong_with_it_is_a_note(filled: Path, tmp_path: Path) -> None:
    """Nothing is lost with it; `inspect` tells its size."""
    shutil.copytree(filled, tmp_path / "data")
    path = tmp_path / "data"
    asyncio.run(index_keys(path))
    first, *_, last = sorted(path.rglob("*.find"))
    verified = verify(str(path))
    assert not verified.findings
    assert sum(len(data) for data, _ in snapshot(path).values()) == verified.bytes
    (log,) = (each for each in inspect(str(path))["logs"] if each["log"] == "log")
    sizes = [each["key_index_bytes"] for each in log["segments"]]
    assert sizes[0] == first.stat().st_size and sizes[-1] is None

    whole = first.read_bytes()
    for data in (whole[:-1], bytes(len(whole)), whole[:-1] + b"x", last.read_bytes(), b""):
        first.write_bytes(data)
        (found,) = verify(str(path)).findings
        assert (found.file, found.severity) == (str(first), "note") and "key index" in found.what
    first.write_bytes(whole)
    lone = last.with_name(f"{99999:020d}.find")
    lone.write_bytes(whole)
    assert [each.severity for each in verify(str(path)).findings] == ["note"]


def test_every_byte_of_a_short_segment_its_index_and_the_checkpoint_counts(tmp_path: Path) -> None:
    """Not a sample: each byte in turn, of documents every third."""

    async def one() -> None:
        async with open_log(tmp_path, settings=SMALL) as log:
            await log.append([b"a"])

    asyncio.run(one())
    for pattern in ("logs/*/*.log", "logs/*/*.index", "store/checkpoint-*.a", "store/manifest-*.b"):
        (file,) = tmp_path.glob(pattern)
        whole = file.read_bytes()
        for position in range(0, len(whole), 3 if pattern.startswith("store") else 1):
            rotten = bytearray(whole)
            rotten[position] ^= 0x10
            file.write_bytes(rotten)
            found = verify(str(tmp_path)).findings
            assert any(covers(each, file, position) for each in found), (file, position, found)
        file.write_bytes(whole)


@pytest.mark.parametrize(
    "pattern", ["logs/log-*/*.log", "logs/log-*/*.index", "store/*.a", "store/journal-*"]
)
def test_bytes_that_are_missing_are_found(filled: Path, pattern: str) -> None:
    """Cut at the end, or gone altogether."""
    for file in filled.glob(pattern):
        whole = file.read_bytes()
        for left in (0, 1, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:left])
            damaged = verify(str(filled)).damaged
            assert damaged or (file.name.startswith("journal") and not any(whole[left:])), (file, left)
        file.unlink()
        damaged = verify(str(filled)).damaged
        file.write_bytes(whole)
        assert damaged, file


def test_a_document_whose_change_was_cut_short_is_a_note(filled: Path) -> None:
    """A crash leaves a torn newer copy beside the whole older ones: the next start ends it."""
    (older,) = (filled / "store").glob("manifest-*.a")
    newer = older.with_name(f"manifest-{int(older.stem.split('-')[1]) + 1}.a")
    newer.write_bytes(older.read_bytes()[:30])
    verified = verify(str(filled))
    newer.unlink()

    assert {str(newer)} == {each.file for each in verified.findings}
    assert not verified.damaged


def test_segments_and_rows_form_one_chain(filled: Path) -> None:
    """P9: whole frames in the wrong place, and a whole index of another segment, are found by the chain."""
    segments = sorted(filled.glob("logs/log-*/*.log"))
    first, second = segments[:2]
    kept = {file: file.read_bytes() for file in (first, second, first.with_suffix(".index"))}

    first.write_bytes(kept[second])
    wrong = [each.what for each in verify(str(filled)).findings]
    assert any("instead of" in what for what in wrong)
    first.write_bytes(kept[first])
    first.with_suffix(".index").write_bytes(second.with_suffix(".index").read_bytes())
    assert any("head of the index" in each.what for each in verify(str(filled)).findings)
    for file, data in kept.items():
        file.write_bytes(data)

    assert not verify(str(filled)).findings


def test_a_damaged_batch_is_named_with_its_offsets(filled: Path) -> None:
    """By its header if the body is damaged, by its index row if the header is."""
    file = min(filled.glob("logs/log-*/*.log"))
    whole = file.read_bytes()
    for position in (70, 200):
        rotten = bytearray(whole)
        rotten[position] ^= 1
        file.write_bytes(rotten)
        (finding,) = verify(str(filled)).findings
        file.write_bytes(whole)
        assert 3 == (finding.next_offset or 0) - (finding.first_offset or 0), finding
        assert 0 == finding.position


@pytest.mark.parametrize("checkpoint_bytes", [1 << 26, 1 << 14], ids=["rare checkpoints", "frequent ones"])
async def test_a_folder_in_use_is_read_without_its_lock(tmp_path: Path, checkpoint_bytes: int) -> None:
    """It says so, leaves out what moves, and finds no damage where there is none; its owner goes on."""
    settings = dataclasses.replace(SMALL, checkpoint_bytes=checkpoint_bytes)
    async with open_log(tmp_path, segment_size_bytes=4_000, settings=settings) as log:

        async def write() -> None:
            for each in range(200):
                await log.append([b"%d" % each * 40] * 3)
                if each % 20 == 19:
                    await log.trim_before(each * 3 - 30)

        writing = asyncio.create_task(write())
        rounds = 0
        while not writing.done() or not rounds:
            verified = await asyncio.to_thread(verify, str(tmp_path))
            described = await asyncio.to_thread(inspect, str(tmp_path))
            assert verified.live
            assert described["live"]
            assert [] == verified.findings
            rounds += 1
        await writing

    assert not inspect(str(tmp_path))["live"]
    # A journal file that is used again ends in older frames, which say nothing.
    assert {"note"} >= {each.severity for each in verify(str(tmp_path)).findings}


async def test_damage_in_a_folder_in_use_is_found(tmp_path: Path) -> None:
    """What stays wrong on a second look is damage, in use or not."""

    def rot() -> Path:
        segment = min(tmp_path.rglob("*.log"))
        rotten = bytearray(segment.read_bytes())
        rotten[1000] ^= 1
        segment.write_bytes(rotten)
        return segment

    async with open_log(tmp_path, segment_size_bytes=4_000, settings=SMALL) as log:
        for each in range(60):
            await log.append([b"%d" % each * 40] * 3)
    async with open_log(tmp_path, segment_size_bytes=4_000, settings=SMALL) as log:
        await log.append([b"x"])
        segment = await asyncio.to_thread(rot)

        verified = await asyncio.to_thread(verify, str(tmp_path))

        assert verified.live
        assert any(covers(each, segment, 1000) and each.severity == "damage" for each in verified.findings)


@pytest.mark.parametrize("flush", ["None", "laminar.log.FlushPolicy(interval_ms=20)"])
async def test_a_folder_of_a_killed_process_is_not_called_damaged(tmp_path: Path, flush: str) -> None:
    """Killed while it writes: what lies behind the checkpoint is the next start's, and it opens whole."""
    code = (
        "import asyncio, sys, laminar\n"
        "async def main():\n"
        f"    flush = {flush}\n"
        "    async with laminar.log.open_log(sys.argv[1], segment_size_bytes=20_000, flush=flush) as log:\n"
        "        while True:\n"
        "            print((await log.append([b'x' * 500] * 4)).next_offset, flush=True)\n"
        "asyncio.run(main())\n"
    )
    writer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, tmp_path / "data", stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    for _ in range(100):
        told = int(await writer.stdout.readline())
    writer.kill()
    await writer.communicate()

    verified = verify(str(tmp_path / "data"))
    assert [] == [each for each in verified.findings if each.severity == "damage"]
    assert flush != "None" or inspect(str(tmp_path / "data"))["stores"][0]["records_behind_checkpoint"] >= 100
    async with open_log(tmp_path / "data") as log:
        assert log.end_offset >= told
    assert [] == verify(str(tmp_path / "data")).findings


def test_inspect_tells_ranges_and_sizes(filled: Path) -> None:
    """By index, offset, term and time, of each log and segment; and the checkpoint and journal behind."""
    found = inspect(str(filled))
    log, other = found["logs"]

    assert ["log", "other"] == [each["log"] for each in found["logs"]]
    assert (24, 72, 24) == (log["last_index"], log["end_offset"], other["end_offset"])
    assert 9 == log["start_offset"]
    assert (1, 1) == (log["first_term"], log["last_term"])
    assert log["first_time"] <= log["last_time"]
    assert len(log["segments"]) > 2
    for one, behind in zip(log["segments"], log["segments"][1:], strict=False):
        assert one["next_offset"] == behind["first_offset"]
        assert one["last_index"] + 1 == behind["first_index"]
    (home,) = found["stores"]
    assert 2 == home["checkpoint"]["logs"]
    assert home["journal_bytes"] > 0


def test_one_log_and_one_segment_can_be_looked_at(filled: Path) -> None:
    """In their folder, with what it says of them, and as copies somewhere else."""
    segment = min(filled.glob("logs/log-*/*.log"))
    for path, kind in (
        (segment.parent, "log"),
        (segment, "segment"),
        (segment.with_suffix(".index"), "segment"),
    ):
        verified = verify(str(path))
        assert (kind, []) == (verified.kind, verified.findings)
        assert inspect(str(path))["logs"][0]["log"] == "log"


def test_a_copied_segment_is_verified_by_itself(filled: Path, tmp_path: Path) -> None:
    segment = min(filled.glob("logs/log-*/*.log"))
    shutil.copy(segment, tmp_path)
    shutil.copy(segment.with_suffix(".index"), tmp_path)
    assert [] == verify(str(tmp_path / segment.name)).findings

    copied = bytearray(segment.read_bytes())
    copied[-1] ^= 1
    (tmp_path / segment.name).write_bytes(copied)
    assert 1 == len(verify(str(tmp_path / segment.name)).findings)


def test_what_is_no_folder_of_logs_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("x")
    for path in (tmp_path, tmp_path / "file.txt", tmp_path / "missing"):
        with pytest.raises(NotALogFolder, match=str(path)):
            inspect(str(path))


async def test_a_nodes_folder_is_whole_from_its_identity_to_its_logs(tmp_path: Path) -> None:
    """Every document of a node, and the logs of its topics by their names."""
    data = tmp_path / "data"
    async with laminar.embed(data, journal_file_bytes=4 << 20) as node:
        topic = await node.client.create_topic("t", partitions=2)
        await topic.append(b"x", key="k")
        assert inspect(str(data))["live"]
    assert [] == verify(str(data)).findings
    named = {(each["topic"], each["partition"]) for each in inspect(str(data))["logs"]}
    assert {("", 0), ("t", 0), ("t", 1)} == named

    for file in [*data.glob("*.a"), *data.glob("*.b")]:
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert [str(file)] == [each.file for each in verify(str(data)).findings]
        file.write_bytes(whole)


def test_nothing_can_be_changed_by_looking(tmp_path: Path) -> None:
    """The disk that verify and inspect are given refuses."""
    disk = ReadOnlyDisk()
    file = tmp_path / "file"
    file.write_bytes(b"x")

    opened = disk.open(str(file))
    with pytest.raises(DiskError):
        opened.pwritev([b"y"], 0)
    opened.close()
    for change in (
        lambda: disk.open(str(tmp_path / "new"), create=True),
        lambda: disk.unlink(str(file)),
        lambda: disk.rename(str(file), str(tmp_path / "new")),
        lambda: disk.make_directory(str(tmp_path / "new")),
        lambda: disk.remove_tree(str(tmp_path)),
        lambda: disk.lock(str(file)),
    ):
        with pytest.raises(DiskError, match="reading only"):
            change()

    assert ["file"] == os.listdir(tmp_path)
