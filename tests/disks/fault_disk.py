"""The fault disk: it loses power, and does whatever else disks do to those who trust them.

One implementation of `laminar.log.disk.disk.Disk` for the storage tests, the simulator (all in memory,
the same for the same seed, no clock) and real processes (`FaultDisk.over` a directory: only what was synced
reaches it, the rest lives in the process and dies with it, so kill -9 is a loss of power).

- `crash` keeps an arbitrary subset of the unsynced 512-byte blocks (in any version since the last sync)
  and of the unsynced names; `kill` keeps everything, as the page cache outlives a process.
- `cut_after` stops the power in the middle of an operation.
- A failed sync leaves its pages clean, as Linux does: a later sync succeeds and writes nothing of them.
- `error`, `rules` and `gates` make operations fail, wait, or do the wrong thing; `rot` turns bits over.
- `room_bytes` is what the file system still takes before ENOSPC.

The conformance suite runs over both forms and over the real disk.
"""

from __future__ import annotations

import copy
import errno
import os
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock as ThreadLock
from typing import Self

from laminar.log.disk.disk import Buffer, File, Lock, RealDisk
from laminar.log.disk.errors import DiskError
from tests.disks.contents import BLOCK, Content
from tests.disks.faults import Gate, Rule, Rules, RulesFile
from tests.disks.names import Directory, Effect, FileNode, Names, RealNames

__all__ = ["BLOCK", "FaultDisk", "FaultFile", "PowerCut"]


class PowerCut(Exception):
    """The power went away in this operation; nothing after it happens."""


class FaultFile:
    """One open file; of no use after a crash."""

    __slots__ = ("_disk", "_life", "content", "node", "path")

    def __init__(self, disk: FaultDisk, path: str, node: FileNode) -> None:
        self.path = path
        self.node = node
        self.content = node.content
        self._disk = disk
        self._life = disk.life

    def _check(self) -> None:
        assert self._life == self._disk.life, f"{self.path} was opened before the crash"

    def pread(self, size: int, position: int) -> Buffer:
        self._check()
        disk = self._disk
        rule = disk.before("read", self.path, position, size)
        if rule is not None and rule.rot:
            disk.flip_one_bit(self.content, position, size)
        disk.step("read", self.path)
        disk.read_sectors(self.path, position, size)
        with self.content.lock:
            return self.content.read(size, position)

    def pread_nowait(self, size: int, position: int) -> Buffer | None:
        self._check()
        disk = self._disk
        if disk.cold:
            return None
        rule = disk.before("read", self.path, position, size)
        if rule is not None:
            if rule.cold:
                return None
            if rule.rot:
                disk.flip_one_bit(self.content, position, size)
        disk.step("read", self.path)
        disk.read_sectors(self.path, position, size)
        with self.content.lock:
            data = self.content.read(size, position)
        return data if len(data) == size else None

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        self._check()
        disk = self._disk
        data = b"".join(buffers)
        rule = disk.before("write", self.path, position, len(data))
        at = position
        if rule is not None:
            if rule.lost:
                return len(data)
            at = max(position + rule.astray_bytes, 0)
        if disk.bad_sectors:
            # A medium gives a sector that is written another place.
            disk.bad_sectors -= {
                (self.path, block) for block in range(at // BLOCK, -(-(at + len(data)) // BLOCK))
            }
        with self.content.lock:
            disk.take_room(self.path, self.content.growth(at + len(data)), "write")
            self.content.write(data, at)
            disk.note_dirty(self.node)
        disk.step("write", self.path)
        return len(data)

    def pwritev_synced(self, buffers: Sequence[Buffer], position: int) -> int:
        # A real one covers its own bytes only.
        with self.content.lock:
            assert not self.content.is_changed, f"{self.path}: a synced write covers nothing written before"
        written = self.pwritev(buffers, position)
        self.sync()
        return written

    def sync(self) -> None:
        self._check()
        disk = self._disk
        disk.step("sync", self.path)
        try:
            disk.before("sync", self.path, 0, 0)
        except DiskError:
            with self.content.lock:
                self.content.give_up()
            raise
        disk.sync_file(self.node)

    def reserve(self, size: int) -> None:
        self._check()
        disk = self._disk
        disk.before("reserve", self.path, 0, size)
        with self.content.lock:
            disk.take_room(self.path, self.content.growth(size), "reserve")
            self.content.reserved_bytes = max(self.content.reserved_bytes, size)

    def start_writeback(self, size: int, position: int) -> None:
        self._check()

    def drop_cached(self, size: int, position: int) -> None:
        self._check()

    def truncate(self, size: int) -> None:
        self._check()
        disk = self._disk
        disk.before("truncate", self.path, 0, 0)
        with self.content.lock:
            held = max(self.content.size(), self.content.reserved_bytes)
            disk.take_room(self.path, size - held, "truncate", gives_back=True)
            self.content.reserved_bytes = 0
            self.content.truncate(size)
            disk.note_dirty(self.node)
        disk.step("truncate", self.path)

    def size(self) -> int:
        self._check()
        with self.content.lock:
            return self.content.size()

    def close(self) -> None:
        return None


class _MemoryLock:
    def __init__(self, disk: FaultDisk, path: str) -> None:
        self._disk = disk
        self._path = path

    def close(self) -> None:
        self._disk.locked.discard(self._path)


class FaultDisk:
    """See the module. `life` counts crashes; files of a former life may not be used."""

    def __init__(self, *, rng: random.Random | None = None) -> None:
        """Of `rng` come the chances of rules and early writeback, not those of `crash`."""
        self.rng = rng or random.Random(0)
        self.life = 0
        # Counts losses of power: what `boot_id` says.
        self.boots = 1
        self.locked: set[str] = set()
        # Operations that change something, and the number at which the power goes.
        self.steps = 0
        self.cut_after: int | None = None
        # (path, number of the 512-byte block) that the medium does not give back any more.
        self.bad_sectors: set[tuple[str, int]] = set()
        # Every `pread_nowait` says that the disk must be asked.
        self.cold = False
        # Called with (operation, path); returns an errno to fail with. Until the next crash.
        self.error: Callable[[str, str], int | None] | None = None
        self.rules = Rules([], self.rng)
        self.gates: list[Gate] = []
        # How a stalled operation waits (seconds). The simulator puts its own clock's here.
        self.sleep: Callable[[float], None] = time.sleep
        # Told of each operation that changes something.
        self.on_step: Callable[[str, str], None] | None = None
        # None: no limit. Files that grow take of it, files that shrink or lose their name give back.
        self.room_bytes: int | None = None
        # How likely a write leaves one block on the platter at once.
        self.writeback_chance = 0.0
        self._names = Names()
        self._real: RealDisk | None = None
        self._rules_file: RulesFile | None = None
        # Files with unsynced changes, in the order of the first.
        self._dirty: dict[FileNode, None] = {}
        self._lock = ThreadLock()

    @classmethod
    def over(cls, hidden: str, *, rules_path: str | None = None, rng: random.Random | None = None) -> Self:
        """A disk over the operating system's files; paths are the real ones.

        `hidden` is a folder of its own on the same file system, for files whose names are not durable. The
        file at `rules_path` may be written at any time (see `RulesFile`). After a fork, the child has none
        of its parent's unsynced bytes.
        """
        disk = cls(rng=rng or random.Random())
        # Each process is a boot of its own: what it has not synced dies with it.
        disk.boots = random.SystemRandom().getrandbits(100)
        disk._names = RealNames(os.path.abspath(hidden))
        disk._real = RealDisk()
        if rules_path is not None:
            disk._rules_file = RulesFile(rules_path, disk.rng)
        reference = weakref.ref(disk)

        def in_child() -> None:
            if (forked := reference()) is not None:
                forked._forget()

        os.register_at_fork(after_in_child=in_child)
        return disk

    def copy(self) -> FaultDisk:
        """Another disk in memory that holds the same, unsynced changes too; no faults come along."""
        disk = FaultDisk()
        disk.boots = self.boots
        disk._names, disk._dirty = copy.deepcopy((self._names, self._dirty))
        return disk

    # Faults

    def before(self, operation: str, path: str, position: int = 0, size: int = 0) -> Rule | None:
        """Let the operation fail or wait as it is told to; returns a rule whose effect is the caller's."""
        if self.error is not None and (number := self.error(operation, path)) is not None:
            raise DiskError(operation, path, number, errno.errorcode[number])
        for gate in self.gates:
            gate.pass_through(operation, path)
        rules = self.rules if self._rules_file is None else self._rules_file.current()
        if not rules.rules:
            return None
        rule = rules.find(operation, path, position, size)
        if rule is None:
            return None
        if rule.stall_ms:
            self.sleep(rule.stall_ms / 1000)
        if rule.errno:
            raise DiskError(operation, path, rule.errno, rule.error)
        return rule

    def step(self, operation: str, path: str) -> None:
        """One operation; the power goes when its number has come."""
        if operation != "read":
            self.steps += 1
            if self.on_step is not None:
                self.on_step(operation, path)
        if self.cut_after is not None and self.steps >= self.cut_after:
            raise PowerCut(f"{operation} {path}")

    @property
    def happened(self) -> Counter[str]:
        """How often each kind of fault came by the rules."""
        return self.rules.happened

    @contextmanager
    def gate(self, operation: str, path: str = "*") -> Iterator[Gate]:
        """Hold operations that match until the gate is opened, or the block is left."""
        gate = Gate(operation, path)
        self.gates.append(gate)
        try:
            yield gate
        finally:
            gate.open()
            if gate in self.gates:
                self.gates.remove(gate)

    def take_room(self, path: str, growth: int, operation: str, *, gives_back: bool = False) -> None:
        """Account for a file that grows by so many bytes; ENOSPC where there is no room."""
        if self.room_bytes is None or (growth < 0 and not gives_back):
            return
        if growth > self.room_bytes:
            raise DiskError(operation, path, errno.ENOSPC, "ENOSPC")
        self.room_bytes -= growth

    def read_sectors(self, path: str, position: int, size: int) -> None:
        """EIO for a read that touches a bad sector."""
        for bad, block in self.bad_sectors:
            if bad == path and position < (block + 1) * BLOCK and block * BLOCK < position + size:
                raise DiskError("read", path, errno.EIO, "EIO")

    def crash(self, rng: random.Random, keep: float = 0.5) -> None:
        """Lose power: each unsynced block and name survives with the probability `keep`."""
        self._names.crash(rng, keep)
        for node in self._dirty:
            node.content.crash(rng, keep)
        self._dirty.clear()
        self.boots += 1
        self._next_life()

    def kill(self) -> None:
        """kill -9: the page cache stays, nothing of it more durable than before."""
        self._next_life()

    def _next_life(self) -> None:
        self.life += 1
        self.locked.clear()
        self.cut_after = None
        self.error = None
        for gate in self.gates:
            gate.open()
        self.gates.clear()

    def _forget(self) -> None:
        self._lock = ThreadLock()
        self.boots = random.SystemRandom().getrandbits(100)
        self._names.forget()
        for node in self._dirty:
            node.content.forget()
        self._dirty.clear()

    def files(self, path: str) -> list[tuple[str, int]]:
        """Path and size of every file below a directory that holds a byte."""
        directory = self._names.walk(path)
        assert directory is not None, f"no directory {path}"
        sizes = [(found, node.content.size()) for found, node in self._names.files(path, directory)]
        return [(found, size) for found, size in sizes if size]

    def held(self, path: str) -> bytes:
        """All bytes of a file as programs see them; a look that no fault disturbs."""
        content = self._file(path).content
        with content.lock:
            return content.read(content.size(), 0)

    def rot(self, path: str, position: int, size: int = 1, *, mask: int = 0xFF) -> None:
        """Turn bits over, on the platter and in memory: `mask` of each byte."""
        content = self._file(path).content
        with content.lock:
            content.flip(position, size, mask)

    def flip_one_bit(self, content: Content, position: int, size: int) -> None:
        """Any one in a range."""
        with content.lock:
            behind = min(position + size, content.size())
            if position < behind:
                content.flip(self.rng.randrange(position, behind), 1, 1 << self.rng.randrange(8))

    # What files tell

    def note_dirty(self, node: FileNode) -> None:
        self._dirty[node] = None
        if self.writeback_chance and self.rng.random() < self.writeback_chance:
            node.content.write_back_some(self.rng)

    def sync_file(self, node: FileNode) -> None:
        with node.content.lock:
            if node.content.sync():
                self._dirty.pop(node, None)

    # Names

    def _path(self, path: str) -> str:
        return path if self._real is None else os.path.abspath(path)

    def _parent(self, path: str) -> tuple[Directory, str]:
        head, _, name = self._path(path).rstrip("/").rpartition("/")
        directory = self._names.walk(head)
        if directory is None:
            raise DiskError("open", path, errno.ENOENT, "no such directory")
        return directory, name

    def _file(self, path: str) -> FileNode:
        directory, name = self._parent(path)
        node = self._names.get(directory, name)
        if not isinstance(node, FileNode):
            raise DiskError("open", path, errno.ENOENT, "no such file")
        return node

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        with self._lock:
            directory, name = self._parent(path)
            node = self._names.get(directory, name)
        if node is None:
            if not create:
                raise DiskError("open", path, errno.ENOENT, "no such file")
            self.before("create", path)
            with self._lock:
                node = self._names.make_file()
                self._names.change((Effect(directory, name, node, True),))
            self.step("create", path)
        elif exclusive:
            raise DiskError("open", path, errno.EEXIST, "exists")
        assert isinstance(node, FileNode), f"{path} is a directory"
        return FaultFile(self, path, node)

    def exists(self, path: str) -> bool:
        with self._lock:
            head, _, name = self._path(path).rstrip("/").rpartition("/")
            directory = self._names.walk(head)
            return directory is not None and self._names.get(directory, name) is not None

    def list(self, path: str) -> list[str]:
        with self._lock:
            directory = self._names.walk(self._path(path))
            return [] if directory is None else self._names.listing(directory)

    def make_directory(self, path: str) -> None:
        self.before("make directory", path)
        made = False
        with self._lock:
            directory = self._names.root
            for part in self._path(path).split("/"):
                if part:
                    node = self._names.get(directory, part)
                    if node is None:
                        node, made = self._names.make_directory(directory, part), True
                    assert isinstance(node, Directory), f"{path}: {part} is a file"
                    directory = node
        if made:
            self.step("make directory", path)

    def make_directories(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.make_directory(path)
        self.before("sync directory", os.path.dirname(paths[0]))

    def sync_directory(self, path: str) -> None:
        self.step("sync directory", path)
        self.before("sync directory", path)
        with self._lock:
            directory = self._names.walk(self._path(path))
            if directory is None:
                raise DiskError("sync directory", path, errno.ENOENT, "no such directory")
            self._names.sync(directory)

    def rename(self, old: str, new: str) -> None:
        self.before("rename", old)
        with self._lock:
            source, old_name = self._parent(old)
            target, new_name = self._parent(new)
            node = self._names.get(source, old_name)
            if node is None:
                raise DiskError("rename", old, errno.ENOENT, "no such file")
            self._names.change(
                (Effect(source, old_name, node, False), Effect(target, new_name, node, True)),
            )
        self.step("rename", old)

    def unlink(self, path: str) -> None:
        self.before("unlink", path)
        with self._lock:
            directory, name = self._parent(path)
            node = self._names.get(directory, name)
            if node is None:
                return
            if self.room_bytes is not None and isinstance(node, FileNode):
                self.room_bytes += max(node.content.size(), node.content.reserved_bytes)
            self._names.change((Effect(directory, name, node, False),))
        self.step("unlink", path)

    def remove_tree(self, path: str) -> None:
        directory = self._names.walk(self._path(path))
        if directory is None:
            return
        for name in self._names.listing(directory):
            if isinstance(self._names.get(directory, name), Directory):
                self.remove_tree(f"{path}/{name}")
            else:
                self.unlink(f"{path}/{name}")
        with self._lock:
            parent, name = self._parent(path)
            self._names.change((Effect(parent, name, directory, False),))
        self.step("remove", path)

    def lock(self, path: str, *, wait: bool = True) -> Lock:
        if self._real is not None:
            return self._real.lock(path, wait=wait)
        assert not (wait and path in self.locked), f"{path} is locked: this would wait for ever"
        if path in self.locked:
            raise DiskError("lock", path, errno.EAGAIN, "locked")
        self.open(path, create=True)
        self.locked.add(path)
        return _MemoryLock(self, path)

    def free_bytes(self, path: str) -> int:
        return 1 << 40 if self.room_bytes is None else self.room_bytes

    def boot_id(self) -> bytes:
        return self.boots.to_bytes(16, "little")

    def total_bytes(self, path: str) -> int:
        return 1 << 41
