"""What must hold of records larger than a batch, seen from outside as everything that `watch` sees.

A publish names parts that are committed before it, in the order of their numbers, and is what its length and
checksum say; an upload is published once.
"""

from __future__ import annotations

from collections import Counter

from crc32c import crc32c

from laminar.batch import HEADER_SIZE, Buffer, Header
from laminar.node.partition.state.staging_entries import LargeRecord, PublishRecord


class UploadLedger:
    """See the module."""

    def __init__(self) -> None:
        # By group and entry: upload, number and bytes of each part.
        self._parts: dict[tuple[str, int], tuple[bytes, int, bytes]] = {}
        self._published: set[tuple[str, bytes]] = set()
        self.happened: Counter[str] = Counter()

    def staged(self, group: str, header: Header, frame: Buffer) -> None:
        """A part is committed."""
        part = (header.producer_id, header.checkpoint, bytes(frame[HEADER_SIZE:]))
        self._parts[(group, header.index)] = part
        self.happened["parts"] += 1

    def published(
        self, who: str, group: str, header: Header, record: PublishRecord, large: LargeRecord
    ) -> list[bytes]:
        """A publish is committed; the value that its readers get."""
        assert header.count == 1, f"{who}: a large record takes {header.count} offsets"
        parts = [self._parts[(group, index)] for index, _ in record.stages]
        expected = [(record.sink, number) for number in range(len(parts))]
        assert [(upload, number) for upload, number, _ in parts] == expected, f"{who}: {record} names {parts}"
        value = b"".join(data for _, _, data in parts)
        assert (len(value), crc32c(value)) == (large.size_bytes, large.crc32c), f"{who}: {large} of {value!r}"
        assert (group, record.sink) not in self._published, f"{who}: {record.sink.hex()} is published again"
        self._published.add((group, record.sink))
        self.happened["large records"] += 1
        return [value]
