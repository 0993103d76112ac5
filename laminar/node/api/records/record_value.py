"""The route of one record: its raw value as the body, its other fields as headers.

The value of a large record (larger than a batch) is read from its parts. Each is read, verified and written
as fast as the client takes it, so any size costs the memory of one part; `Range` selects some bytes of the
value. Shards exchange only whole answers, so the shard that the client asked fetches a large value from
another shard in pieces, one by one.
"""

from __future__ import annotations

import asyncio
import re
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from laminar.batch import HEADER_SIZE, Batch, BatchError, Buffer, Header, Kind, body_of
from laminar.batch.large_record import CRC_HEADER, SIZE_HEADER
from laminar.http.api.parameters import OFFSET_LIMIT
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import format_time
from laminar.http.protocol.messages import Request, Response
from laminar.http.protocol.request_head import RequestHead
from laminar.log.disk.errors import DamagedRange, EntriesTrimmed
from laminar.node.api.common.forwarding import FORWARDED
from laminar.node.api.common.leader_lookup import Locator
from laminar.node.api.common.services import ShardServices
from laminar.node.api.records.damaged_reads import problem_of, unreadable
from laminar.node.api.records.fetch import DIGITS, FetchRoutes
from laminar.node.partition.partition import Partition
from laminar.node.partition.reads import expired
from laminar.node.partition.state.staging_entries import LargeRecord, publish_record

# The most bytes of a value in one write to the client, and in one answer between shards.
PIECE_BYTES = 256 * 1024
PASSED_BYTES = 1024 * 1024
# Bounds of an answer's head, below the limits of common clients: Python's http.client takes 100 fields, and
# 64 KiB a line.
HEAD_BYTES = 32 << 10
HEAD_FIELDS = 80
# How many large records' parts are cached.
KNOWN_PARTS = 8
# The header of an answer that another shard forwarded only in part: the range of bytes that follows.
_REST = "laminar-rest"
_RANGE = re.compile(r"bytes=([0-9]{0,16})-([0-9]{0,16})\Z", re.ASCII)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a large record: their log entries, and for each the position in the value after it."""

    indexes: Sequence[int]
    ends: Sequence[int]
    record: LargeRecord


class RecordValueRoutes:
    """The handler that serves one record's value."""

    def __init__(self, services: ShardServices, fetch: FetchRoutes, locator: Locator) -> None:
        self._services = services
        self._fetch = fetch
        self._locator = locator
        # By group, partition and offset: the parts of the large records read lately. A cache, because a
        # client may read a record by many ranges. Committed data never changes.
        self._parts: OrderedDict[tuple[bytes, int, int], Parts] = OrderedDict()

    async def value(self, request: Request, topic: str, partition: str, offset: str) -> Response:
        """Answer GET /v1/topics/{topic}/partitions/{partition}/records/{offset}: one value, raw."""
        if not DIGITS.match(offset) or int(offset) >= OFFSET_LIMIT:
            raise Problem(
                "invalid", "an offset must be a number", field="offset", value=offset, limit=OFFSET_LIMIT
            )
        served = await self._fetch.serve_or_pass(request, topic, partition, leader=False)
        if isinstance(served, Response):
            return self._whole(request, served, topic, int(partition))
        wanted = int(offset)
        if wanted >= served.end_offset and not served.leads:
            served_by_leader = await self._fetch.past_the_end(request, served)
            if isinstance(served_by_leader, Response):
                return self._whole(request, served_by_leader, topic, int(partition))
            served = served_by_leader
        if wanted < served.start_offset:
            raise expired(served.context, wanted)
        if wanted >= served.end_offset and served.leads:
            # a deposed leader that has not noticed would answer that the record does not exist
            await served.reader.confirmed_end()
        if wanted >= served.end_offset:
            raise Problem(
                "no_such_record",
                f"the partition ends at {served.end_offset}",
                field="offset",
                value=wanted,
                limit=served.end_offset,
            )
        # With the group, because a topic may be deleted and created again under the same name.
        etag = f'"{served.replica.group.hex()}/{wanted}"'
        always = [
            ("ETag", etag),
            ("Cache-Control", "immutable"),
            *self._fetch.place(served, served.reader.bounds(), wanted + 1),
        ]
        if etag in request.headers.get("if-none-match", ""):
            return Response(304, always)
        try:
            frames = await served.reader.frames(wanted, max_bytes=1)
            batch = Batch(frames[0], verified=True)
            if not batch.is_large:
                return _small(batch, wanted, always)
            return await self._large(request, served, batch, wanted, always)
        except EntriesTrimmed:
            raise expired(served.context, wanted) from None
        except DamagedRange as damage:
            response = await self._fetch.elsewhere(request, served, None)
            if response is not None:
                return self._whole(request, response, topic, int(partition))
            raise problem_of(damage, served, node=self._services.node, offset=wanted) from damage
        except BatchError as error:
            raise unreadable(error, Header.unpack(frames[0])) from error

    # -- large records ---------------------------------------------------------------------

    async def _large(
        self,
        request: Request,
        partition: Partition,
        stub: Batch,
        offset: int,
        always: list[tuple[str, str]],
    ) -> Response:
        parts = await self._parts_of(partition, offset)
        size = parts.record.size_bytes
        headers = [
            *_described(stub, offset),
            *always,
            ("Accept-Ranges", "bytes"),
            ("Laminar-Large", str(size)),
            ("Laminar-Crc32c", f"{parts.record.crc32c:08x}"),
        ]
        wanted = _range(request, size, etag=always[0][1])
        status, (start, stop) = 200, wanted or (0, size)
        if wanted is not None:
            status = 206
            headers.append(("Content-Range", f"bytes {start}-{stop - 1}/{size}"))
        if request.method == "HEAD" and FORWARDED not in request.headers:
            return Response(status, headers, pieces(partition, parts, 0, 0), length=stop - start)
        if FORWARDED in request.headers:
            some = min(stop, start + PASSED_BYTES) if request.method != "HEAD" else start
            headers.append((_REST, f"{some}-{stop}"))
            return Response(status, headers, [piece async for piece in pieces(partition, parts, start, some)])
        body = pieces(partition, parts, start, stop)
        # Read the first part now: if it is damaged, another replica can still be asked.
        first = await anext(body)
        return Response(status, headers, _chained(first, body), length=stop - start)

    async def _parts_of(self, partition: Partition, offset: int) -> Parts:
        key = (partition.replica.group, partition.number, offset)
        parts = self._parts.pop(key, None) or await find_parts(partition, offset)
        self._parts[key] = parts
        if len(self._parts) > KNOWN_PARTS:
            self._parts.popitem(last=False)
        return parts

    def _whole(self, request: Request, passed: Response, topic: str, number: int) -> Response:
        """Return another shard's answer; further pieces of a large record are fetched while it is sent."""
        rest = next((value for name, value in passed.headers if name == _REST), None)
        if rest is None:
            return passed
        passed.headers = [(name, value) for name, value in passed.headers if name != _REST]
        start, stop = map(int, rest.split("-"))
        assert isinstance(passed.body, (bytes, bytearray, memoryview)), "what was passed on is joined"
        passed.length = len(passed.body) + stop - start
        passed.body = self._passed(request, passed.body, topic, number, start, stop)
        return passed

    async def _passed(
        self, request: Request, first: Buffer, topic: str, number: int, start: int, stop: int
    ) -> AsyncIterator[Buffer]:
        yield first
        while start < stop:
            end = min(stop, start + PASSED_BYTES)
            headers = {**request.headers, "range": f"bytes={start}-{end - 1}"}
            headers.pop("if-range", None)
            head = RequestHead("GET", request.target, headers)
            asked = Request(head, b"", request.connection)
            problem = Problem("no_leader", f"no replica of {topic}/{number} answers")
            for where in self._locator.replicas(topic, number):
                try:
                    answer = await self._fetch.pass_on(asked, where)
                except Problem as error:
                    problem = error
                    continue
                if answer.status == 206:
                    break
            else:
                raise problem
            assert isinstance(answer.body, (bytes, bytearray, memoryview)), "what was passed on is joined"
            if len(answer.body) != end - start:
                raise Problem(
                    "internal_error", f"{len(answer.body)} bytes of {start} to {end} of {request.target}"
                )
            yield answer.body
            start = end


async def find_parts(partition: Partition, offset: int) -> Parts:
    """Return the parts of the large record at an offset.

    Raises:
        EntriesTrimmed: the log was trimmed past them.
        DamagedRange: one of them is damaged.
    """
    index = await partition.log.find_offset(offset)
    if index is None:
        raise EntriesTrimmed(f"offset {offset} of {partition.log.name} is trimmed")
    record = publish_record((await partition.log.read_promptly(index, index, max_bytes=1))[0])
    assert record.large is not None, f"{partition.log!r}: the record at {offset} is no large one"
    return Parts(
        [part for part, _ in record.stages], list(accumulate(size for _, size in record.stages)), record.large
    )


async def pieces(partition: Partition, parts: Parts, start: int, stop: int) -> AsyncIterator[Buffer]:
    """Yield the bytes from `start` to `stop` of a large value, one verified part in memory at a time.

    Raises:
        EntriesTrimmed: the log was trimmed past a part.
        DamagedRange: a part is damaged.
    """
    for place in range(bisect_right(parts.ends, start), len(parts.ends)):
        part_start, part_stop = parts.ends[place - 1] if place else 0, parts.ends[place]
        if part_start >= stop:
            break
        # One entry at a time, so that nothing is read ahead of a reader that may be slow.
        index, size = parts.indexes[place], part_stop - part_start
        frame = (await partition.log.read_promptly(index, index, max_bytes=size))[0]
        header = Header.unpack(frame)
        assert (header.kind, header.frame_size) == (Kind.STAGED, HEADER_SIZE + size), (
            f"{partition.log!r}: entry {index} is {header}, not a part of {size} bytes"
        )
        first, end = max(start, part_start), min(stop, part_stop)
        partition.reader.fetched_bytes += end - first
        view = body_of(frame)
        for position in range(first, end, PIECE_BYTES):
            yield view[position - part_start : min(end, position + PIECE_BYTES) - part_start]
        # Reading from memory does not yield to the loop, so yield between parts.
        await asyncio.sleep(0)


async def _chained(first: Buffer, rest: AsyncIterator[Buffer]) -> AsyncIterator[Buffer]:
    yield first
    async for piece in rest:
        yield piece


def _range(request: Request, size: int, *, etag: str) -> tuple[int, int] | None:
    """Return the requested range of bytes (first, one after the last); None for all (RFC 9110, 14.2).

    Several ranges, and an invalid one, are answered with the whole value.

    Raises:
        Problem: 416.
    """
    found = _RANGE.match(request.headers.get("range", ""))
    if found is None or request.headers.get("if-range", etag) != etag or found[0] == "bytes=-":
        return None
    if not found[1]:
        start, stop = max(0, size - int(found[2])), size
    else:
        start, stop = int(found[1]), min(size, int(found[2]) + 1) if found[2] else size
        if found[2] and int(found[2]) < start:
            return None
    if start >= stop:
        raise Problem(
            "range_not_satisfiable",
            field="range",
            value=request.headers["range"],
            limit=size,
            headers=[("Content-Range", f"bytes */{size}")],
        )
    return start, stop


def _small(batch: Batch, offset: int, always: list[tuple[str, str]]) -> Response:
    return Response(
        200,
        [*_described(batch, offset), *always],
        bytes(batch.value(offset - batch.base_offset)),
    )


def _described(batch: Batch, offset: int) -> list[tuple[str, str]]:
    """Return the fields of a record other than its value as headers, within the limits of HTTP clients.

    The header `Laminar-Left-Out` names fields that did not fit; a fetch returns these.
    """
    record = next(batch.records(offset, offset + 1))
    headers = [
        ("Content-Type", "application/octet-stream"),
        # a browser then saves the value as a file, and does not show it as a page
        ("Content-Disposition", "attachment"),
        ("Laminar-Timestamp", format_time(record.timestamp)),
    ]
    left_out: dict[str, None] = {}
    room = HEAD_BYTES

    def put(what: str, name: bytes, raw: bytes) -> None:
        """Add a header if there is room for it; escaping makes it longer."""
        nonlocal room
        if len(name) + len(raw) <= room and len(headers) < HEAD_FIELDS:
            shown = (_visible(name), _visible(raw))
            if len(shown[0]) + len(shown[1]) <= room:
                room -= len(shown[0]) + len(shown[1])
                headers.append(shown)
                return
        left_out[what] = None

    if record.tag is not None:
        put("tag", b"Laminar-Tag", record.tag.encode())
    if record.key is not None:
        put("key", b"Laminar-Key", record.key)
    for name, value in (record.headers or {}).items():
        if not batch.is_large or name not in (SIZE_HEADER, CRC_HEADER):
            put("headers", f"Laminar-Header-{name}".encode(), value)
    if left_out:
        headers.append(("Laminar-Left-Out", ", ".join(left_out)))
    return headers


def _visible(raw: bytes | bytearray | memoryview) -> str:
    """Return bytes as the value of a header: printable ASCII, the rest percent-encoded."""
    return "".join(
        chr(byte) if 0x20 < byte < 0x7F and byte != 0x25 else f"%{byte:02X}" for byte in bytes(raw)
    )
