"""The table of cursors, the named positions of consumers, in one partition.

A change of a cursor is an entry of kind `cursor` in the partition's own log, so it is as durable as the
records, and is replicated with them (docs/consensus.md#derived-tables). Like the table of producers this one
is a function of the log: changed when an entry is appended, rolled back when the entry is truncated.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from laminar.batch import Buffer, Header

# Most cursors of one partition: each is in memory on every replica, and in every snapshot.
MAX_CURSORS = 10_000


class CursorChange(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a `cursor` entry. A `position` of None deletes the cursor; `owner` "" is no owner.

    `made_by` is the principal that creates the cursor; it is ignored if the cursor exists.
    """

    name: str
    position: int | None
    changed_ms: int
    owner: str = ""
    made_by: str = ""


class Cursor(msgspec.Struct, frozen=True):
    """The state of a cursor: the next offset that its consumer wants, and its owner ("": none).

    `made_by` is the principal that created the cursor and whose limit it counts towards; "": none.
    """

    position: int
    changed_ms: int
    owner: str = ""
    made_by: str = ""


class CursorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One cursor in the form stored in snapshots and `log_start` entries."""

    name: str
    position: int
    changed_ms: int
    owner: str
    made_by: str = ""


class Cursors:
    """The table of the cursors of one partition, by name."""

    __slots__ = ("_cursors", "_undo")

    def __init__(self) -> None:
        self._cursors: dict[str, Cursor] = {}
        self._undo: deque[tuple[int, str, Cursor | None]] = deque()

    def __len__(self) -> int:
        return len(self._cursors)

    @property
    def is_used(self) -> bool:
        """Whether any cursor exists at the log's end or as of the last commit."""
        return bool(self._cursors or self._undo)

    def get(self, name: str) -> Cursor | None:
        """Return the cursor as of the log's end, committed or not; None if there is none."""
        return self._cursors.get(name)

    def committed_at(self, name: str) -> Cursor | None:
        """Return the cursor as of the last commit known here, before every change that may be truncated."""
        for _, changed, before in self._undo:
            if changed == name:
                return before
        return self._cursors.get(name)

    def made_by(self, principal: str) -> int:
        """Return how many cursors a principal has created, as of the log's end."""
        return sum(cursor.made_by == principal for cursor in self._cursors.values())

    def names(self) -> list[str]:
        """Return the names of all cursors as of the log's end, sorted."""
        return sorted(self._cursors)

    def known(self) -> list[str]:
        """Return the names of cursors that exist at the log's end or as of the last commit, sorted."""
        return sorted(self._cursors.keys() | {name for _, name, _ in self._undo})

    def appended(self, header: Header, payload: Buffer) -> None:
        """Apply a `cursor` entry that is now the log's last."""
        change = msgspec.msgpack.decode(payload, type=CursorChange)
        before = self._cursors.get(change.name)
        self._undo.append((header.index, change.name, before))
        if change.position is None:
            self._cursors.pop(change.name, None)
        else:
            made_by = change.made_by if before is None else before.made_by
            self._cursors[change.name] = Cursor(change.position, change.changed_ms, change.owner, made_by)

    def truncated(self, index: int) -> None:
        """Roll back entry `index` and all after it, which were truncated."""
        while self._undo and self._undo[-1][0] >= index:
            _, name, before = self._undo.pop()
            if before is None:
                self._cursors.pop(name, None)
            else:
                self._cursors[name] = before

    def committed(self, index: int) -> None:
        """Forget how to roll back entries up to `index`: they are committed."""
        while self._undo and self._undo[0][0] <= index:
            self._undo.popleft()

    def stored(self) -> list[CursorEntry]:
        """Return all cursors as of the log's end, in the form stored in snapshots and `log_start` entries."""
        return [
            CursorEntry(name, cursor.position, cursor.changed_ms, cursor.owner, cursor.made_by)
            for name, cursor in self._cursors.items()
        ]

    def stored_at(self, index: int) -> list[CursorEntry]:
        """Return all cursors as of entry `index`, which is the last committed one or a later one."""
        copy = Cursors()
        copy._cursors = dict(self._cursors)
        copy._undo = deque(self._undo)
        copy.truncated(index + 1)
        return copy.stored()

    def restore(self, entries: Iterable[CursorEntry]) -> None:
        """Replace the table by one from a snapshot; no change before this can be rolled back."""
        self._undo.clear()
        self._cursors = {
            entry.name: Cursor(entry.position, entry.changed_ms, entry.owner, entry.made_by)
            for entry in entries
        }
