"""The parts of a backup that an import sends, in order: batches of records, and large records.

They are the same in each run of an import, so a second run sends exactly what the first would have sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from laminar.batch import Batch, Buffer, Header, build
from laminar.batch.dated import dated
from laminar.batch.header import HEADER_SIZE, set_producer
from laminar.batch.large_record import CRC_HEADER, SIZE_HEADER, build_stub, checksum_of, size_of
from laminar.checksum import crc32c
from laminar.client.backup.files import READ_BYTES, compare, frames_of, missing
from laminar.client.backup.manifest import (
    LastBatch,
    Manifest,
    PartitionBackup,
    ValueFile,
    value_name,
    wrong,
)
from laminar.client.backup.place import Place

EPOCH = 0


@dataclass(slots=True, frozen=True)
class Part:
    """A part of an import: a batch, or a large record, for the offsets from `first` to `next` (excluded).

    `frame` is the batch to send; `plain_bytes` are the decompressed bytes of its columns. If it
    `has_delivery_time`, the request cannot demand the offset that the batch must get. For a large record
    `value` is the file with its value, and `frame` the stub that stands for it in the new topic, without
    offset and term.
    """

    first: int
    next: int
    frame: bytearray
    plain_bytes: int = 0
    has_delivery_time: bool = False
    value: ValueFile | None = None

    @property
    def body(self) -> memoryview:
        """The bytes of the frame after the header: these are the same when the new topic is read."""
        return memoryview(self.frame)[HEADER_SIZE:]


def parts_of(
    place: Place, partition: PartitionBackup, *, producer_id: bytes, most_bytes: int, most_records: int
) -> Iterator[Part]:
    """Yield all parts of a partition in order; a batch over `most_bytes` decompressed bytes is divided.

    Raises:
        Error: (`damaged`) a file differs from what the export wrote.
    """
    values = {each.offset: each for each in partition.values}
    sequence = 0
    for file in partition.files:
        for frame, header in frames_of(place, file.name, at=file.first_offset):
            batch = Batch(frame, verified=True)
            if batch.is_large:
                yield Part(
                    header.base_offset, header.next_offset, _stub(batch), value=values[batch.base_offset]
                )
                continue
            at = header.base_offset
            for piece in _pieces(dated(frame), most_bytes, most_records):
                set_producer(piece, producer_id=producer_id, epoch=EPOCH, sequence=sequence, keyed=False)
                sequence += 1
                found = Batch(piece, verified=True)
                yield Part(at, at + len(found), piece, plain_bytes(found), found.delivery_times is not None)
                at += len(found)


def plain_bytes(batch: Batch) -> int:
    """Return the size of a batch in bytes with its columns decompressed: at least what a server counts."""
    columns = batch.directory().values()
    return batch.header.frame_size + sum(each.plain_length - each.stored_length for each in columns)


def _pieces(frame: bytearray, most_bytes: int, most_records: int) -> list[bytearray]:
    """Return the batch itself if it is small enough, else its halves, divided further as needed."""
    batch = Batch(frame, verified=True)
    if len(batch) == 1 or (plain_bytes(batch) <= most_bytes and len(batch) <= most_records):
        return [frame]
    middle = len(batch) // 2
    return [
        piece
        for first, past in ((0, middle), (middle, len(batch)))
        for piece in _pieces(_rows(batch, first, past), most_bytes, most_records)
    ]


def _rows(batch: Batch, first: int, past: int) -> bytearray:
    keys, tags, headers = batch.keys, batch.tags, batch.headers
    due, traces = batch.delivery_times, batch.trace_ids
    return build(
        batch.values[first:past],
        keys=keys and keys[first:past],
        timestamps=batch.timestamps[first:past],
        tags=tags and tags[first:past],
        headers=headers and headers[first:past],
        delivery_times=due and due[first:past],
        trace_ids=traces and traces[first:past],
    )


def bare_stub(stub: Buffer) -> bytearray:
    """Return the batch with which an upload of a large record ends: its key, tag, headers and times only."""
    batch = Batch(stub, verified=True)
    return build([b""], **_cells(batch))


def _stub(batch: Batch) -> bytearray:
    cells = _cells(batch)
    return build_stub(
        key=cells["keys"][0],
        tag=cells["tags"][0],
        headers=cells["headers"][0],
        timestamp_ms=cells["timestamps"][0],
        trace_id=cells["trace_ids"][0],
        size_bytes=size_of(batch),
        crc32c=checksum_of(batch),
    )


def _cells(batch: Batch) -> dict[str, Any]:
    record = next(iter(batch))
    headers = {name: cell for name, cell in record.headers.items() if name not in (SIZE_HEADER, CRC_HEADER)}
    return {
        "keys": [record.key],
        "tags": [record.tag],
        "headers": [headers or None],
        "timestamps": [record.timestamp],
        "trace_ids": [record.trace_id],
    }


def check(place: Place, manifest: Manifest) -> None:
    """Read all files of a backup, and compare them with the manifest and the checksums in the records.

    Raises:
        Error: (`damaged`) a file is missing, differs from what the export wrote, or lacks records.
    """
    for partition in manifest.partitions:
        values = {each.offset: each for each in partition.values}
        last: Header | None = None
        for file in partition.files:
            where, at = place.path_of(file.name), file.first_offset
            digest, size = hashlib.sha256(), 0
            try:
                for frame, last in frames_of(place, file.name, at=at):
                    digest.update(frame)
                    size += len(frame)
                    batch, at = Batch(frame, verified=True), last.next_offset
                    if batch.is_large:
                        _check_value(place, values.pop(batch.base_offset, None), batch, partition.partition)
            except FileNotFoundError:
                raise missing(place, file) from None
            compare(place, file, size, digest.hexdigest())
            if at != file.next_offset:
                raise wrong(where, "next_offset", at, file.next_offset)
        if values:
            raise wrong(str(place), "values", sorted(values)[:20], "those of large records")
        found = None
        if last is not None:
            found = LastBatch(last.base_offset, last.index, last.term, f"{last.header_crc:08x}")
        if found != partition.last_batch:
            raise wrong(
                str(place), f"partitions.{partition.partition}.last_batch", found, partition.last_batch
            )


def _check_value(place: Place, value: ValueFile | None, stub: Batch, partition: int) -> None:
    name = value_name(partition, stub.base_offset)
    if value is None:
        raise wrong(place.path_of(name), "file", "missing", f"{size_of(stub)} bytes")
    digest, size, checksum = hashlib.sha256(), 0, 0
    try:
        with place.open(name) as file:
            while data := file.read(READ_BYTES):
                digest.update(data)
                size += len(data)
                checksum = crc32c(data, checksum)
    except FileNotFoundError:
        raise missing(place, value) from None
    compare(place, value, size, digest.hexdigest())
    if (value.bytes, checksum) != (size_of(stub), checksum_of(stub)):
        raise wrong(place.path_of(name), "crc32c", f"{checksum:08x}", f"{checksum_of(stub):08x}")
