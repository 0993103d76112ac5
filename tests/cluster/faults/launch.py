"""A node under faults: `python -m tests.cluster.faults.launch`, with the flags of `laminar serve`.

Beside its data folder lie what a test may change while it runs: `<data>.rules`, a JSON list of
`tests.disks.faults.Rule`, by which its disk fails; and `<data>.clock`, milliseconds by which its wall clock
is wrong. Its disk is the machine's under these rules, or, with LAMINAR_TEST_DISK=forgets, the fault disk,
whose unsynced bytes die with the processes; LAMINAR_TEST_BOOT then says how often the power has gone, which
makes the machine's boot id.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from laminar.log.disk.disk import Buffer, Disk, File, RealDisk
from laminar.log.disk.errors import DiskError
from laminar.node.host.clock import Clock
from laminar.node.host.settings import SETTINGS
from laminar.node.host.settings_sources import load
from laminar.node.runtime.environment import Environment
from laminar.node.start import serve
from tests.disks.fault_disk import FaultDisk
from tests.disks.faults import RulesFile

DISK, BOOT, WRITEBACK = "LAMINAR_TEST_DISK", "LAMINAR_TEST_BOOT", "LAMINAR_TEST_WRITEBACK"


class SteppedClock(Clock):
    """The machine's clocks, the wall's wrong by what a file says."""

    __slots__ = ("_path", "_read_at_ns", "_wrong_by_ms")

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._read_at_ns = 0
        self._wrong_by_ms = 0

    def wall_ms(self) -> int:
        try:
            changed_at_ns = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return super().wall_ms()
        if changed_at_ns != self._read_at_ns:
            self._read_at_ns = changed_at_ns
            self._wrong_by_ms = int(self._path.read_text())
        return super().wall_ms() + self._wrong_by_ms


class RuledFile:
    """A file of the machine, each operation asked for first."""

    def __init__(self, file: File, rules: RulesFile) -> None:
        self.path = file.path
        self._file = file
        self._rules = rules

    def pread(self, size: int, position: int) -> Buffer:
        obey(self._rules, "read", self.path, position, size)
        return self._file.pread(size, position)

    def pread_nowait(self, size: int, position: int) -> Buffer | None:
        return self._file.pread_nowait(size, position)

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        obey(self._rules, "write", self.path, position, sum(map(len, buffers)))
        return self._file.pwritev(buffers, position)

    def pwritev_synced(self, buffers: Sequence[Buffer], position: int) -> int:
        obey(self._rules, "write", self.path, position, sum(map(len, buffers)))
        obey(self._rules, "sync", self.path)
        return self._file.pwritev_synced(buffers, position)

    def sync(self) -> None:
        obey(self._rules, "sync", self.path)
        self._file.sync()

    def reserve(self, size: int) -> None:
        obey(self._rules, "reserve", self.path, 0, size)
        self._file.reserve(size)

    def start_writeback(self, size: int, position: int) -> None:
        self._file.start_writeback(size, position)

    def drop_cached(self, size: int, position: int) -> None:
        self._file.drop_cached(size, position)

    def truncate(self, size: int) -> None:
        obey(self._rules, "truncate", self.path)
        self._file.truncate(size)

    def size(self) -> int:
        return self._file.size()

    def close(self) -> None:
        self._file.close()


class RuledDisk(RealDisk):
    """The machine's disk, which fails and waits by the rules; kills leave its page cache as it is."""

    def __init__(self, rules_path: str) -> None:
        self._rules = RulesFile(rules_path, random.Random())

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        if create and not self.exists(path):
            obey(self._rules, "create", path)
        return RuledFile(super().open(path, create=create, exclusive=exclusive), self._rules)

    def sync_directory(self, path: str) -> None:
        obey(self._rules, "sync directory", path)
        super().sync_directory(path)

    def rename(self, old: str, new: str) -> None:
        obey(self._rules, "rename", old)
        super().rename(old, new)


def obey(rules: RulesFile, operation: str, path: str, position: int = 0, size: int = 0) -> None:
    """Fail or wait as the rules say. Of their effects, errors and stalls."""
    current = rules.current()
    rule = current.find(operation, path, position, size) if current.rules else None
    if rule is None:
        return
    if rule.stall_ms:
        time.sleep(rule.stall_ms / 1000)
    if rule.errno:
        raise DiskError(operation, path, rule.errno, rule.error)


class FaultyEnvironment(Environment):
    """See the module."""

    def __init__(self, data: str) -> None:
        self._clock_path = f"{data}.clock"
        self.disk: Disk
        if os.environ.get(DISK) == "forgets":
            self.disk = disk = FaultDisk.over(f"{data}.unsynced", rules_path=f"{data}.rules")
            disk.boots = int(os.environ.get(BOOT, "1"))
            disk.writeback_chance = float(os.environ.get(WRITEBACK, "0"))
        else:
            self.disk = RuledDisk(f"{data}.rules")

    def clock(self) -> Clock:
        return SteppedClock(self._clock_path)


def main(arguments: Sequence[str]) -> int:
    """The exit code of `laminar.node.start.serve`."""
    names = {row.flag: row.name for row in SETTINGS}
    given: dict[str, str] = {}
    for flag, value in pairwise([*arguments, "--"]):
        if flag.startswith("--"):
            given[flag] = "true" if value.startswith("--") else value
    # Wires are cut here by other means, and a program on them would only cost each start its compiling.
    flags = {"steer": "off"} | {names[flag]: value for flag, value in given.items()}
    settings = load(config=None, environ={}, flags=flags).settings
    return serve(settings, environment=FaultyEnvironment(os.path.abspath(settings.data)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
