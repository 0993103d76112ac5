"""Rules of the one module that touches PySyncObj's private parts."""

from __future__ import annotations

import importlib.metadata
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
from pysyncobj.version import VERSION

from membership.catalog import CatalogTables
from membership.replicated import (
    PINNED_VERSION,
    BadCommand,
    Method,
    Replicated,
    ReplicatedObjects,
    UnknownCodeVersion,
    replicated,
)

replicated_since = cast("Callable[..., Callable[[Method], Method]]", replicated)


class Counter(Replicated):  # type: ignore[misc]  # pysyncobj has no types
    """A replicated object with a method that only code version 1 has."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0

    @replicated
    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @replicated_since(ver=1)
    def double(self, times: int) -> int:
        self.value *= 2**times
        return int(self.value)


def test_the_installed_pysyncobj_is_the_release_that_was_read() -> None:
    """Another release may have changed the private call: read it, run these tests, then change the pin."""
    assert PINNED_VERSION == VERSION == importlib.metadata.version("pysyncobj")
    assert callable(ReplicatedObjects._SyncObj__doApplyCommand)


def test_replicated_objects_make_no_thread_socket_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are an object layer and nothing else."""
    monkeypatch.chdir(tmp_path)
    threads, descriptors = threading.enumerate(), os.listdir("/proc/self/fd")

    counter = Counter()
    objects = ReplicatedObjects([counter])
    objects.perform(objects.encode(counter.add, 1))

    assert threads == threading.enumerate()
    assert len(descriptors) == len(os.listdir("/proc/self/fd"))
    assert list(tmp_path.iterdir()) == []


def test_a_call_changes_nothing_until_it_is_performed() -> None:
    """Encoding and performing are apart, because agreement lies between them."""
    counter = Counter()
    objects = ReplicatedObjects([counter])

    command = objects.encode(counter.add, 5)

    assert counter.value == 0
    assert [objects.perform(command), objects.perform(command)] == [5, 10]


def test_a_command_performs_the_same_call_on_another_node() -> None:
    """The bytes depend on nothing that differs between processes."""
    here, there = Counter(), Counter()
    command = ReplicatedObjects([here]).encode(here.add, 7)

    ReplicatedObjects([there]).perform(command)

    assert (here.value, there.value) == (0, 7)


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_a_command_that_names_code_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    """Even though only our own log's bytes come here, a pickle that could run anything is never loaded."""
    objects = ReplicatedObjects([Counter()])
    evil = b"\0" + pickle.dumps((0, (_Touch(tmp_path / "ran"),)), protocol=2)

    with pytest.raises(BadCommand, match="names code"):
        objects.perform(evil)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [b"", b"\0", b"\0garbage", b"\x01x", b"\x02x", b"\xff\x80\x02K\0."])
def test_bytes_that_are_no_call_are_refused(command: bytes) -> None:
    """Among them PySyncObj's no-op and membership commands, which nothing of ours makes."""
    with pytest.raises(BadCommand):
        ReplicatedObjects([Counter()]).perform(command)


def test_a_method_of_a_later_code_version_waits_until_it_is_enabled() -> None:
    """So a cluster can be upgraded node by node: new methods run only when all have them."""
    counter = Counter()
    objects = ReplicatedObjects([counter])
    with pytest.raises(KeyError):
        objects.encode(counter.double, 1)

    objects.perform(objects.encode_code_version(1))
    objects.perform(objects.encode(counter.add, 3))

    assert objects.code_version() == 1
    assert objects.perform(objects.encode(counter.double, 2)) == 12


def test_a_code_version_is_never_disabled() -> None:
    """Also where a leader has proposed a lower one by an old state: what is committed is never taken back."""
    objects = ReplicatedObjects([Counter()], newest=2)
    for version in (1, 2, 1, 0):
        objects.perform(objects.encode_code_version(version))

    assert objects.code_version() == 2


def test_an_unknown_code_version_stops_this_node() -> None:
    """It can't know what the commands behind it mean."""
    objects = ReplicatedObjects([Counter()])

    with pytest.raises(UnknownCodeVersion, match="2"):
        objects.perform(objects.encode_code_version(2))

    assert objects.code_version() == 0


def test_the_numbers_of_the_catalogs_methods_never_change() -> None:
    """A committed command holds its method's number. A new method takes a higher `ver`, never a place in
    here.
    """
    tables = CatalogTables()
    objects = ReplicatedObjects([tables])

    assert [objects._idToMethod[number].__name__ for number in sorted(objects._idToMethod)] == [
        "change_replicas_v0",
        "create_topic_v0",
        "delete_topic_v0",
        "found_cluster_v0",
        "mark_made_v0",
        "mark_removed_v0",
        "register_node_v0",
        "update_topic_settings_v0",
        "change_placement_v1",
        "change_route_v2",
        "change_channel_v4",
        "change_access_v6",
        "change_limits_v7",
    ]
