"""What readers see of one replica: committed batches of records, from its own log.

It decides what is visible and what is skipped (entries that hold no records); it knows neither leaders nor
requests. Where a part can't be read, what came before it is given, and whoever goes on there is told.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from laminar.batch import Buffer, Header, Kind, as_large, as_published, kind_of, tag_bit
from laminar.http.api.problems import Problem
from laminar.log.disk.errors import DamagedRange, EntriesTrimmed
from laminar.log.partition_log.log import Log
from laminar.node.partition.state.staged_batches import publish_record

# One request for a tag looks at so many rows: who wants more comes again, from where this one ended.
TAGGED_ROWS = 16_384


class Bounds(NamedTuple):
    """The offsets that readers of one replica may see, taken at one moment."""

    start: int
    end: int


class Readable(Protocol):
    """What is read: a partition's replica."""

    @property
    def log(self) -> Log: ...
    @property
    def committed_index(self) -> int: ...
    @property
    def start_offset(self) -> int:
        """The earliest offset that is still there."""


def expired(readable: Readable, offset: int) -> Problem:
    """410: the record was given up."""
    return Problem(
        "offset_expired",
        f"the earliest offset is {readable.start_offset}",
        field="offset",
        value=offset,
        limit=readable.start_offset,
    )


async def frames(
    readable: Readable, offset: int, *, max_bytes: int, before: int | None = None
) -> list[Buffer]:
    """Committed data batches from the one that holds `offset` on, at least one if there is one.

    Nothing is looked for behind the entry that holds the offset `before`, if there is one: somebody asked for
    so many records only.
    Raises 410 `offset_expired`, also when the start moves past `offset` while its batch is read, and
    `DamagedRange` when the first is damaged.
    """
    if offset < readable.start_offset:
        raise expired(readable, offset)
    last = readable.committed_index
    index = await readable.log.find_offset(offset)
    # An entry of no records may stand here in front of the one that holds that offset: nothing lies between.
    end = await readable.log.find_offset(max(offset, before)) if before is not None else None
    if end is not None:
        last = min(last, end)
    found: list[Buffer] = []
    size = 0
    staged = False
    while index is not None and index <= last and (not found or size < max_bytes):
        wanted = max(1, max_bytes - size)
        stop = last
        try:
            if staged:
                # There may be gigabytes of them between two records: they are passed over by their rows.
                index, behind = await readable.log.find_shown(index, last)
                if index > last:
                    break
                stop = behind - 1
            read = await read_some(readable.log, index, stop, max_bytes=wanted)
        except EntriesTrimmed:
            if found:
                break
            raise expired(readable, offset) from None
        except DamagedRange:
            if found:
                break  # whoever goes on behind these is told
            raise
        for frame in read:
            kind = kind_of(frame)
            if kind == Kind.PUBLISH:
                if found and size >= max_bytes:
                    return found
                try:
                    published, whole = await _published(readable, frame, offset, max_bytes=max_bytes - size)
                except DamagedRange:
                    if found:
                        return found
                    raise
                except EntriesTrimmed:
                    if found:
                        return found
                    raise expired(readable, offset) from None
                found += published
                if not whole:
                    return found
                size += sum(map(len, published))
                continue
            if kind == Kind.STAGED:
                staged = True
                continue
            size += len(frame)
            if kind == Kind.DATA:
                found.append(frame)
        index += len(read)
    return found


async def read_some(log: Log, first_index: int, last_index: int, *, max_bytes: int) -> list[Buffer]:
    """As `Log.read`, without a turn of the loop where memory has it. Raises `EntriesTrimmed` also if the log
    begins behind the first by now.
    """
    if first_index < log.first_index:
        raise EntriesTrimmed(f"entry {first_index} of {log.name} is given up")
    read = None if log.replaying else log.read_nowait(first_index, last_index, max_bytes=max_bytes)
    return read if read is not None else await log.read(first_index, last_index, max_bytes=max_bytes)


async def tagged_frames(
    readable: Readable, offset: int, *, tag: str, max_bytes: int
) -> tuple[list[Buffer], int]:
    """As `frames`, of the batches that may hold records with a tag; others are not read at all.

    Also the offset behind all that was looked at, which may be far behind the last of them.
    """
    if offset < readable.start_offset:
        raise expired(readable, offset)
    bit = tag_bit(tag)
    index = await readable.log.find_offset(offset)
    last = min(readable.committed_index, (index or 0) + TAGGED_ROWS - 1)
    found: list[Buffer] = []
    size = 0
    try:
        while index is not None and index <= last and (not found or size < max_bytes):
            first, behind = await readable.log.find_tagged(index, last, bit)
            index = first
            while index < behind and (not found or size < max_bytes):
                try:
                    read = await read_some(
                        readable.log, index, behind - 1, max_bytes=max(1, max_bytes - size)
                    )
                except DamagedRange as damage:
                    if damage.next_offset > damage.first_offset:
                        raise
                    index = damage.last_index + 1  # it holds nothing that a reader could miss
                    continue
                for frame in read:
                    kind = kind_of(frame)
                    if kind == Kind.DATA:
                        found.append(frame)
                        size += len(frame)
                    elif kind == Kind.PUBLISH:
                        if found and size >= max_bytes:
                            return found, Header.unpack(found[-1]).next_offset
                        published, whole = await _published(
                            readable, frame, offset, max_bytes=max_bytes - size
                        )
                        found += published
                        if not whole:
                            return found, Header.unpack(found[-1]).next_offset
                        size += sum(map(len, published))
                    index += 1
        if index is not None and index > readable.log.first_index:
            offset = max(offset, (await readable.log.find_index_entry(index - 1)).next_offset)
    except EntriesTrimmed:
        if not found:
            raise expired(readable, offset) from None
    except DamagedRange:
        if not found:
            raise  # else whoever goes on behind these is told
    return found, offset


async def _published(
    readable: Readable, publish: Buffer, offset: int, *, max_bytes: int
) -> tuple[list[Buffer], bool]:
    """The batches that a `publish` entry gives offsets, from the one that holds `offset` on, at least one if
    there is one, and whether that are all. For a record larger than a batch, the one that stands for it.

    Raises `EntriesTrimmed`, and `DamagedRange` with the offsets of the first when that is damaged.
    """
    header = Header.unpack(publish)
    log = readable.log
    found: list[Buffer] = []
    size = 0
    base_offset = header.base_offset
    record = publish_record(publish)
    if record.large is not None:
        return [as_large(record.large.stub, publish=header)], True
    for index, records in record.stages:
        if base_offset + records > offset:
            if found and size >= max_bytes:
                return found, False
            try:
                staged = await read_some(log, index, index, max_bytes=1)
            except DamagedRange as damage:
                if found:
                    return found, False
                raise DamagedRange(
                    first_index=damage.first_index,
                    last_index=damage.last_index,
                    first_offset=base_offset,
                    next_offset=base_offset + records,
                    file=damage.file,
                    position=damage.position,
                    term=damage.term,
                ) from None
            found.append(as_published(staged[0], publish=header, base_offset=base_offset))
            size += len(found[-1])
        base_offset += records
    return found, True
