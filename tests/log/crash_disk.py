"""A disk in memory that can lose power: what was not synced is kept apart, block by block.

`crash` keeps an arbitrary subset of the unsynced 512-byte blocks (any version written since the last sync)
and of the unsynced directory changes; `kill` keeps everything, as the page cache outlives a process.
`cut_after` stops the power in the middle of an operation. It follows the `Disk` protocol; the conformance
suite runs over it and over the real disk.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from laminar.log.disk import Buffer, File, Lock
from laminar.log.errors import DiskError

BLOCK = 512


class PowerCut(Exception):
    """The power went away in this operation; nothing after it happens."""


@dataclass(eq=False)
class Inode:
    """Contents as the programs see them and as the platter has them; versions of unsynced blocks."""

    current: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    versions: dict[int, list[bytes]] = field(default_factory=dict)

    def touch(self, first: int, last: int) -> None:
        for block in range(first, last + 1):
            content = bytes(self.current[block * BLOCK : (block + 1) * BLOCK])
            self.versions.setdefault(block, []).append(content)

    def sync(self) -> None:
        if len(self.durable) > len(self.current):
            del self.durable[len(self.current) :]
        self.durable.extend(bytes(len(self.current) - len(self.durable)))
        for block in self.versions:
            at = block * BLOCK
            self.durable[at : at + BLOCK] = self.current[at : at + BLOCK]
        del self.durable[len(self.current) :]
        self.versions.clear()

    def crash(self, rng: random.Random, keep: float) -> None:
        size = len(self.durable)
        if self.versions and rng.random() < keep:
            size = rng.choice([len(self.durable), len(self.current), len(self.current)])
        content = bytearray(self.durable[:size])
        content.extend(bytes(size - len(content)))
        for block, versions in self.versions.items():
            at = block * BLOCK
            if at < size and rng.random() < keep:
                version = rng.choice(versions)
                content[at : at + len(version)] = version
        del content[size:]
        self.durable = content
        self.current = bytearray(content)
        self.versions.clear()


@dataclass(eq=False)
class Directory:
    current: dict[str, Inode | Directory] = field(default_factory=dict)
    durable: dict[str, Inode | Directory] = field(default_factory=dict)


Change = Callable[[bool], None]


class MemoryFile:
    def __init__(self, disk: CrashDisk, path: str, inode: Inode) -> None:
        self.path = path
        self.inode = inode
        self._disk = disk
        self._life = disk.life

    def _check(self) -> None:
        assert self._life == self._disk.life, f"{self.path} was opened before the crash"

    def pread(self, size: int, position: int) -> Buffer:
        self._check()
        self._disk.step("read", self.path)
        return bytes(self.inode.current[position : position + size])

    def pread_nowait(self, size: int, position: int) -> Buffer | None:
        if self._disk.cold:
            return None
        data = self.pread(size, position)
        return data if len(data) == size else None

    def pwritev(self, buffers: Sequence[Buffer], position: int) -> int:
        self._check()
        self._disk.fail("write", self.path)
        data = b"".join(buffers)
        current = self.inode.current
        if len(current) < position:
            first_new = len(current) // BLOCK
            current.extend(bytes(position - len(current)))
            self.inode.touch(first_new, max(position - 1, 0) // BLOCK)
        current[position : position + len(data)] = data
        if data:
            self.inode.touch(position // BLOCK, (position + len(data) - 1) // BLOCK)
        self._disk.step("write", self.path)
        return len(data)

    def sync(self) -> None:
        self._check()
        self._disk.step("sync", self.path)
        try:
            self._disk.fail("sync", self.path)
        except DiskError:
            # As Linux does: the pages are marked clean, so a later sync succeeds and writes nothing.
            self.inode.versions.clear()
            raise
        self.inode.sync()

    def start_writeback(self, size: int, position: int) -> None:
        self._check()

    def truncate(self, size: int) -> None:
        self._check()
        self._disk.fail("truncate", self.path)
        current = self.inode.current
        first = min(size, len(current)) // BLOCK
        last = max(size, len(current)) // BLOCK
        del current[size:]
        current.extend(bytes(size - len(current)))
        self.inode.touch(first, last)
        self._disk.step("truncate", self.path)

    def size(self) -> int:
        self._check()
        return len(self.inode.current)

    def close(self) -> None:
        return None


class _Lock:
    def __init__(self, disk: CrashDisk, path: str) -> None:
        self._disk = disk
        self._path = path

    def close(self) -> None:
        self._disk.locked.discard(self._path)


class CrashDisk:
    """See the module. `life` counts crashes; files of a former life may not be used."""

    def __init__(self) -> None:
        self.root = Directory()
        self.life = 0
        self.locked: set[str] = set()
        self.steps = 0
        self.cut_after: int | None = None
        self.cold = False
        # Called with (operation, path); returns an errno to fail with.
        self.error: Callable[[str, str], int | None] | None = None
        self.trace: list[tuple[str, str]] = []
        self._changes: list[tuple[tuple[Directory, ...], Change]] = []

    # Faults

    def step(self, operation: str, path: str) -> None:
        """One operation; the power goes when its number has come."""
        if operation != "read":
            self.steps += 1
            self.trace.append((operation, path))
        if self.cut_after is not None and self.steps >= self.cut_after:
            raise PowerCut(f"{operation} {path}")

    def fail(self, operation: str, path: str) -> None:
        number = self.error(operation, path) if self.error is not None else None
        if number is not None:
            raise DiskError(operation, path, number, errno.errorcode[number])

    def crash(self, rng: random.Random, keep: float = 0.5) -> None:
        """Lose power: each unsynced block and name survives with the probability `keep`."""
        for _, change in self._changes:
            change(rng.random() < keep)
        self._changes.clear()
        self._settle(self.root, rng, keep)
        self._next_life()

    def kill(self) -> None:
        """kill -9: the page cache stays, nothing of it more durable than before."""
        self._next_life()

    def _next_life(self) -> None:
        self.life += 1
        self.locked.clear()
        self.cut_after = None
        self.error = None

    def _settle(self, directory: Directory, rng: random.Random, keep: float) -> None:
        directory.current = dict(directory.durable)
        for node in directory.current.values():
            if isinstance(node, Directory):
                self._settle(node, rng, keep)
            else:
                node.crash(rng, keep)

    def files(self, path: str) -> list[tuple[str, int]]:
        """Path and size of every file below a directory that holds a byte."""
        found: list[tuple[str, int]] = []
        directory = self._walk(path)
        assert directory is not None, f"no directory {path}"
        for name, node in sorted(directory.current.items()):
            if isinstance(node, Directory):
                found += self.files(f"{path}/{name}")
            elif node.current:
                found.append((f"{path}/{name}", len(node.current)))
        return found

    def rot(self, path: str, position: int, size: int = 1) -> None:
        """Turn bytes over, on the platter and in memory."""
        inode = self._file(path)
        for content in (inode.current, inode.durable):
            for at in range(position, min(position + size, len(content))):
                content[at] ^= 0xFF

    # Names

    def _walk(self, path: str) -> Directory | None:
        directory = self.root
        for part in path.split("/"):
            if part:
                node = directory.current.get(part)
                if not isinstance(node, Directory):
                    return None
                directory = node
        return directory

    def _parent(self, path: str) -> tuple[Directory, str]:
        head, _, name = path.rstrip("/").rpartition("/")
        directory = self._walk(head)
        if directory is None:
            raise DiskError("open", path, errno.ENOENT, "no such directory")
        return directory, name

    def _file(self, path: str) -> Inode:
        directory, name = self._parent(path)
        node = directory.current.get(name)
        if not isinstance(node, Inode):
            raise DiskError("open", path, errno.ENOENT, "no such file")
        return node

    def _change(self, directories: tuple[Directory, ...], change: Change) -> None:
        self._changes.append((directories, change))

    def open(self, path: str, *, create: bool = False, exclusive: bool = False) -> File:
        directory, name = self._parent(path)
        node = directory.current.get(name)
        if node is None:
            if not create:
                raise DiskError("open", path, errno.ENOENT, "no such file")
            self.fail("create", path)
            node = Inode()
            directory.current[name] = node
            made = node

            def change(kept: bool) -> None:
                if kept:
                    directory.durable[name] = made

            self._change((directory,), change)
            self.step("create", path)
        elif exclusive:
            raise DiskError("open", path, errno.EEXIST, "exists")
        assert isinstance(node, Inode), f"{path} is a directory"
        return MemoryFile(self, path, node)

    def exists(self, path: str) -> bool:
        head, _, name = path.rstrip("/").rpartition("/")
        directory = self._walk(head)
        return directory is not None and name in directory.current

    def list(self, path: str) -> list[str]:
        directory = self._walk(path)
        return [] if directory is None else sorted(directory.current)

    def make_directory(self, path: str) -> None:
        directory = self.root
        for part in path.split("/"):
            if part:
                node = directory.current.get(part)
                if node is None:
                    node = directory.current[part] = directory.durable[part] = Directory()
                    self.step("make directory", path)
                assert isinstance(node, Directory), f"{path}: {part} is a file"
                directory = node

    def sync_directory(self, path: str) -> None:
        self.step("sync directory", path)
        self.fail("sync directory", path)
        directory = self._walk(path)
        assert directory is not None, f"sync of the missing directory {path}"
        rest = []
        for directories, change in self._changes:
            if directory in directories:
                change(True)
            else:
                rest.append((directories, change))
        self._changes = rest

    def rename(self, old: str, new: str) -> None:
        self.fail("rename", old)
        source, old_name = self._parent(old)
        target, new_name = self._parent(new)
        node = source.current.pop(old_name, None)
        if node is None:
            raise DiskError("rename", old, errno.ENOENT, "no such file")
        target.current[new_name] = node

        def change(kept: bool) -> None:
            if kept:
                if source.durable.get(old_name) is node:
                    del source.durable[old_name]
                target.durable[new_name] = node

        self._change((source, target), change)
        self.step("rename", old)

    def unlink(self, path: str) -> None:
        self.fail("unlink", path)
        directory, name = self._parent(path)
        node = directory.current.pop(name, None)
        if node is None:
            return

        def change(kept: bool) -> None:
            if kept and directory.durable.get(name) is node:
                del directory.durable[name]

        self._change((directory,), change)
        self.step("unlink", path)

    def remove_tree(self, path: str) -> None:
        directory = self._walk(path)
        if directory is None:
            return
        for name, node in list(directory.current.items()):
            if isinstance(node, Directory):
                self.remove_tree(f"{path}/{name}")
            else:
                self.unlink(f"{path}/{name}")
        parent, name = self._parent(path)
        del parent.current[name]

        def change(kept: bool) -> None:
            if kept and parent.durable.get(name) is directory:
                del parent.durable[name]

        self._change((parent,), change)
        self.step("remove", path)

    def lock(self, path: str, *, wait: bool = True) -> Lock:
        assert not (wait and path in self.locked), f"{path} is locked: this would wait for ever"
        if path in self.locked:
            raise DiskError("lock", path, errno.EAGAIN, "locked")
        self.open(path, create=True)
        self.locked.add(path)
        return _Lock(self, path)

    def free_bytes(self, path: str) -> int:
        return 1 << 40
