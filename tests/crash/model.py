"""Which disks a crash may leave: every legal state of a file system at an instant of a recorded run.

What a sync covers is on the disk; a sync covers what *returned* before the sync began, as POSIX says. Of all
else, each sector of 512 bytes is old, new, of any version between, or torn; so is each size, and each name.
Names are durable by a sync of their directory only. A call that was under way at the instant may have done
any part of its work. This is more than any one file system does, and no less.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from tests.crash.trace import Call, Kind

SECTOR, PAGE = 512, 4096


class Crash(StrEnum):
    """What ends: the process alone, or the machine."""

    KILL = "kill"
    POWER = "power"


@dataclass(slots=True)
class Write:
    """Bytes that may not be on the disk yet.

    One that `cuts` gives the file another `size`; the bytes that go are zeros before.
    """

    began: int
    ended: int
    position: int
    data: bytes
    size: int = 0
    cuts: bool = False


@dataclass(slots=True)
class File:
    """The content on the disk, and the writes that no sync covers."""

    content: bytearray = field(default_factory=bytearray)
    size: int = 0  # as the running process sees it
    pending: list[Write] = field(default_factory=list)

    def write(self, call: Call) -> None:
        write = Write(call.began, call.ended, call.position, call.first)
        self.size = max(self.size, call.position + len(call.first))
        if call.durable:
            self._flush_sectors(write)
            _apply(self.content, write)
        else:
            self.pending.append(write)

    def truncate(self, call: Call, size: int) -> None:
        gone = max(0, self.size - size)
        self.pending.append(Write(call.began, call.ended, min(size, self.size), bytes(gone), size, cuts=True))
        self.size = size

    def sync(self, began: int) -> None:
        covered = [write for write in self.pending if write.ended <= began]
        self.pending = [write for write in self.pending if write.ended > began]
        for write in covered:
            _apply(self.content, write)

    def _flush_sectors(self, durable: Write) -> None:
        """Older writes into the sectors of a synced write reach the disk with it."""
        first = durable.position // SECTOR * SECTOR
        last = -(-(durable.position + len(durable.data)) // SECTOR) * SECTOR
        kept = []
        for write in self.pending:
            start, stop = write.position, write.position + len(write.data)
            if stop <= first or start >= last or write.ended > durable.began or write.cuts:
                kept.append(write)
                continue
            low, high = max(start, first), min(stop, last)
            _put(self.content, low, write.data[low - start : high - start])
            for begin, end in ((start, low), (high, stop)):
                if begin < end:
                    part = write.data[begin - start : end - start]
                    kept.append(Write(write.began, write.ended, begin, part))
        self.pending = kept

    def after(self, crash: Crash, at: int, how: str, rng: random.Random) -> bytearray:
        """The content after a crash at the instant `at`; `how` is one of `WAYS`."""
        content = bytearray(self.content)
        if crash is Crash.KILL or how == "all":
            for write in self.pending:
                if write.ended <= at:
                    _apply(content, write)
                else:
                    _begin(content, write, rng)
        elif how == "first" and self.pending:
            *whole, torn = self.pending[: rng.randrange(1, len(self.pending) + 1)]
            for write in whole:
                _apply(content, write)
            _scatter(content, [torn], rng)
        elif how == "any":
            _scatter(content, self.pending, rng)
        return content


def _apply(content: bytearray, write: Write) -> None:
    _put(content, write.position, write.data)
    if write.cuts:
        del content[write.size :]
        content.extend(bytes(write.size - len(content)))


def _begin(content: bytearray, write: Write, rng: random.Random) -> None:
    """A write that was under way when its process was killed: the kernel took some whole pages of it."""
    if write.cuts:
        if rng.random() < 0.5:
            _apply(content, write)
    else:
        pages = -(-len(write.data) // PAGE)
        _put(content, write.position, write.data[: rng.randrange(pages + 1) * PAGE])


def _scatter(content: bytearray, writes: Sequence[Write], rng: random.Random) -> None:
    """Each sector of any version that these writes made, or torn; the size of any of them."""
    sizes = [len(content)]
    versions: dict[int, list[bytes]] = {}
    whole = bytearray(content)
    for write in writes:
        _put(whole, write.position, write.data)
        sizes.append(write.size if write.cuts else max(sizes[-1], write.position + len(write.data)))
        for sector in range(write.position // SECTOR, -(-(write.position + len(write.data)) // SECTOR)):
            place = slice(sector * SECTOR, (sector + 1) * SECTOR)
            data = bytes(whole[place])
            versions.setdefault(sector, [bytes(content[place])]).append(data)
    keep = rng.choice((0.1, 0.5, 0.9))
    for sector, found in versions.items():
        picked = found[-1] if rng.random() < keep else rng.choice(found)
        if rng.random() < 0.02:
            cut = rng.randrange(1, SECTOR)
            picked = found[-1][:cut] + found[0][cut:]
        length = max(map(len, found))
        _put(content, sector * SECTOR, picked.ljust(length, b"\0"))
    size = sizes[-1] if rng.random() < keep else rng.choice(sizes)
    del content[size:]
    content.extend(bytes(size - len(content)))


def _put(content: bytearray, position: int, data: bytes) -> None:
    if not data:
        return
    if len(content) < position:
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


@dataclass(slots=True)
class Change:
    """One name in a directory that no sync covers: `group` holds what changes together."""

    began: int
    ended: int
    name: str
    node: File | Folder | None
    group: int


@dataclass(slots=True)
class Folder:
    """Names on the disk, and as the running process sees them."""

    names: dict[str, File | Folder] = field(default_factory=dict)
    seen: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)

    def change(self, call: Call, name: str, node: File | Folder | None, group: int) -> None:
        if node is None:
            self.seen.pop(name, None)
        else:
            self.seen[name] = node
        self.pending.append(Change(call.began, call.ended, name, node, group))

    def sync(self, began: int) -> set[int]:
        """Returns the groups that are durable now, also what they change in other directories."""
        settled = {change.group for change in self.pending if change.ended <= began}
        self.settle(settled)
        return settled

    def settle(self, groups: set[int]) -> None:
        for change in self.pending:
            if change.group in groups:
                _name(self.names, change)
        self.pending = [change for change in self.pending if change.group not in groups]

    def after(self, chosen: Callable[[Change], bool]) -> dict[str, File | Folder]:
        names = dict(self.names)
        for change in self.pending:
            if chosen(change):
                _name(names, change)
        return names


def _name(names: dict[str, File | Folder], change: Change) -> None:
    if change.node is None:
        names.pop(change.name, None)
    else:
        names[change.name] = change.node


# How a loss of power picks among what no sync covers: all old; all new; anything; everything up to some
# write, and that one torn.
WAYS = ("none", "all", "any", "first")


class Disk:
    """The file system during a recorded run: feed it calls in order, and ask for a crash at any instant."""

    def __init__(self, root_inode: int, root: Folder | None = None) -> None:
        self.root = root or Folder()
        self._nodes: dict[int, File | Folder] = {root_inode: self.root}
        self._group = 0

    @classmethod
    def of(cls, folder: Path) -> Disk:
        """A disk with what lies in a folder, all of it durable."""
        disk = cls(folder.stat().st_ino)
        disk._load(folder, disk.root)
        return disk

    def _load(self, folder: Path, node: Folder) -> None:
        for path in folder.iterdir():
            child: File | Folder
            if path.is_dir():
                child = Folder()
                self._load(path, child)
            else:
                content = bytearray(path.read_bytes())
                child = File(content, len(content))
            self._nodes[path.stat().st_ino] = child
            node.names[path.name] = node.seen[path.name] = child

    def adopt(self, folder: Path) -> None:
        """Go on with a folder that `materialise` wrote: its inodes are what the next calls name."""
        self._nodes = {folder.stat().st_ino: self.root}
        self._adopt(folder, self.root)

    def _adopt(self, folder: Path, node: Folder) -> None:
        for path in folder.iterdir():
            child = node.seen[path.name]
            self._nodes[path.stat().st_ino] = child
            if isinstance(child, Folder):
                self._adopt(path, child)

    def feed(self, call: Call) -> None:
        """Take in a call that ended, or that was under way."""
        self._group += 1
        match call.kind:
            case Kind.CREATE | Kind.MKDIR:
                node: File | Folder = File() if call.kind is Kind.CREATE else Folder()
                self._nodes[call.inode] = node
                folder, name = self._place(call.first)
                folder.change(call, name, node, self._group)
            case Kind.RENAME:
                old_folder, old = self._place(call.first)
                new_folder, new = self._place(call.second)
                node = old_folder.seen[old]
                old_folder.change(call, old, None, self._group)
                new_folder.change(call, new, node, self._group)
            case Kind.UNLINK | Kind.RMDIR:
                folder, name = self._place(call.first)
                folder.change(call, name, None, self._group)
            case Kind.WRITE:
                self._file(call.inode).write(call)
            case Kind.TRUNCATE:
                self._file(call.inode).truncate(call, call.position)
            case Kind.ALLOCATE:
                file = self._file(call.inode)
                if call.position > file.size:
                    file.truncate(call, call.position)
            case Kind.SYNC:
                self._sync(self._nodes[call.inode], call.began)
            case Kind.SYNC_ALL:
                for node in list(self._all(self.root)):
                    self._sync(node, call.began)

    def _sync(self, node: File | Folder, began: int) -> None:
        if isinstance(node, File):
            node.sync(began)
        elif settled := node.sync(began):
            # A rename between two directories is one change: it is durable with either.
            for other in self._all(self.root):
                if isinstance(other, Folder):
                    other.settle(settled)

    def _file(self, inode: int) -> File:
        node = self._nodes[inode]
        assert isinstance(node, File), f"inode {inode} is a directory"
        return node

    def _place(self, path: bytes) -> tuple[Folder, str]:
        *parents, name = path.decode().split("/")
        node: File | Folder = self.root
        for part in parents:
            assert isinstance(node, Folder)
            node = node.seen[part]
        assert isinstance(node, Folder)
        return node, name

    def _all(self, node: Folder) -> Iterable[File | Folder]:
        yield node
        for child in {id(each): each for each in (*node.seen.values(), *node.names.values())}.values():
            if isinstance(child, Folder):
                yield from self._all(child)
            else:
                yield child

    def crash(self, crash: Crash, at: int, how: str, rng: random.Random) -> Disk:
        """Another disk: what the crash left. After a loss of power all of it is durable."""
        changes = [
            change for node in self._all(self.root) if isinstance(node, Folder) for change in node.pending
        ]
        chance: dict[int, bool] = defaultdict(lambda: rng.random() < 0.5)
        last = rng.choice(changes).ended if changes else 0

        def chosen(change: Change) -> bool:
            """Whether a change of names that no sync covers is there after the crash."""
            if crash is Crash.KILL or how == "all":
                return change.ended <= at or chance[change.group]
            return (how == "any" and chance[change.group]) or (how == "first" and change.ended <= last)

        found = Disk(0, Folder())
        self._copy(self.root, found.root, crash, at, how, rng, chosen, {})
        return found

    def _copy(
        self,
        old: Folder,
        new: Folder,
        crash: Crash,
        at: int,
        how: str,
        rng: random.Random,
        chosen: Callable[[Change], bool],
        files: dict[int, File],
    ) -> None:
        for name, node in old.after(chosen).items():
            child: File | Folder
            if isinstance(node, Folder):
                child = Folder()
                self._copy(node, child, crash, at, how, rng, chosen, files)
            elif id(node) in files:
                child = files[id(node)]
            else:
                content = node.after(crash, at, how, rng)
                if crash is Crash.KILL:
                    # The page cache lives on: what was not on the disk is still not on it.
                    child = File(bytearray(node.content), len(content))
                    child.pending = [write for write in node.pending if write.ended <= at]
                    if any(write.ended > at for write in node.pending):
                        child.pending.append(Write(0, 0, 0, bytes(content), len(content), cuts=True))
                else:
                    child = File(content, len(content))
                files[id(node)] = child
            new.seen[name] = child
            if crash is Crash.POWER:
                new.names[name] = child
        if crash is Crash.KILL:
            self._keep_pending_names(old, new, at)

    def _keep_pending_names(self, old: Folder, new: Folder, at: int) -> None:
        """Names that were on the disk stay there; the others are what no sync covers."""
        self._group += 1
        for name in old.names.keys() | new.seen.keys():
            durable, seen = old.names.get(name), new.seen.get(name)
            if durable is None and seen is not None:
                new.pending.append(Change(0, 0, name, seen, self._group))
            elif durable is not None and seen is None:
                ghost: File | Folder = (
                    File(bytearray(durable.content)) if isinstance(durable, File) else Folder()
                )
                new.names[name] = ghost
                new.pending.append(Change(0, 0, name, None, self._group))
            elif durable is not None and seen is not None:
                if old.seen.get(name) is durable:
                    new.names[name] = seen
                else:  # replaced by a rename
                    new.names[name] = (
                        File(bytearray(durable.content)) if isinstance(durable, File) else Folder()
                    )
                    new.pending.append(Change(0, 0, name, seen, self._group))

    def materialise(self, folder: Path) -> None:
        """Write what a process would see into an empty folder."""
        folder.mkdir(parents=True)
        self._write(self.root, folder)

    def _write(self, node: Folder, folder: Path) -> None:
        for name, child in node.seen.items():
            path = folder / name
            if isinstance(child, Folder):
                path.mkdir()
                self._write(child, path)
            else:
                path.write_bytes(child.after(Crash.KILL, 1 << 63, "all", random.Random(0)))
