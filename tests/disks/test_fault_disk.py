"""What the fault disk does beside what every disk does: it loses, tears, rots, refuses, waits."""

from __future__ import annotations

import errno
import gc
import os
import random
import shutil
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.log.disk.errors import DiskError
from tests.disks.fault_disk import BLOCK, FaultDisk, PowerCut
from tests.disks.faults import Rule, Rules
from tests.disks.names import RealNames


@pytest.fixture(params=["in memory", "over a directory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[FaultDisk, str]]:
    disk = FaultDisk() if request.param == "in memory" else FaultDisk.over(f"{tmp_path}/hidden")
    disk.make_directory(f"{tmp_path}/d")
    yield disk, f"{tmp_path}/d"
    del disk
    gc.collect()  # files close with the last reference, and a caught error refers to its frame


def _held(disk: FaultDisk, path: str) -> bytes:
    return bytes(disk.open(path).pread(1 << 20, 0))


def test_a_crash_loses_any_part_of_what_was_not_synced(place: tuple[FaultDisk, str]) -> None:
    """Bytes without a sync and names without a directory sync may go, block by block; synced ones stay."""
    disk, directory = place
    seen = set()
    for seed in range(80):
        file = disk.open(f"{directory}/f", create=True)
        file.pwritev([b"a" * 3 * BLOCK], 0)
        file.sync()
        disk.sync_directory(directory)
        file.pwritev([b"b" * 3 * BLOCK], 0)
        disk.open(f"{directory}/g", create=True)
        disk.crash(random.Random(seed))
        content = _held(disk, f"{directory}/f")
        assert 3 * BLOCK == len(content)
        assert {content[at : at + BLOCK] for at in range(0, 3 * BLOCK, BLOCK)} <= {b"a" * BLOCK, b"b" * BLOCK}
        seen.add((content[::BLOCK], disk.exists(f"{directory}/g")))
        disk.unlink(f"{directory}/g")
        disk.sync_directory(directory)
    assert 16 == len(seen)


def test_a_crash_may_leave_any_version_of_a_block(place: tuple[FaultDisk, str]) -> None:
    """Of four writes without a sync between, each may be what is left, and so may what was before."""
    disk, directory = place
    file = disk.open(f"{directory}/f", create=True)
    file.pwritev([b"0"], 0)
    file.sync()
    disk.sync_directory(directory)
    seen = set()
    for seed in range(80):
        file = disk.open(f"{directory}/f")
        file.pwritev([b"0"], 0)
        file.sync()
        for version in (b"1", b"2", b"3", b"4"):
            file.pwritev([version], 0)
        disk.crash(random.Random(seed))
        seen.add(_held(disk, f"{directory}/f"))
    assert {b"0", b"1", b"2", b"3", b"4"} == seen


@pytest.mark.parametrize("seed", range(20))
def test_what_is_left_is_what_a_simple_model_allows(place: tuple[FaultDisk, str], seed: int) -> None:
    """Random writes, truncations and syncs against lists of the versions each block has had."""
    disk, directory = place
    rng = random.Random(seed)
    path = f"{directory}/f"
    file = disk.open(path, create=True)
    disk.sync_directory(directory)
    content = bytearray()
    durable = b""
    versions: dict[int, set[bytes]] = {}
    for _ in range(120):
        match rng.choice("wwwwwtsc"):
            case "w":
                at, data = rng.randrange(4000), rng.randbytes(rng.randrange(1, 1500))
                content.extend(bytes(max(at - len(content), 0)))
                content[at : at + len(data)] = data
                file.pwritev([data], at)
            case "t":
                size = rng.randrange(5000)
                content = content[:size].ljust(size, b"\0")
                file.truncate(size)
            case "s":
                file.sync()
                durable, versions = bytes(content), {}
            case "c":
                disk.crash(rng, rng.choice([0.0, 0.5, 1.0]))
                file = disk.open(path)
                left = _held(disk, path)
                for block in range(-(-len(left) // BLOCK)):
                    piece = left[block * BLOCK : (block + 1) * BLOCK]
                    allowed = {durable[block * BLOCK : (block + 1) * BLOCK], *versions.get(block, ())}
                    assert piece in {each.ljust(BLOCK, b"\0")[: len(piece)] for each in allowed}
                content, durable, versions = bytearray(left), left, {}
        assert bytes(content) == _held(disk, path)
        for block in range(-(-len(content) // BLOCK)):
            versions.setdefault(block, set()).add(bytes(content[block * BLOCK : (block + 1) * BLOCK]))


def test_a_failed_sync_leaves_clean_pages(place: tuple[FaultDisk, str]) -> None:
    """The bytes are seen, a second sync succeeds, and a loss of power takes them all the same."""
    disk, directory = place
    file = disk.open(f"{directory}/f", create=True)
    file.pwritev([b"old" * BLOCK], 0)
    file.sync()
    disk.sync_directory(directory)
    disk.error = lambda operation, path: errno.EIO if operation == "sync" else None
    file.pwritev([b"new"], 0)
    file.pwritev([b"behind"], 3 * BLOCK)
    with pytest.raises(DiskError):
        file.sync()
    disk.error = None
    file.pwritev([b"NEW"], BLOCK)
    file.sync()
    assert b"new" == bytes(file.pread(3, 0))

    disk.crash(random.Random(0), keep=1.0)

    left = _held(disk, f"{directory}/f")
    assert b"old" == left[:3]
    assert b"NEW" == left[BLOCK : BLOCK + 3]
    assert b"behind" not in left


def test_a_kill_keeps_what_the_page_cache_holds(place: tuple[FaultDisk, str]) -> None:
    """After it all is seen, and a crash may still take it."""
    disk, directory = place
    disk.open(f"{directory}/f", create=True).pwritev([b"unsynced"], 0)
    disk.kill()
    assert b"unsynced" == _held(disk, f"{directory}/f")
    disk.crash(random.Random(0), keep=0.0)
    assert [] == disk.list(directory)


@pytest.mark.parametrize("keep", [0.0, 0.5, 1.0])
def test_names_come_back_as_some_of_their_changes_left_them(
    place: tuple[FaultDisk, str], keep: float
) -> None:
    """A rename never leaves a file with no name; with all changes kept, it is as programs saw it."""
    disk, directory = place
    for seed in range(20):
        root = f"{directory}/{seed}"
        disk.make_directory(f"{root}/logs/one")
        disk.make_directory(f"{root}/trash")
        for name in ("a", "b"):
            disk.open(f"{root}/{name}", create=True).sync()
        disk.open(f"{root}/logs/one/s", create=True).sync()
        disk.sync_directory(root)
        disk.sync_directory(f"{root}/logs/one")
        disk.rename(f"{root}/a", f"{root}/c")
        disk.rename(f"{root}/c", f"{root}/b")
        disk.unlink(f"{root}/b")
        disk.rename(f"{root}/logs/one", f"{root}/trash/one")
        assert ["logs", "trash"] == disk.list(root)
        assert ["s"] == disk.list(f"{root}/trash/one")

        disk.crash(random.Random(seed), keep)

        names = set(disk.list(root))
        if keep == 1:
            assert {"logs", "trash"} == names
        if keep == 0:
            assert {"a", "b", "logs", "trash"} == names
        assert {("one",), ()} == {tuple(disk.list(f"{root}/logs")), tuple(disk.list(f"{root}/trash"))}
        kept = "logs" if disk.list(f"{root}/logs") else "trash"
        assert ["s"] == disk.list(f"{root}/{kept}/one")


def test_a_synced_rename_takes_the_files_creation_along(place: tuple[FaultDisk, str]) -> None:
    """Only the target's directory is synced: the file is there, and there alone."""
    disk, directory = place
    disk.make_directory(f"{directory}/from")
    disk.make_directory(f"{directory}/to")
    file = disk.open(f"{directory}/from/f", create=True)
    file.pwritev([b"x"], 0)
    file.sync()
    disk.rename(f"{directory}/from/f", f"{directory}/to/g")
    disk.sync_directory(f"{directory}/to")
    disk.crash(random.Random(0), keep=0.0)

    assert b"x" == _held(disk, f"{directory}/to/g")
    assert [] == disk.list(f"{directory}/from")


def test_the_power_goes_at_a_step(place: tuple[FaultDisk, str]) -> None:
    """In a write it is done and not synced, in a sync it is not; nothing happens behind it."""
    disk, directory = place
    file = disk.open(f"{directory}/f", create=True)
    disk.sync_directory(directory)
    disk.cut_after = disk.steps + 2
    file.pwritev([b"x"], 0)
    with pytest.raises(PowerCut):
        file.sync()
    with pytest.raises(PowerCut):
        disk.unlink(f"{directory}/f")
    disk.crash(random.Random(0), keep=0.0)
    assert b"" == _held(disk, f"{directory}/f")


def test_rules_decide_what_fails_and_when(place: tuple[FaultDisk, str]) -> None:
    """By operation, path, place in the file, number and chance; each kind is counted."""
    disk, directory = place
    rules = [
        Rule(operation="sync", path="*/f", after=1, times=1, error="EIO"),
        Rule(operation="read", path="*/f", first_byte=100, last_byte=199, error="EIO"),
        Rule(operation="read", first_byte=300, last_byte=300, rot=True, times=1),
        Rule(operation="write", path="*/lost", lost=True),
        Rule(operation="write", path="*/astray", astray_bytes=BLOCK),
        Rule(operation="create", path="*/rarely", chance=0.5, error="ENOSPC"),
    ]
    disk.rules = Rules(rules, random.Random(1))
    file = disk.open(f"{directory}/f", create=True)
    file.pwritev([bytes(400)], 0)
    file.sync()
    with pytest.raises(DiskError):
        file.sync()
    file.sync()
    assert bytes(100) == bytes(file.pread(100, 0))
    with pytest.raises(DiskError) as failed:
        file.pread(100, 100)
    assert errno.EIO == failed.value.errno
    flipped = file.pread(1, 300)[0]
    assert 1 == flipped.bit_count()
    assert flipped == file.pread(1, 300)[0]
    lost = disk.open(f"{directory}/lost", create=True)
    assert 3 == lost.pwritev([b"abc"], 0)
    assert 0 == lost.size()
    astray = disk.open(f"{directory}/astray", create=True)
    astray.pwritev([b"abc"], 0)
    assert bytes(BLOCK) + b"abc" == bytes(astray.pread(1000, 0))
    refused = 0
    for _ in range(50):
        try:
            disk.open(f"{directory}/rarely", create=True)
            disk.unlink(f"{directory}/rarely")
        except DiskError:
            refused += 1
    assert 10 < refused < 40
    assert {"EIO": 2, "rot": 1, "lost": 1, "astray_bytes": 1, "ENOSPC": refused} == disk.happened


def test_a_cold_read_must_ask_the_disk(place: tuple[FaultDisk, str]) -> None:
    """All of them, or those a rule names."""
    disk, directory = place
    for name in ("f", "g"):
        disk.open(f"{directory}/{name}", create=True).pwritev([b"x"], 0)
    disk.rules = Rules([Rule(path="*/f", cold=True)], random.Random(1))
    assert disk.open(f"{directory}/f").pread_nowait(1, 0) is None
    assert b"x" == disk.open(f"{directory}/g").pread_nowait(1, 0)
    disk.cold = True
    assert disk.open(f"{directory}/g").pread_nowait(1, 0) is None


def test_a_full_disk_takes_no_more(place: tuple[FaultDisk, str]) -> None:
    """What grows needs room, what is there may be overwritten; a file cut or unlinked gives back."""
    disk, directory = place
    file = disk.open(f"{directory}/f", create=True)
    disk.room_bytes = 1000
    file.pwritev([bytes(1000)], 0)
    file.pwritev([b"over"], 0)
    with pytest.raises(DiskError) as full:
        file.pwritev([b"x"], 1000)
    assert full.value.is_full
    assert 1000 == file.size()
    file.truncate(400)
    assert 600 == disk.free_bytes(directory)
    disk.unlink(f"{directory}/f")
    assert 1000 == disk.free_bytes(directory)


def test_operations_stall_in_the_time_they_are_given(place: tuple[FaultDisk, str]) -> None:
    """A rule's delay goes to `sleep`; a gate holds until it is opened, and others pass."""
    disk, directory = place
    slept: list[float] = []
    disk.sleep = slept.append
    disk.rules = Rules([Rule(operation="sync", stall_ms=250)], random.Random(1))
    file = disk.open(f"{directory}/f", create=True)
    file.sync()
    assert [0.25] == slept

    with disk.gate("sync", "*/f") as gate:
        thread = threading.Thread(target=file.sync)
        thread.start()
        assert gate.reached.wait(60)
        disk.open(f"{directory}/other", create=True).sync()
        assert thread.is_alive()
        gate.open()
        thread.join()


def test_the_same_seed_leaves_the_same_disk() -> None:
    """Two runs of one history agree in every byte."""

    def left(seed: int) -> list[tuple[str, bytes]]:
        rng = random.Random(seed)
        disk = FaultDisk(rng=rng)
        disk.make_directory("d")
        disk.rules = Rules([Rule(operation="write", chance=0.1, error="EIO")], rng)
        for number in range(300):
            file = disk.open(f"d/{number % 7}", create=True)
            try:
                file.pwritev([rng.randbytes(900)], rng.randrange(5000))
            except DiskError:
                pass
            if number % 5 == 0:
                file.sync()
            if number % 11 == 0:
                disk.sync_directory("d")
            if number % 100 == 99:
                disk.crash(rng)
        return [(path, _held(disk, path)) for path, _ in disk.files("d")]

    assert left(3) == left(3)
    assert left(3) != left(4)


def test_unsynced_bytes_die_with_their_process(tmp_path: Path) -> None:
    """A child that writes over a directory and is killed leaves what it synced, under durable names."""
    directory = f"{tmp_path}/d"
    os.mkdir(directory)
    disk = FaultDisk.over(f"{tmp_path}/hidden")
    disk.open(f"{directory}/of the parent", create=True)
    ready, end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ready)
            assert [] == disk.list(directory)  # what the parent has not synced is the parent's
            for name in ("synced", "unnamed"):
                file = disk.open(f"{directory}/{name}", create=True)
                file.pwritev([b"synced"], 0)
                file.sync()
                if name == "synced":
                    disk.sync_directory(directory)
                file.pwritev([b"not"], 0)
            assert b"notced" == _held(disk, f"{directory}/synced")
            os.write(end, b"x")
            threading.Event().wait()
        finally:
            traceback.print_exc()
            os._exit(1)
    os.close(end)
    assert b"x" == os.read(ready, 1)
    os.close(ready)
    os.kill(pid, 9)
    os.waitpid(pid, 0)

    assert ["synced"] == os.listdir(directory)
    assert b"synced" == Path(f"{directory}/synced").read_bytes()
    FaultDisk.over(f"{tmp_path}/hidden")
    assert not [name for name in os.listdir(f"{tmp_path}/hidden") if name.startswith(f"{pid}-")]
    assert ["of the parent", "synced"] == disk.list(directory)


@pytest.mark.parametrize("remover", ["this process", "another process"])
def test_a_removed_directory_is_not_taken_for_what_gets_its_number(tmp_path: Path, remover: str) -> None:
    """File systems give the number (inode) of what is removed to what is made next, by any process."""
    directory = f"{tmp_path}/d"
    os.mkdir(directory)
    disk = FaultDisk.over(f"{tmp_path}/hidden")
    names = disk._names
    assert isinstance(names, RealNames)
    disk.make_directory(f"{directory}/old")
    held = disk.open(f"{directory}/old/f", create=True)
    disk.sync_directory(f"{directory}/old")
    removed = names.walk(f"{directory}/old")
    assert removed is not None
    if remover == "this process":
        disk.remove_tree(f"{directory}/old")
        disk.sync_directory(directory)
        assert removed not in list(names._known.values())
    else:
        shutil.rmtree(f"{directory}/old")
        Path(f"{directory}/new").write_bytes(b"new")
        found = os.stat(f"{directory}/new")
        names._known[found.st_dev, found.st_ino] = removed  # as if it had been given that number

        assert b"new" == _held(disk, f"{directory}/new")
    held.close()


def test_writeback_lets_single_blocks_survive(tmp_path: Path) -> None:
    """With it, some blocks of unsynced writes are in the real file before any sync."""
    os.mkdir(f"{tmp_path}/d")
    disk = FaultDisk.over(f"{tmp_path}/hidden", rng=random.Random(5))
    disk.writeback_chance = 0.5
    file = disk.open(f"{tmp_path}/d/f", create=True)
    disk.sync_directory(f"{tmp_path}/d")
    for number in range(20):
        file.pwritev([bytes([number + 1]) * BLOCK], number * BLOCK)
    left = Path(f"{tmp_path}/d/f").read_bytes()[::BLOCK]
    assert 0 < len(set(left) - {0}) < 20


def test_rules_may_change_while_a_node_runs(tmp_path: Path) -> None:
    """A list in a file is looked at before each operation."""
    os.mkdir(f"{tmp_path}/d")
    disk = FaultDisk.over(f"{tmp_path}/hidden", rules_path=f"{tmp_path}/rules")
    file = disk.open(f"{tmp_path}/d/f", create=True)
    file.sync()
    Path(f"{tmp_path}/rules").write_text('[{"operation": "sync", "error": "EIO"}]')
    with pytest.raises(DiskError):
        file.sync()
    Path(f"{tmp_path}/rules").write_text("[]")
    file.sync()
