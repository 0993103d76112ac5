"""A batch of records as its reader sees it: columns are decoded when they are first used, and cached.

Bytes are copied only where that is necessary. No number in the frame is trusted: a body that disagrees with
its directory raises a `BatchError` that names the offsets of the records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Set
from itertools import pairwise
from typing import Any, TypeVar

import msgspec

from laminar.batch.columns import (
    Column,
    Entry,
    presence,
    read_directory,
    read_ends,
    read_times,
    tag_hash,
    unfold,
)
from laminar.batch.header import BatchError, Buffer, Flag, Header, Kind, verify, verify_body

_T = TypeVar("_T")
# To look up a member of an enumeration takes longer than all else that these are used for.
_DATA, _LARGE = Kind.DATA, int(Flag.LARGE)
_HEADERS_DECODER = msgspec.msgpack.Decoder(dict[str, bytes])


class Record:
    """One record of a batch; its cells are read from the batch when used. Times are ms since the epoch."""

    __slots__ = ("_batch", "_position", "offset", "value")

    def __init__(self, batch: Batch, position: int, offset: int, value: bytes) -> None:
        self._batch = batch
        self._position = position
        self.offset = offset
        self.value = value

    @property
    def key(self) -> bytes | None:
        """The record's key; None if it has none."""
        keys = self._batch.keys
        return None if keys is None else keys[self._position]

    @property
    def tag(self) -> str | None:
        """The record's tag; None if it has none."""
        tags = self._batch.tags
        return None if tags is None else tags[self._position]

    @property
    def headers(self) -> Mapping[str, bytes]:
        """The record's headers; empty if it has none."""
        headers = self._batch.headers
        return {} if headers is None else headers[self._position]

    @property
    def timestamp(self) -> int:
        """The producer's time if it gave one, else the time at which the leader appended the batch."""
        return self._batch.timestamps[self._position]

    @property
    def delivery_time(self) -> int | None:
        """The time (ms since the epoch) from which on readers get the record; None if it was not delayed."""
        times = self._batch.delivery_times
        return None if times is None else times[self._position]

    @property
    def trace_id(self) -> bytes | None:
        """The 16 bytes of the record's trace id; None if it has none."""
        traces = self._batch.trace_ids
        return None if traces is None else traces[self._position]

    @property
    def text(self) -> str:
        """The value as text. Raises UnicodeDecodeError if it is not UTF-8."""
        return self.value.decode()

    def json(self) -> Any:
        """Return the value, parsed as JSON. Raises `msgspec.DecodeError`, a ValueError, for other bytes."""
        return msgspec.json.decode(self.value)

    def __repr__(self) -> str:
        shown = self.value if len(self.value) <= 40 else self.value[:37] + b"..."
        return f"<Record {self.offset} key={self.key!r} value={shown!r}>"


class Batch:
    """The records of one frame (the encoded bytes of a batch); none if its kind has no records.

    The constructor checks both checksums. With ``verified=True`` it checks none: the caller has done that.
    With a `header`, which `split_headers` has verified, it checks only that of the body. Columns are read on
    first use: a column that is wrong raises `BatchError` then, and only then.
    """

    __slots__ = ("_cache", "_entries", "frame", "header")

    def __init__(self, frame: Buffer, *, verified: bool = False, header: Header | None = None) -> None:
        if header is None:
            header = Header.unpack(frame) if verified else verify(frame)
        else:
            verify_body(frame, header)
        self.header: Header = header
        self.frame = frame
        self._entries: dict[int, Entry] | None = None
        # Columns that were unpacked, by name; and their plain bytes, by `Column`.
        self._cache: dict[str | Column, Any] = {}

    def __len__(self) -> int:
        return self.header.count

    def __repr__(self) -> str:
        header = self.header
        return (
            f"<Batch {header.kind.name.lower()} index={header.index} term={header.term} "
            f"offsets={header.base_offset}..{header.next_offset} bytes={header.frame_size}>"
        )

    @property
    def base_offset(self) -> int:
        """The offset of the first record."""
        return self.header.base_offset

    @property
    def next_offset(self) -> int:
        """The offset after the last record."""
        return self.header.next_offset

    @property
    def is_large(self) -> bool:
        """Whether the batch is a stub: it stands for a record larger than a batch (see `large_record`)."""
        return bool(self.header.flags & _LARGE)

    @property
    def columns(self) -> Set[int]:
        """The numbers of the columns this batch has, also unknown ones; empty if its kind has no records."""
        return self.directory().keys()

    def entry(self, column: int) -> Entry | None:
        """Return the directory's line of a column, or None if the batch has no such column."""
        return self.directory().get(column)

    def directory(self) -> Mapping[int, Entry]:
        """Return the directory: a line for each column, by number; empty if the kind has no records."""
        if self._entries is None:
            if self.header.kind is not _DATA:
                self._entries = {}
            else:
                try:
                    self._entries = read_directory(self.frame, self.header)
                except BatchError as error:
                    raise self.bad(error) from error
        return self._entries

    def plain(self, column: Column) -> memoryview | None:
        """Return the bytes of a column of byte strings, decompressed once; None if it is absent."""
        if column not in self._cache:
            entry = self.entry(column)
            try:
                self._cache[column] = None if entry is None else unfold(self.frame, entry)
            except BatchError as error:
                raise self.bad(error) from error
        plain: memoryview | None = self._cache[column]
        return plain

    def cells(self, column: Column) -> tuple[tuple[int, ...], memoryview] | None:
        """Return (offsets, bytes) of a column of byte strings, decompressed and checked; None if absent.

        Cell `i` has the bytes from offset `i` up to, not including, offset `i + 1`.
        """
        entry, plain = self.entry(column), self.plain(column)
        if entry is None or plain is None:
            return None
        if column.name not in self._cache:
            try:
                self._cache[column.name] = read_ends(self.frame, entry, len(self))
            except BatchError as error:
                raise self.bad(error) from error
        return self._cache[column.name], plain

    @property
    def values(self) -> list[bytes]:
        """All values, copied out of the frame at once."""
        if "values" not in self._cache:
            self._cache["values"] = self._list(Column.VALUE) or []
        values: list[bytes] = self._cache["values"]
        return values

    def value(self, position: int) -> memoryview:
        """Return the value of the record at `position` (from 0) as a view; nothing is copied."""
        if not 0 <= position < len(self):
            raise IndexError(f"record {position} of {len(self)}")
        cells = self.cells(Column.VALUE)
        assert cells is not None, "a batch of records without values passed its directory's check"
        ends, data = cells
        return data[ends[position] : ends[position + 1]]

    @property
    def keys(self) -> list[bytes | None] | None:
        """All keys, None where a record has none; None if no record has one."""
        if "keys" not in self._cache:
            self._cache["keys"] = self._list(Column.KEY, nulls=True)
        keys: list[bytes | None] | None = self._cache["keys"]
        return keys

    @property
    def timestamps(self) -> list[int]:
        """Each record's time in ms: the producer's if given, else the batch's append time."""
        if "timestamps" not in self._cache:
            given = self.given_timestamps
            appended = self.header.append_time_ms
            self._cache["timestamps"] = (
                [appended] * len(self)
                if given is None
                else [appended if time is None else time for time in given]
            )
        times: list[int] = self._cache["timestamps"]
        return times

    @property
    def given_timestamps(self) -> list[int | None] | None:
        """The times that the producer gave its records, None for one without; None if it gave none at all."""
        if "given_timestamps" not in self._cache:
            self._cache["given_timestamps"] = self._times(Column.TIMESTAMP)
        found: list[int | None] | None = self._cache["given_timestamps"]
        return found

    @property
    def tags(self) -> list[str | None] | None:
        """All tags, None where a record has none; None if no record has one."""
        if "tags" not in self._cache:
            raw = self._list(Column.TAG, nulls=True)
            try:
                self._cache["tags"] = raw and [None if tag is None else tag.decode() for tag in raw]
            except UnicodeDecodeError as error:
                raise self.bad(error) from error
        tags: list[str | None] | None = self._cache["tags"]
        return tags

    def check_text(self) -> None:
        """Raise `BatchError` if a tag is not UTF-8. For callers that pass on the stored bytes as text."""
        plain = self.plain(Column.TAG)
        # Mostly all is ASCII, which is checked in one pass in C. Else each tag is decoded by itself, as a tag
        # may begin or end inside a character.
        if plain is not None and not bytes(plain).isascii():
            _ = self.tags

    def tagged(self, tag: str) -> list[int]:
        """Return the positions (from 0) of the records with this tag; only equal hashes cost a comparison."""
        entry = self.entry(Column.TAG_HASH)
        wanted = tag_hash(tag)
        if entry is None:
            return []
        hashes = struct.unpack_from(f"<{len(self)}Q", self.frame, entry.position)
        if wanted not in hashes:
            return []
        tags = self.tags or []
        return [i for i, found in enumerate(hashes) if found == wanted and tags[i] == tag]

    @property
    def headers(self) -> list[Mapping[str, bytes]] | None:
        """Each record's headers, empty where it has none; None if no record has any."""
        if "headers" not in self._cache:
            raw = self.stored_headers
            try:
                self._cache["headers"] = raw and [
                    {} if cell is None else _HEADERS_DECODER.decode(cell) for cell in raw
                ]
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise self.bad(error) from error
        headers: list[Mapping[str, bytes]] | None = self._cache["headers"]
        return headers

    @property
    def stored_headers(self) -> list[bytes | None] | None:
        """Each record's headers as a stored msgpack map, None where it has none; None if all have none."""
        return self._list(Column.HEADERS, nulls=True)

    @property
    def delivery_times(self) -> list[int | None] | None:
        """Each record's delivery time in ms since the epoch, None if it has none; None if none has one."""
        if "delivery_times" not in self._cache:
            self._cache["delivery_times"] = self._times(Column.DELIVERY_TIME)
        found: list[int | None] | None = self._cache["delivery_times"]
        return found

    @property
    def trace_ids(self) -> list[bytes | None] | None:
        """Each record's 16-byte trace id, None where it has none; None if no record has one."""
        if "trace_ids" not in self._cache:
            entry = self.entry(Column.TRACE_ID)
            traces = None
            if entry is not None:
                data = bytes(memoryview(self.frame)[entry.position : entry.position + entry.plain_length])
                traces = self._with_nulls(entry, [data[i : i + 16] for i in range(0, len(data), 16)])
            self._cache["trace_ids"] = traces
        found: list[bytes | None] | None = self._cache["trace_ids"]
        return found

    def records(self, start: int | None = None, stop: int | None = None) -> Iterator[Record]:
        """Yield the records with offsets from `start` up to, not including, `stop`; all by default."""
        base = self.header.base_offset
        first = 0 if start is None else max(0, start - base)
        last = len(self) if stop is None else min(len(self), stop - base)
        values = self.values
        for position in range(first, last):
            yield Record(self, position, base + position, values[position])

    def __iter__(self) -> Iterator[Record]:
        return self.records()

    def _list(self, column: Column, *, nulls: bool = False) -> list[Any] | None:
        cells = self.cells(column)
        if cells is None:
            return None
        ends, data = cells
        plain = bytes(data)
        found = [plain[start:end] for start, end in pairwise(ends)]
        if not nulls:
            return found
        entry = self.entry(column)
        assert entry is not None
        return self._with_nulls(entry, found)

    def _times(self, column: Column) -> list[int | None] | None:
        entry = self.entry(column)
        if entry is None:
            return None
        try:
            return self._with_nulls(entry, list(read_times(self.frame, entry, len(self))))
        except BatchError as error:
            raise self.bad(error) from error

    def _with_nulls(self, entry: Entry, cells: list[_T]) -> list[Any]:
        present = presence(self.frame, entry, self.header.count)
        if present is None:
            return cells
        return [cell if bit == "1" else None for cell, bit in zip(cells, present, strict=True)]

    def bad(self, error: Exception) -> BatchError:
        """Return a `BatchError` for `error` that names the offsets of this batch, which cannot be read."""
        first, end = self.header.base_offset, self.header.next_offset
        known = error if isinstance(error, BatchError) else None
        return BatchError(
            known.code if known else "malformed",
            f"records {first} to {end - 1} cannot be read: {error}",
            field=known.field if known else "body",
            value=known.value if known else None,
            limit=known.limit if known else None,
            offsets=(first, end),
        )
