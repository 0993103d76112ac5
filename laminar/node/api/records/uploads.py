"""Uploads of records larger than a request: the client sends the parts one by one, then publishes the record.

The client chooses the name of the upload, which is its idempotency key: each step may be repeated, at any
node. The partition's leader carries the steps out (`laminar.node.transactions.uploads`); no coordinator is
involved.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from laminar.batch import build_part
from laminar.batch.large_record import CRC_HEADER, SIZE_HEADER, build_stub
from laminar.http.api.append_body import parse_append, records_of
from laminar.http.api.documents import records as documents
from laminar.http.api.limits import Limits
from laminar.http.api.parameters import MAX_NUMBER, MAX_UPLOAD_PARTS
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import owner_of
from laminar.node.api.common.forwarding import FORWARDED
from laminar.node.api.common.leader_call import STEP, LeaderCall
from laminar.node.api.common.leader_lookup import ReplicaEndpoint
from laminar.node.api.common.makers import maker_of
from laminar.node.api.common.query import integer
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.background_decoding import client_of, source_of
from laminar.node.api.records.damaged_reads import LOCAL
from laminar.node.api.records.fetch import FetchRoutes
from laminar.node.api.records.stale_routes import StaleRoutes, has_keys, route_said
from laminar.node.partition.partition import Partition
from laminar.node.transactions.uploads import Uploads, id_of

_CHECKSUM = re.compile(r"[0-9a-f]{8}\Z", re.ASCII)


class UploadRoutes:
    """The handlers of uploads of large records."""

    def __init__(
        self,
        services: ShardServices,
        leaders: LeaderCall,
        topics: TopicLookup,
        fetch: FetchRoutes,
        *,
        limits: Limits,
    ) -> None:
        self._services = services
        self._leaders = leaders
        self._topics = topics
        self._stale = StaleRoutes(topics)
        self._fetch = fetch
        self._limits = limits

    def _uploads(self, led: Partition) -> Uploads:
        return Uploads(led, max_bytes=self._services.settings.max_upload_bytes)

    async def part(self, request: Request, topic: str, partition: str, upload: str, part: str) -> Response:
        """Answer PUT .../uploads/{upload}/parts/{part}: the body is the part, of any content type."""
        number = int(part)
        if not request.body:
            raise Problem("invalid", "a part must have at least one byte", field="body", value=0, limit=1)
        if number >= MAX_UPLOAD_PARTS:
            raise Problem(
                "invalid",
                "the number of the part is too high",
                field="part",
                value=number,
                limit=MAX_UPLOAD_PARTS - 1,
            )

        async def here(led: Partition) -> Response:
            frame = build_part(request.body, upload=id_of(upload), number=number)
            maker = maker_of(self._services.view, owner_of(request), "uploads")
            async with self._services.bulk.share(client_of(request), len(frame), source_of(request)):
                receipt = await self._uploads(led).part(id_of(upload), frame, maker)
            answer = documents.UploadedPart(upload, number, len(request.body))
            return _answer(answer, [], again=receipt.duplicate)

        return await self._at_leader(request, topic, partition, here)

    async def publish(self, request: Request, topic: str, partition: str, upload: str) -> Response:
        """Answer POST .../uploads/{upload}?parts=&size_bytes=&crc32c=: append the record.

        The body is the record, without its value.
        """
        for name in ("parts", "size_bytes", "crc32c"):
            if name not in request.query:
                raise Problem("invalid", f"the query parameter {name} is required", field=name)
        parts = integer(request, "parts", 1, minimum=1, maximum=MAX_UPLOAD_PARTS)
        size_bytes = integer(request, "size_bytes", 1, minimum=1, maximum=MAX_NUMBER)
        checksum = request.query["crc32c"]
        if not _CHECKSUM.match(checksum):
            raise Problem(
                "invalid",
                "a CRC-32C must be 8 hexadecimal digits",
                field="crc32c",
                value=checksum,
                limit="[0-9a-f]{8}",
            )
        said = route_said(request.headers)
        stub = self._stub(request, size_bytes, int(checksum, 16))

        async def here(led: Partition) -> Response:
            published = led.state.stages.upload(id_of(upload)) is not None
            if self._stale.matter(led) and not published and has_keys(stub):
                self._stale.check(led, said)
            receipt = await Uploads(led).publish(
                id_of(upload), parts=parts, size_bytes=size_bytes, crc32c=int(checksum, 16), stub=stub
            )
            flush = led.log.policy.name
            answer = documents.Appended(
                1,
                [documents.Placed(led.number, receipt.offset, 1)],
                documents.Durability(led.replicas, flush == "commit", flush),
            )
            place = f"/v1/topics/{topic}/partitions/{led.number}/records/{receipt.offset}"
            return _answer(answer, [("Location", place)], again=receipt.duplicate)

        return await self._at_leader(request, topic, partition, here)

    async def drop(self, request: Request, topic: str, partition: str, upload: str) -> Response:
        """Answer DELETE .../uploads/{upload}: 204 also if there is no such upload, or it was published."""

        async def here(led: Partition) -> Response:
            await Uploads(led).drop(id_of(upload))
            return Response(204)

        return await self._at_leader(request, topic, partition, here)

    def _stub(self, request: Request, size_bytes: int, checksum: int) -> bytes:
        """Return the stub batch that stands for the record in the log, made from the request's body.

        The body is like that of an append with one record and an empty value.

        Raises:
            Problem: 4xx if the body is not one record with an empty value.
        """
        append = parse_append(request, limits=self._limits, now_ms=self._services.clock.wall_ms)
        records = append.records
        if records is None:
            records = records_of(append.frames)
        if len(records) != 1:
            raise Problem(
                "invalid", "an upload must be one record", field="records", value=len(records), limit=1
            )
        if len(records.values[0]):
            raise Problem(
                "invalid",
                "the value must be in the parts, not in this body",
                field="value",
                value=len(records.values[0]),
                limit=0,
            )
        if records.delivery_times is not None:
            raise Problem(
                "invalid",
                "a record that is larger than a batch cannot be delayed",
                field="deliver_at",
                value=records.delivery_times[0],
            )
        headers = records.headers[0] if records.headers else None
        for name in (SIZE_HEADER, CRC_HEADER):
            if headers and name in headers:
                raise Problem("invalid", "this header is reserved", field="headers", value=name)
        stub = build_stub(
            key=records.keys[0] if records.keys else None,
            tag=records.tags[0] if records.tags else None,
            headers=headers,
            timestamp_ms=records.timestamps[0] if records.timestamps else None,
            trace_id=records.trace_ids[0] if records.trace_ids else None,
            size_bytes=size_bytes,
            crc32c=checksum,
        )
        return bytes(stub)

    async def _at_leader(
        self,
        request: Request,
        topic: str,
        partition: str,
        here: Callable[[Partition], Awaitable[Response]],
    ) -> Response:
        number = self._topics.partition_record(topic, partition).number
        if FORWARDED in request.headers or LOCAL in request.headers:
            return await here(self._leaders.led_here(topic, number))

        async def there(where: ReplicaEndpoint) -> Response:
            return await self._fetch.pass_on(request, where)

        return await self._leaders(topic, number, here=here, there=there, policy=STEP)


def _answer(document: object, headers: list[tuple[str, str]], *, again: bool) -> Response:
    if again:
        headers = [*headers, ("Laminar-Replayed", "1")]
    return Response.json(document, status=201, headers=headers)
