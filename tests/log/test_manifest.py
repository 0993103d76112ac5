"""The manifest: what a change writes, and what is found by group and id after it."""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.log.disk.document import Document
from laminar.log.disk.errors import DiskError
from laminar.log.format.manifest import Manifest, ReplicaEntry, decode_manifest
from tests.disks.fault_disk import FaultDisk

TraceFunction = Callable[[FrameType, str, Any], Any]


def entry(number: int, state: str = "made", *, log_id: int = 0) -> ReplicaEntry:
    return ReplicaEntry(
        log_id=log_id or number,
        replica_id=number,
        group=number.to_bytes(16),
        topic=f"t{number}",
        partition=0,
        partition_hash=number,
        state=state,
        voters=[(number, "a")],
        settings={"flush": "interval"},
    )


def manifest() -> tuple[FaultDisk, Manifest]:
    disk = FaultDisk()
    disk.make_directory("home")
    return disk, Manifest(disk, "home")


def check(disk: FaultDisk, found: Manifest, expected: dict[int, ReplicaEntry]) -> None:
    """In memory and on the disk is this, in this order, and byte for byte what a whole write makes."""
    entries = list(expected.values())
    assert entries == found.entries
    payload = Document(disk, "home", "manifest").read()
    assert payload == msgspec.msgpack.encode(entries) and decode_manifest(payload) == entries
    again = Manifest(disk, "home")
    again.read()
    for each in (found, again):
        assert dict(each.by_key) == expected
        unmade = {one.replica_id for one in each.unmade}
        assert unmade == {number for number, one in expected.items() if one.state != "made"}
        for number in range(1, 40):
            assert each.of_group(number.to_bytes(16)) == expected.get(number)


def test_an_entry_is_found_at_each_step_of_its_change() -> None:
    """The shard's loop reads while another thread writes. A replica that it does not find is made anew."""
    _, found = manifest()
    found.replace([entry(1, "making"), entry(2)])
    lines = 0

    def look(frame: FrameType, event: str, argument: object) -> TraceFunction | None:
        nonlocal lines
        if frame.f_code is not Manifest.change.__code__:
            return None
        lines += 1
        assert found.of_group(entry(1).group) is not None, frame.f_lineno
        assert 1 in found.by_key and found.unmade, frame.f_lineno
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        found.change({1: entry(1, "empty")})
    finally:
        sys.settrace(before)
    assert lines > 5
    assert found.unmade == [entry(1, "empty")]


steps = st.lists(
    st.dictionaries(st.integers(1, 30), st.sampled_from(["made", "making", "empty", None]), max_size=12),
    max_size=8,
)


@given(steps)
def test_changes_make_what_a_whole_write_would(changes: list[dict[int, str | None]]) -> None:
    disk, found = manifest()
    found.replace([])
    expected: dict[int, ReplicaEntry] = {}
    for place, change in enumerate(changes):
        after = {
            number: None if state is None else entry(number, state, log_id=100 + place)
            for number, state in change.items()
        }
        found.change(after)
        merged = {**expected, **after}
        expected = {number: each for number, each in merged.items() if each is not None}
        check(disk, found, expected)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 65_535, 65_536])
def test_the_number_of_entries_is_written_as_ever(count: int) -> None:
    """By one byte, three or five."""
    disk, found = manifest()
    entries = [entry(number) for number in range(1, count + 2)]
    found.replace(entries)
    found.change({count + 1: None})
    assert Document(disk, "home", "manifest").read() == msgspec.msgpack.encode(entries[:count])


def test_a_change_that_fails_changes_nothing_and_the_next_holds() -> None:
    disk, found = manifest()
    found.replace([entry(1), entry(2, "making")])
    disk.error = lambda operation, path: errno.ENOSPC if operation == "create" else None
    with pytest.raises(DiskError):
        found.change({1: None, 2: entry(2), 3: entry(3)})
    disk.error = None
    check(disk, found, {1: entry(1), 2: entry(2, "making")})
    found.change({3: entry(3, "empty")})
    check(disk, found, {1: entry(1), 2: entry(2, "making"), 3: entry(3, "empty")})


def test_a_manifest_that_may_lack_replicas_says_so_after_a_change() -> None:
    disk, found = manifest()
    found.replace([entry(1)], known=False, set_aside=False)
    found.change({2: entry(2)})
    again = Manifest(disk, "home")
    again.read()
    assert ([entry(1), entry(2)], False, False) == (again.entries, again.known, again.set_aside)
    found.change({1: None}, known=True)
    check(disk, found, {2: entry(2)})


def test_the_entry_of_a_group_is_the_one_that_took_its_place() -> None:
    """A replica left, and another of the group came, by one change or by two."""
    disk, found = manifest()
    found.replace([entry(1)])
    successor = msgspec.structs.replace(entry(2), group=entry(1).group)
    found.change({2: successor, 1: None})
    assert successor == found.of_group(entry(1).group) and [successor] == found.entries
    again = Manifest(disk, "home")
    again.read()
    assert again.entries == found.entries
