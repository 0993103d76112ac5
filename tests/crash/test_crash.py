"""Real runs of the product, crashed at many instants of their system calls (`make log-crash` does 1,000)."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.crash import mutants, runs, trace
from tests.crash.model import Crash, Disk, Folder
from tests.crash.trace import Call, Kind

SECONDS, STATES = 1.0, 34


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler: the recorder of system calls cannot be built")
    return trace.build(tmp_path_factory.mktemp("recorder"))


@pytest.fixture
def states(tmp_path: Path) -> Iterator[Path]:
    """Where disks after a crash are laid out: in memory if possible, as the model says what they hold."""
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else tmp_path
    with tempfile.TemporaryDirectory(prefix="crash-", dir=memory) as folder:
        yield Path(folder)


def _check(recorded: runs.Load, root: Path, found: list[runs.Found]) -> None:
    assert not runs.whole(recorded, root), "the recorder missed a change of the disk"
    assert len(found) >= STATES
    assert [] == [(each.state, each.problems) for each in found if each.problems]


@pytest.mark.parametrize("mixed", [False, True], ids=["commit", "mixed"])
def test_a_crash_of_the_library_loses_and_invents_nothing(
    real_disk: Path, states: Path, recorder: Path, *, mixed: bool
) -> None:
    """Also where the recovery after it is cut off by a loss of power."""
    folder = real_disk / "load"

    recorded = runs.record_library(folder, recorder, seed=11, seconds=SECONDS, mixed=mixed)

    _check(
        recorded,
        folder / "root",
        list(runs.crash_library(recorded, states, recorder, states=STATES, seed=11, recoveries=6)),
    )


def test_a_crash_of_a_node_loses_and_invents_nothing(real_disk: Path, states: Path, recorder: Path) -> None:
    """Its start recovers what was acknowledged over HTTP."""
    folder = real_disk / "load"

    recorded = runs.record_node(folder, recorder, seed=11, seconds=SECONDS)

    _check(recorded, folder / "root", list(runs.crash_node(recorded, states, states=STATES, seed=11)))


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_the_text_that_a_mutant_changes_is_there(name: str) -> None:
    """Else the mutant would switch nothing off."""
    for mutant in mutants.MUTANTS[name]:
        mutant.check()


# The model itself: what is legal on a disk, and what is not.

FILE, FOLDER = 7, 1


def _call(kind: Kind, began: int, **fields: object) -> Call:
    given = {"durable": False, "ended": began + 1, "inode": FILE, "position": 0, "first": b"", "second": b""}
    return Call(kind=kind, began=began, **{**given, **fields})  # type: ignore[arg-type]


def _states(calls: list[Call], *, crash: Crash = Crash.POWER, at: int = 99) -> set[bytes | None]:
    """Every content that file "a" has after a crash; None where there is no such file."""
    found: set[bytes | None] = set()
    for seed in range(400):
        disk = Disk(FOLDER)
        for call in calls:
            disk.feed(call)
        rng = random.Random(seed)
        left = disk.crash(crash, at, rng.choice(("none", "all", "any", "first")), rng)
        node = left.root.seen.get("a")
        assert not isinstance(node, Folder)
        found.add(None if node is None else bytes(node.after(Crash.KILL, 99, "all", rng)))
    return found


CREATED = [_call(Kind.CREATE, 1, first=b"a"), _call(Kind.SYNC, 3, inode=FOLDER)]


def test_a_name_may_go_until_its_directory_is_synced() -> None:
    assert {None, b""} == _states(CREATED[:1])
    assert {b""} == _states(CREATED)


def test_bytes_are_certain_by_a_sync_that_began_after_their_write_had_ended() -> None:
    write = _call(Kind.WRITE, 5, ended=8, first=b"x" * 512)
    under_way = _call(Kind.SYNC, 7, ended=9)
    after = _call(Kind.SYNC, 8, ended=9)

    assert {b"x" * 512} == _states([*CREATED, write, after])
    assert {b"", bytes(512), b"x" * 512} <= _states([*CREATED, write, under_way])
    assert {b"x" * 512} == _states([*CREATED, _call(Kind.WRITE, 5, ended=8, first=b"x" * 512, durable=True)])


def test_a_sync_of_one_write_covers_no_other_sector() -> None:
    early = _call(Kind.WRITE, 5, first=b"x" * 512)
    synced = _call(Kind.WRITE, 7, first=b"y" * 512, position=512, durable=True)

    found = _states([*CREATED, early, synced])

    assert {b"x" * 512 + b"y" * 512, bytes(512) + b"y" * 512} <= found
    assert all(each is not None and each.endswith(b"y" * 512) for each in found)


def test_sectors_change_one_by_one_and_may_be_torn() -> None:
    found = _states([*CREATED, _call(Kind.WRITE, 5, first=b"x" * 1024)])

    assert {bytes(512) + b"x" * 512, b"x" * 512 + bytes(512)} <= found
    assert any(each and 0 < each[:512].count(b"x") < 512 for each in found)


def test_a_kill_keeps_whatever_a_call_that_ended_has_done() -> None:
    calls = [*CREATED, _call(Kind.WRITE, 5, first=b"x" * 512)]

    assert {b"x" * 512} == _states(calls, crash=Crash.KILL)
    assert {b"", b"x" * 512} == _states(calls, crash=Crash.KILL, at=5)


def test_cut_bytes_may_come_back_until_the_cut_is_synced() -> None:
    calls = [*CREATED, _call(Kind.WRITE, 5, first=b"x" * 512, durable=True), _call(Kind.TRUNCATE, 7)]

    assert {b"", b"x" * 512} <= _states(calls)
    assert {b""} == _states([*calls, _call(Kind.SYNC, 9)])


def test_a_rename_is_there_or_not_with_both_its_names() -> None:
    calls = [
        *CREATED,
        _call(Kind.CREATE, 5, first=b"b", inode=8),
        _call(Kind.WRITE, 6, first=b"new", inode=8, durable=True),
        _call(Kind.RENAME, 8, first=b"b", second=b"a"),
    ]

    assert {b"", b"new"} == _states(calls)
    assert {b"new"} == _states([*calls, _call(Kind.SYNC, 10, inode=FOLDER)])
