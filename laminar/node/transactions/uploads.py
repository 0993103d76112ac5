"""Uploads of records larger than a batch, in one partition: parts, publish, drop.

An upload belongs to one partition, so that partition's leader decides alone, by its table of staged batches
(`laminar.node.partition.state.staged_batches`), in the turn of the loop in which it proposes. Every step may
be repeated, and is answered as the first time. Parts of an abandoned upload are dropped because of their age,
like stages.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from weakref import WeakKeyDictionary

import msgspec

from laminar.batch import Header, Kind
from laminar.batch.header import HEADER_SIZE, seal
from laminar.batch.large_record import combine
from laminar.http.api.parameters import MAX_UPLOAD_PARTS
from laminar.http.api.problems import Problem
from laminar.node.partition.partition import Partition
from laminar.node.partition.problems import NO_MAKER, Maker
from laminar.node.partition.receipts import Receipt
from laminar.node.partition.state.staged_batches import (
    BatchKey,
    PublishedUpload,
    Stage,
    StagedBatches,
    upload_key,
)
from laminar.node.partition.state.staging_entries import LargeRecord, PublishRecord
from laminar.node.transactions.participant import Batch, Participant

# The most unpublished uploads of one partition, bounded because retention cannot trim their parts.
MAX_OPEN = 256
# The most bytes of the unpublished uploads of one partition, without a setting.
MAX_BYTES = 64 << 30
# At either limit, uploads to which no part was added for this time are dropped to make room.
IDLE_MS = 60_000
# The number of checksums that are combined in one turn of the loop: 3 ms at most.
_AT_ONCE = 64
# From this many parts of one length on, a table for that length is worth its computation (`combine`).
_OFTEN = 64


def id_of(name: str) -> bytes:
    """Return the id (16 bytes) of the upload with this name, which is in the headers of its parts."""
    return hashlib.sha256(b"upload\0" + name.encode()).digest()[:16]


# By partition that is led here and open upload: the principal that began it. It is not in the log, so a new
# leader counts none of those that are open.
_MAKERS: WeakKeyDictionary[Partition, dict[BatchKey, str]] = WeakKeyDictionary()


class Uploads:
    """The commands for uploads of one partition. Leader only: elsewhere they raise 503 `not_leader`."""

    def __init__(self, partition: Partition, *, max_bytes: int = MAX_BYTES) -> None:
        self._partition = partition
        self._max_bytes = max_bytes

    @property
    def _stages(self) -> StagedBatches:
        return self._partition.state.stages

    def part(self, upload: bytes, frame: bytearray, maker: Maker = NO_MAKER) -> asyncio.Future[Receipt]:
        """Append a part, an unstamped frame of `build_part`; the future is resolved when it is committed.

        A new upload counts for the limits of the principal that begins it (`maker`), in the memory of this
        leader.

        If the same bytes are stored under this number already, nothing is appended. Idle uploads may be
        dropped to make room.

        Raises:
            Problem: 422 `invalid` when other bytes are stored under this number, or the number is too high;
                409 `already_committed` when the upload is published; 413 `too_large` or 429 `quota` when
                there is no room; 503 `changing` while no upload may begin here.
        """
        partition = self._partition
        partition.check_leads()
        header = Header.unpack(frame)
        number = header.checkpoint
        if number >= MAX_UPLOAD_PARTS:
            raise _refused(
                "the number of the part is too high", field="part", value=number, limit=MAX_UPLOAD_PARTS - 1
            )
        done = self._stages.upload(upload)
        if done is not None:
            raise self._published_already(done)
        key = upload_key(upload)
        known = self._stages.stage(key, number)
        if known is not None:
            if (known.size_bytes, known.body_crc) != (header.frame_size, header.body_crc):
                raise _refused("other bytes were uploaded under this number", field="part", value=number)
            return partition.appends.when_committed(
                known.index, Receipt(partition.number, 0, 1, duplicate=True)
            )
        closed = partition.appends.closed()
        if closed is not None:
            return closed
        if self._stages.batch(key) is None:
            partition.check_may_begin()
            makers = self._makers()
            maker.check("uploads", list(makers.values()).count)
            self._make_room()
            if maker.principal:
                makers[key] = maker.principal
        self._make_room_for(key, header.frame_size)
        return partition.appends.append_control(frame)

    async def publish(
        self, upload: bytes, *, parts: int, size_bytes: int, crc32c: int, stub: bytes
    ) -> Receipt:
        """Give the record of an upload its offset; return its receipt when that is committed.

        `size_bytes` and `crc32c` are those of the whole value; `stub` is the unstamped batch that stands for
        the record. A repetition returns the first receipt.

        Raises:
            Problem: 409 `no_stage` when one of the parts 0 to `parts` - 1 is missing; 422 `invalid` when
                there are more parts, or their sizes do not add up to `size_bytes`; `bad_checksum` when their
                checksum is another; 409 `already_committed` when the upload was published with another number
                of parts, size or checksum.
        """
        return await (await self._publish(upload, parts, size_bytes, crc32c, stub))

    async def _publish(
        self, upload: bytes, parts: int, size_bytes: int, crc32c: int, stub: bytes
    ) -> asyncio.Future[Receipt]:
        partition = self._partition
        checked: list[Stage] | None = None
        while True:
            partition.check_leads()
            done = self._stages.upload(upload)
            if done is not None:
                if (done.parts, done.size_bytes, done.crc32c) != (parts, size_bytes, crc32c):
                    raise self._published_already(done)
                receipt = Receipt(partition.number, done.offset, 1, duplicate=True)
                return partition.appends.when_committed(done.index, receipt)
            closed = partition.appends.closed()
            if closed is not None:
                return closed
            held = self._parts(upload, parts)
            # The loop turns during the check, and parts may change: propose only what was checked.
            if held == checked:
                break
            await _check(held, size_bytes=size_bytes, crc32c=crc32c)
            checked = held
        record = PublishRecord(
            upload,
            0,
            0,
            [(part.index, part.body_bytes) for part in held],
            LargeRecord(size_bytes, crc32c, stub),
        )
        frame = bytearray(HEADER_SIZE) + msgspec.msgpack.encode(record)
        seal(frame, Kind.PUBLISH, count=1, tag_mask=Header.unpack(stub).tag_mask)
        # The entry is small and ends the upload, so it is taken even while records are refused for lack of
        # room.
        return partition.appends.append_control(frame, count=1, even_if_full=True)

    def drop(self, upload: bytes) -> asyncio.Future[Receipt]:
        """Drop the parts of an unpublished upload; the future is resolved when that is committed."""
        sink, number, epoch = upload_key(upload)
        return Participant(self._partition).drop(Batch(sink=sink, number=number, epoch=epoch))

    def _parts(self, upload: bytes, parts: int) -> list[Stage]:
        """Return the parts 0 to `parts` - 1 in order.

        Raises `Problem` unless the upload has exactly these.
        """
        batch = self._stages.batch(upload_key(upload))
        held = {part.number: part for part in batch.stages} if batch is not None else {}
        missing = next((number for number in range(parts) if number not in held), None)
        if missing is not None or not parts:
            raise Problem(
                "no_stage",
                f"{self._partition.topic}/{self._partition.number} holds {len(held)} parts of this upload",
                field="parts",
                value=missing,
                limit=len(held),
                hint="Upload what is missing; parts to which nothing is added are dropped after an hour.",
                outcome="not_applied",
            )
        if len(held) > parts:
            raise _refused("more parts were uploaded", field="parts", value=parts, limit=len(held))
        return [held[number] for number in range(parts)]

    def _makers(self) -> dict[BatchKey, str]:
        """Return the principals of open uploads that began at this leader, by upload. Callers may add one."""
        makers = _MAKERS.setdefault(self._partition, {})
        for key in [each for each in makers if self._stages.batch(each) is None]:
            del makers[key]
        return makers

    def _make_room(self) -> None:
        """Make room for one more upload: if there are too many, drop the smallest idle one.

        Raises:
            Problem: 429 `quota` when none is idle.
        """
        count = self._stages.open_uploads()
        if count < MAX_OPEN:
            return
        idle = self._stages.idle_upload(before_ms=self._idle_since_ms())
        if idle is None:
            raise self._quota("too many uploads are under way", field="uploads", value=count, limit=MAX_OPEN)
        self._drop(idle)

    def _make_room_for(self, key: BatchKey, size_bytes: int) -> None:
        """Make room for a part: if unpublished uploads are too large, drop idle ones, the longest idle first.

        None is dropped unless that makes enough room.

        Raises:
            Problem: 413 `too_large` if this upload alone would be too large; 429 `quota` if dropping all idle
                ones would not make enough room.
        """
        limit = self._max_bytes
        own = self._stages.batch(key)
        alone = size_bytes + (own.size_bytes if own is not None else 0)
        if alone > limit:
            raise Problem(
                "too_large",
                "this upload would hold more than all unfinished uploads of a partition may",
                field="upload_bytes",
                value=alone,
                limit=limit,
                hint="The node's setting max_upload_bytes allows more.",
                outcome="not_applied",
            )
        wanted = self._stages.open_upload_bytes() + size_bytes
        if wanted <= limit:
            return
        idle = [each for each in self._stages.idle_uploads(before_ms=self._idle_since_ms()) if each[2] != key]
        if wanted - sum(size for _, size, _ in idle) > limit:
            raise self._quota(
                "unfinished uploads hold too much", field="upload_bytes", value=wanted, limit=limit
            )
        for _, size, other in idle:
            self._drop(other)
            wanted -= size
            if wanted <= limit:
                return

    def _idle_since_ms(self) -> int:
        partition = self._partition
        return max(partition.replica.wall_ms(), partition.log.last_append_time_ms) - IDLE_MS

    def _drop(self, key: BatchKey) -> None:
        sink, number, epoch = key
        dropped = Participant(self._partition).drop(Batch(sink=sink, number=number, epoch=epoch))
        dropped.add_done_callback(lambda done: done.cancelled() or done.exception())

    def _quota(self, why: str, *, field: str, value: int, limit: int) -> Problem:
        return Problem(
            "quota",
            f"{self._partition.topic}/{self._partition.number}: {why}",
            field=field,
            value=value,
            limit=limit,
            hint="Publish or drop what was begun; an upload without a part for a minute gives way.",
            retry_after_ms=1000,
            outcome="not_applied",
        )

    def _published_already(self, done: PublishedUpload) -> Problem:
        return Problem(
            "already_committed",
            f"this upload is the record at offset {done.offset}: {done.parts} parts, {done.size_bytes} bytes",
            field="upload",
            value=done.offset,
            hint="Another record needs an upload of another name.",
            outcome="not_applied",
        )


async def _check(held: list[Stage], *, size_bytes: int, crc32c: int) -> None:
    size = sum(part.body_bytes for part in held)
    if size != size_bytes:
        raise _refused(
            "the parts together have another size", field="size_bytes", value=size_bytes, limit=size
        )
    found = 0
    lengths = Counter(part.body_bytes for part in held)
    for place, part in enumerate(held):
        length = part.body_bytes
        found = combine(found, part.body_crc, length, often=lengths[length] >= _OFTEN)
        if place % _AT_ONCE == _AT_ONCE - 1:
            await asyncio.sleep(0)
    if found != crc32c:
        raise Problem(
            "bad_checksum",
            f"crc32c mismatch: the parts have {found:08x}, the request says {crc32c:08x}",
            field="crc32c",
            value=f"{crc32c:08x}",
            limit=f"{found:08x}",
            hint="Bytes changed on their way; drop the upload, and begin again.",
            outcome="not_applied",
        )


def _refused(detail: str, *, field: str, value: int, limit: int | None = None) -> Problem:
    return Problem("invalid", detail, field=field, value=value, limit=limit, outcome="not_applied")
