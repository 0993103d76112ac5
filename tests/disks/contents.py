"""The bytes of one file of the fault disk: as programs see them, and as the platter has them.

Kept is what programs see, and for each unsynced change what it replaced. So a sync only forgets the latter, a
read is a slice, and a file that is synced costs its bytes once; a crash, which is rare, does the work. Where
a file of the operating system stands behind (the disk over a directory), that file is the platter: only
synced bytes reach it, the others die with the process.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BLOCK = 512


@dataclass(frozen=True, slots=True)
class _Change:
    """One unsynced change: the blocks it touched, and how to take it back.

    Undone by putting `old` where `start` to `end` is now, and cutting at `old_size`.
    """

    first_block: int
    last_block: int
    start: int
    end: int
    old: bytes
    old_size: int

    def undo(self, content: bytearray) -> None:
        content[self.start : self.end] = self.old
        del content[self.old_size :]


class Platter:
    """A file of the operating system that holds what is durable. Named by the directories, opened here."""

    __slots__ = ("_fd",)

    def __init__(self, path: str, *, create: bool = False) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
        self._fd = os.open(path, flags, 0o640)

    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def read(self, size: int, position: int) -> bytes:
        return os.pread(self._fd, size, position)

    def write(self, data: bytes | bytearray | memoryview, position: int) -> None:
        view = memoryview(data)
        while view:
            written = os.pwrite(self._fd, view, position)
            view, position = view[written:], position + written

    def set_size(self, size: int) -> None:
        os.ftruncate(self._fd, size)

    def __del__(self) -> None:
        os.close(self._fd)


class Content:
    """See the module. Calls may come from several threads."""

    __slots__ = (
        "__weakref__",
        "_behind",
        "_behind_size",
        "_changes",
        "_data",
        "_gave_up",
        "lock",
        "platter",
        "reserved_bytes",
    )

    def __init__(self, platter: Platter | None = None) -> None:
        self.platter = platter
        self.lock = threading.Lock()
        # Room that is taken for it, from its beginning.
        self.reserved_bytes = 0
        # None: nothing was changed yet, and what is seen is what the platter holds.
        self._data: bytearray | None = bytearray() if platter is None else None
        self._changes: list[_Change] = []
        # After a failed sync: what the platter holds in blocks whose pages are clean all the same, and its
        # size. Only kept without a platter file, which knows.
        self._gave_up = False
        self._behind: dict[int, bytes] = {}
        self._behind_size: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Content:
        assert self.platter is None, "only contents in memory can be copied"
        copy = Content()
        copy._data = None if self._data is None else bytearray(self._data)
        copy._changes = list(self._changes)
        copy._behind = dict(self._behind)
        copy._behind_size, copy._gave_up = self._behind_size, self._gave_up
        copy.reserved_bytes = self.reserved_bytes
        return copy

    # What programs see

    def size(self) -> int:
        if self._data is None:
            assert self.platter is not None
            return self.platter.size()
        return len(self._data)

    def growth(self, size: int) -> int:
        """How many bytes of room it takes to make it so long: none of those that are reserved."""
        return max(size, self.reserved_bytes) - max(self.size(), self.reserved_bytes)

    @property
    def is_changed(self) -> bool:
        """Whether anything waits for a sync."""
        return bool(self._changes)

    def read(self, size: int, position: int) -> bytes:
        if self._data is None:
            assert self.platter is not None
            return self.platter.read(size, position)
        return bytes(self._data[position : position + size])

    def write(self, data: bytes, position: int) -> None:
        content = self._loaded()
        old_size = len(content)
        if not data and position <= old_size:
            return
        if position > old_size:
            content.extend(bytes(position - old_size))
        end = position + len(data)
        first, last = min(position, old_size) // BLOCK, (end - 1) // BLOCK
        self._changes.append(_Change(first, last, position, end, bytes(content[position:end]), old_size))
        content[position:end] = data

    def truncate(self, size: int) -> None:
        content = self._loaded()
        old_size = len(content)
        first, last = min(size, old_size) // BLOCK, max(size, old_size) // BLOCK
        self._changes.append(_Change(first, last, size, size, bytes(content[size:]), old_size))
        del content[size:]
        content.extend(bytes(size - len(content)))

    def _loaded(self) -> bytearray:
        if self._data is None:
            assert self.platter is not None
            self._data = bytearray(self.platter.read(self.platter.size(), 0))
        return self._data

    # What becomes of it

    def sync(self) -> bool:
        """All changes are durable, except what a failed sync gave up; whether that is all there is."""
        if self.platter is not None:
            self.write_back(self._changed_ranges())
            if self._data is not None:
                self.platter.set_size(len(self._data))
        if self._behind:
            for change in self._changes:
                for block in range(change.first_block, change.last_block + 1):
                    self._behind.pop(block, None)
        self._behind_size = None
        self._changes.clear()
        return not self._gave_up

    def write_back(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Let these bytes (first, behind the last) reach the platter's file; its size may grow by it."""
        assert self.platter is not None
        if self._data is not None:
            with memoryview(self._data) as view:
                for first, behind in ranges:
                    self.platter.write(view[first:behind], first)

    def _changed_ranges(self) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        for first, last in sorted((change.first_block, change.last_block) for change in self._changes):
            start, end = first * BLOCK, (last + 1) * BLOCK
            if ranges and start <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(end, ranges[-1][1]))
            else:
                ranges.append((start, end))
        return ranges

    def write_back_some(self, rng: random.Random) -> None:
        """One block of the newest change reaches the platter early, as the kernel may decide at any time."""
        if self.platter is not None and self._changes:
            newest = self._changes[-1]
            block = rng.randint(newest.first_block, newest.last_block)
            self.write_back([(block * BLOCK, (block + 1) * BLOCK)])

    def give_up(self) -> None:
        """A sync failed. As Linux does: the pages are clean now, so no later sync writes these changes."""
        self._gave_up = True
        if self.platter is None:
            durable = self._durable()
            for change in self._changes:
                for block in range(change.first_block, change.last_block + 1):
                    self._behind[block] = bytes(durable[block * BLOCK : (block + 1) * BLOCK])
            self._behind_size = len(durable)
        self._changes.clear()

    def _durable(self) -> bytearray:
        """What the platter holds."""
        if self.platter is not None:
            return bytearray(self.platter.read(self.platter.size(), 0))
        content = bytearray(self._loaded())
        for change in reversed(self._changes):
            change.undo(content)
        for block, held in self._behind.items():
            at = block * BLOCK
            if at < len(content):
                room = len(content) - at
                content[at : at + BLOCK] = held.ljust(BLOCK, b"\0")[:room]
        if self._behind_size is not None:
            del content[self._behind_size :]
        return content

    def crash(self, rng: random.Random, keep: float) -> None:
        """Each unsynced block survives with the probability `keep`, in any version it had; so does the
        size.
        """
        durable = self._durable()
        versions: dict[int, list[bytes]] = {}
        content = bytearray(self._loaded())
        latest_size = len(content)
        for change in reversed(self._changes):
            for block in range(change.first_block, change.last_block + 1):
                version = bytes(content[block * BLOCK : (block + 1) * BLOCK])
                if version:
                    versions.setdefault(block, []).append(version)
            change.undo(content)
        size = len(durable)
        if latest_size != size and rng.random() < keep:
            size = rng.choice([size, latest_size, latest_size])
        left = durable[:size]
        left.extend(bytes(size - len(left)))
        for block in sorted(versions):
            at = block * BLOCK
            if at < size and rng.random() < keep:
                # What lies behind the end of a file is zeros in its last block.
                left[at : at + BLOCK] = rng.choice(versions[block]).ljust(BLOCK, b"\0")
        del left[size:]
        self._settle(left)

    def _settle(self, content: bytearray) -> None:
        self._changes.clear()
        self._behind.clear()
        self._behind_size = None
        self._gave_up = False
        if self.platter is None:
            self._data = content
        else:
            self._data = None
            self.platter.set_size(0)
            self.platter.write(content, 0)

    def forget(self) -> None:
        """Let go of what is not on the platter: in a forked child, where it is the parent's."""
        if self.platter is not None:
            self._data = None
        self._changes.clear()

    def flip(self, position: int, size: int, mask: int) -> None:
        """Turn bits over, on the platter and in memory."""
        flipped = bytes(byte ^ mask for byte in self.read(size, position))
        if self._data is not None:
            self._data[position : position + len(flipped)] = flipped
        for block in range(position // BLOCK, (position + size - 1) // BLOCK + 1):
            if block in self._behind:
                at = block * BLOCK
                self._behind[block] = bytes(
                    byte ^ (mask if position <= at + place < position + size else 0)
                    for place, byte in enumerate(self._behind[block])
                )
        if self.platter is not None:
            held = self.platter.read(size, position)
            self.platter.write(bytes(byte ^ mask for byte in held), position)
