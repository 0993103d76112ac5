"""The catalog's tables: immutable mappings; a changed copy shares most of its content with the original.

A table is `PARTS` dicts. A changed table has copies of the dicts in which a key changed, and shares the
others with the table before: so a change of one record of 100,000 takes microseconds, and so does finding
what differs between two tables of one history. Reading is that of any mapping, nearly as fast as a dict.

The order of a table is the same in every process, but it has no meaning: code that chooses among records
sorts them. msgspec encodes a table as the map that a dict would be (`encoded`).
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from itertools import chain
from typing import Any, ClassVar, Generic, Self, TypeVar, overload
from zlib import crc32

import msgspec

PARTS = 256
"""Dicts of a table. Of 1,000,000 records a change then copies some 4,000 references."""

Key = TypeVar("Key", str, bytes, int)
Record = TypeVar("Record")
Default = TypeVar("Default")


def part_of(key: str | bytes | int) -> int:
    """Return the number of the part (one of a table's dicts) that has a key; the same in every process."""
    if isinstance(key, int):
        return key % PARTS
    return crc32(key if isinstance(key, bytes) else key.encode()) % PARTS


class Table(Mapping[Key, Record], Generic[Key, Record]):
    """An immutable mapping of keys to records (never None); `changed` returns a changed copy."""

    __slots__ = ("_parts", "_size")

    def __init__(self, records: Mapping[Key, Record] | None = None) -> None:
        self._parts: list[dict[Key, Record]] = [{} for _ in range(PARTS)]
        for key, record in (records or {}).items():
            self._parts[part_of(key)][key] = record
        self._size = len(records or ())

    def changed(self, changes: Mapping[Key, Record | None]) -> Self:
        """Return the table with these records, and without the keys whose record is None."""
        parts, size, different = list(self._parts), self._size, False
        for key, record in changes.items():
            number = part_of(key)
            known = parts[number].get(key)
            if known is record:
                continue
            if parts[number] is self._parts[number]:
                parts[number] = dict(parts[number])
            if record is None:
                del parts[number][key]
                size -= 1
            else:
                parts[number][key] = record
                size += known is None
            different = True
        return self._made_of(parts, size) if different else self

    def __or__(self, records: Mapping[Key, Record]) -> Self:
        return self.changed(records)

    def _made_of(self, parts: list[dict[Key, Record]], size: int) -> Self:
        after = type(self).__new__(type(self))
        after._parts, after._size = parts, size
        return after

    def changes_since(self, before: Table[Key, Record]) -> dict[Key, Record | None]:
        """Return the changes since `before`, by key: the new record, or None for a removed one.

        Records are compared by identity, and only in the parts that the two tables do not share.
        """
        changes: dict[Key, Record | None] = {}
        if self is before:
            return changes
        for part, former in zip(self._parts, before._parts, strict=True):
            if part is not former:
                changes.update((key, record) for key, record in part.items() if former.get(key) is not record)
                changes.update((key, None) for key in former if key not in part)
        return changes

    # -- reading -------------------------------------------------------------------------

    def __getitem__(self, key: Key) -> Record:
        return self._parts[part_of(key)][key]

    @overload
    def get(self, key: Key) -> Record | None: ...
    @overload
    def get(self, key: Key, default: Default) -> Record | Default: ...
    def get(self, key: Key, default: Any = None) -> Any:
        """Return the record of a key, or `default`."""
        return self._parts[part_of(key)].get(key, default)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, (str, bytes, int)) and key in self._parts[part_of(key)]

    def __iter__(self) -> Iterator[Key]:
        return chain.from_iterable(self._parts)

    def items(self) -> _Items:
        """Return keys and records."""
        return _Items(self)

    def values(self) -> _Values:
        """Return the records."""
        return _Values(self)

    def __len__(self) -> int:
        return self._size

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table):
            return self._parts == other._parts
        return isinstance(other, Mapping) and self.plain() == other

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.plain()!r})"

    def plain(self) -> dict[Key, Record]:
        """Return a dict with the same content."""
        merged: dict[Key, Record] = {}
        for part in self._parts:
            merged.update(part)
        return merged


class _Items(ItemsView[Any, Any]):
    _mapping: Table[Any, Any]

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return chain.from_iterable(map(dict.items, self._mapping._parts))


class _Values(ValuesView[Any]):
    _mapping: Table[Any, Any]

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(map(dict.values, self._mapping._parts))


class Indexed(Table[str, Record]):
    """A table whose records are also found by other keys, such as the ids of their replicas.

    `KEYS` has, by the index's name, the function that returns a record's keys; a key belongs to one record at
    most. An index is built when it is first used, so a table that is never asked has none; tables made from
    this one by changes then have it, too.
    """

    KEYS: ClassVar[Mapping[str, Callable[[Any], Iterable[bytes | int]]]] = {}

    __slots__ = ("_indexes",)

    def __init__(self, records: Mapping[str, Record] | None = None) -> None:
        super().__init__(records)
        self._indexes: dict[str, Table[Any, str]] = {}

    def changed(self, changes: Mapping[str, Record | None]) -> Self:
        """Return the table with these records, and without the keys whose record is None."""
        after = super().changed(changes)
        if after is not self:
            after._indexes = {
                name: index.changed(self._moved(self.KEYS[name], changes))
                for name, index in self._indexes.items()
            }
        return after

    def _moved(
        self, keys_of: Callable[[Record], Iterable[bytes | int]], changes: Mapping[str, Record | None]
    ) -> dict[Any, str | None]:
        moved: dict[Any, str | None] = {}
        for name in changes:
            known = self.get(name)
            if known is not None:
                moved.update(dict.fromkeys(keys_of(known)))
        for name, record in changes.items():
            if record is not None:
                moved.update(dict.fromkeys(keys_of(record), name))
        return moved

    def find(self, index: str, key: bytes | int) -> Record | None:
        """Return the record that has a key in the index of this name; None if there is none."""
        keys_of = self.KEYS[index]
        if index not in self._indexes:
            self._indexes[index] = Table(
                {each: name for name, record in self.items() for each in keys_of(record)}
            )
        name = self._indexes[index].get(key)
        return None if name is None else self[name]


def encoded(value: object) -> bytes:
    """Return msgpack of a value that may contain tables."""
    return _encoder.encode(value)


def _plain(value: object) -> object:
    if isinstance(value, Table):
        return value.plain()
    raise NotImplementedError(f"{type(value).__name__} is not encoded")


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
