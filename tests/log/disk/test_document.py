"""Documents that are replaced as a whole."""

from __future__ import annotations

import errno
import random
from collections.abc import Iterator

import pytest

from laminar.log.disk.disk import File
from laminar.log.disk.document import Document
from laminar.log.disk.errors import DamagedDocument, DiskError
from tests.disks.fault_disk import FaultDisk, PowerCut


def _disk() -> FaultDisk:
    disk = FaultDisk()
    disk.make_directory("d")
    return disk


def test_a_crash_at_any_step_leaves_the_old_or_the_new_one() -> None:
    """Also when the very first write is cut: then there is none, and that is no damage."""
    rng = random.Random(1)
    for step in range(1, 40):
        for payload in (b"n", b"n" * 2000):
            disk = _disk()
            states: list[bytes | None] = [None]
            disk.cut_after = step
            acknowledged = 0
            try:
                for number in range(4):
                    states.append(payload + b"%d" % number)
                    Document(disk, "d", "thing").write(payload + b"%d" % number)
                    acknowledged = len(states) - 1
            except PowerCut:
                pass
            disk.crash(rng, keep=rng.choice([0.0, 0.5, 1.0]))
            assert Document(disk, "d", "thing").read() in states[acknowledged:]


def test_what_a_full_disk_never_let_be_written_is_not_there_and_not_damaged() -> None:
    """However often it was tried: a node whose disk has room again starts."""
    disk = _disk()
    document = Document(disk, "d", "thing")
    disk.room_bytes = 0
    for _ in range(3):
        with pytest.raises(DiskError):
            document.write(b"never")
    disk.room_bytes = None

    assert [] == disk.list("d")
    assert document.read() is None
    document.write(b"at last")
    assert document.read() == b"at last" and len(disk.list("d")) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_write_that_fails_at_any_step_has_changed_nothing(number: int) -> None:
    """For this process, and after a loss of power: its caller goes on with the old one. It found the new one
    before, as one copy of it was there. A failed try leaves no file, however often it is tried.
    """
    rng = random.Random(4)
    failed = 0
    for step in range(1, 20):
        disk = _disk()
        document = Document(disk, "d", "thing")
        document.write(b"old")
        before = disk.list("d")
        steps = iter(range(1, 1000))

        def fails(operation: str, path: str, steps: Iterator[int] = steps, step: int = step) -> int | None:
            changes = operation in ("create", "write", "sync", "rename", "sync directory")
            return number if changes and next(steps) == step else None

        disk.error = fails
        try:
            document.write(b"new")
        except DiskError:
            failed += 1
            assert b"old" == document.read() and before == disk.list("d"), step
            disk.crash(rng, keep=rng.choice([0.0, 0.5, 1.0]))
            assert b"old" == document.read(), step
        else:
            assert b"new" == document.read()
    assert failed == 9


def test_a_disk_that_is_full_between_the_two_copies_leaves_the_old_one() -> None:
    """With every amount of room there may be."""
    tries = 0
    for room in range(0, 400, 7):
        disk = _disk()
        document = Document(disk, "d", "thing")
        document.write(b"old" * 40)
        disk.room_bytes = room
        try:
            document.write(b"new" * 40)
        except DiskError:
            tries += 1
            assert b"old" * 40 == document.read() and 2 == len(disk.list("d"))
        else:
            assert b"new" * 40 == document.read()
    assert tries > 10


@pytest.mark.parametrize("copy", ["a", "b"])
def test_rot_in_one_copy_changes_nothing(copy: str) -> None:
    """The other copy serves."""
    disk = _disk()
    document = Document(disk, "d", "thing")
    document.write(b"old")
    document.write(b"payload")
    disk.rot(f"d/thing-2.{copy}", 25)
    assert b"payload" == document.read()


def test_rot_in_one_copy_and_a_crash_at_any_step_of_the_next_write() -> None:
    """The copies that count are not touched before the new ones are synced: one that has rotten costs
    nothing, whenever the power goes.
    """
    rng = random.Random(2)
    source = _disk()
    Document(source, "d", "thing").write(b"old" * 500)
    for copy in "ab":
        for step in range(1, 12):
            for keep in (0.0, 0.5, 0.5, 1.0):
                disk = source.copy()
                disk.rot(f"d/thing-1.{copy}", 25)
                disk.cut_after = step
                try:
                    Document(disk, "d", "thing").write(b"new" * 500)
                except PowerCut:
                    pass
                disk.crash(rng, keep)
                assert Document(disk, "d", "thing").read() in (b"old" * 500, b"new" * 500)


def test_rot_in_both_copies_is_damage_not_absence() -> None:
    """A document that existed never reads as never written."""
    disk = _disk()
    document = Document(disk, "d", "thing")
    document.write(b"payload")
    for copy in "ab":
        disk.rot(f"d/thing-1.{copy}", 25)
    with pytest.raises(DamagedDocument):
        document.read()
    assert document.exists()


def test_a_document_that_is_replaced_while_it_is_read_is_not_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies that were listed are gone then, and newer ones are there."""
    disk = _disk()
    Document(disk, "d", "thing").write(b"old")
    opened = disk.open
    newer = [b"new"]

    def open_later(path: str, **options: bool) -> File:
        if newer:
            Document(disk, "d", "thing").write(newer.pop())
        return opened(path, **options)

    monkeypatch.setattr(disk, "open", open_later)

    assert b"new" == Document(disk, "d", "thing").read()


def test_a_write_uses_a_number_above_any_seen() -> None:
    """A torn newer copy is neither read nor reused, and its successor wins."""
    disk = _disk()
    document = Document(disk, "d", "thing")
    document.write(b"one")
    file = disk.open("d/thing-7.a", create=True)
    file.pwritev([b"torn"], 0)
    assert b"one" == document.read()
    document.write(b"two")
    assert ["thing-8.a", "thing-8.b"] == disk.list("d")
    assert b"two" == document.read()


def test_names_that_begin_alike_are_not_mixed_up() -> None:
    """`layout` and `layout-old` are two documents."""
    disk = _disk()
    Document(disk, "d", "layout").write(b"1")
    Document(disk, "d", "layout-old").write(b"2")
    assert b"1" == Document(disk, "d", "layout").read()
    assert b"2" == Document(disk, "d", "layout-old").read()
