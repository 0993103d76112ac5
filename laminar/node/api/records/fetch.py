"""Reads: batches and records of a partition, its bounds, and a replica's digest.

Committed data never changes, so any replica may serve it; but a replica cannot know whether it has all of it.
With `read=leader` the leader answers, after a majority has confirmed that it leads. `min_offset` is an offset
that the client has seen already: a replica that has not reached it waits, or answers with a problem.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from functools import partial

from laminar.batch import BatchError, Buffer, Header, SplitFrame, header_of, whole
from laminar.http.api.deadlines import FORWARDED_READ_S, SECOND_HOP_WAIT_S
from laminar.http.api.documents import records as documents
from laminar.http.api.fetch_body import FetchFormat, check_fields, encode_fetch, fetch_format, shows_long
from laminar.http.api.parameters import MAX_FETCH_BYTES, MAX_FETCH_RECORDS, MAX_WAIT_MS, OFFSET_LIMIT
from laminar.http.api.problems import Problem
from laminar.http.api.timestamps import EARLIEST_MS, format_time, parse_time
from laminar.http.protocol.messages import USUAL_ANSWER_BYTES, Request, Response
from laminar.log.disk.errors import DamagedRange, EntriesTrimmed
from laminar.node.api.common.forwarding import (
    FORWARDED,
    Exchange,
    PassedResponse,
    decode_response,
    encode_passed,
)
from laminar.node.api.common.leader_call import READ, LeaderCall
from laminar.node.api.common.leader_lookup import ReplicaEndpoint
from laminar.node.api.common.query import integer
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.damaged_reads import (
    LOCAL,
    SKIPPED,
    elsewhere,
    problem_of,
    skips,
    without_bad_batches,
)
from laminar.node.partition.partition import Partition
from laminar.node.partition.reads import Bounds, expired
from laminar.node.routes import lineage

DEFAULT_BYTES = 1024 * 1024
# `max_bytes` counts batches as stored. An answer in another format may have this many times that, but 1 MiB
# at least.
_SHOWN = 4
DIGITS = re.compile(r"[0-9]{1,16}\Z", re.ASCII)
ID = re.compile(r"[0-9a-f]{32}\Z", re.ASCII)


def expected_bytes(query: Mapping[str, str]) -> int:
    """Return the maximum size of a fetch's answer, to reserve room for it before its parameters are checked.

    A fetch that waits counts with at least the default size: this bounds the number of waiting fetches of a
    connection, all of which an append would wake at once.
    """
    text = query.get("max_bytes", "")
    asked = int(text) if len(text) < 10 and text.isdecimal() else DEFAULT_BYTES
    least = DEFAULT_BYTES if "wait_ms" in query else USUAL_ANSWER_BYTES
    return min(max(asked, least), MAX_FETCH_BYTES)


def _end_of(headers: Sequence[tuple[str, str]], bounds: Bounds, read: str) -> Sequence[tuple[str, str]]:
    """Return the headers of another replica's answer; for `read=leader` with the end offset confirmed here.

    The other replica may lag: a client that reads up to the end that it names would miss later records.
    """
    if read != "leader":
        return headers
    kept = [(name, value) for name, value in headers if name.lower() != "laminar-end-offset"]
    return [*kept, ("Laminar-End-Offset", str(bounds.end))]


class FetchRoutes:
    """The handlers of a partition's read routes."""

    def __init__(
        self, services: ShardServices, exchange: Exchange, leaders: LeaderCall, topics: TopicLookup
    ) -> None:
        self._services = services
        self._exchange = exchange
        self._leaders = leaders
        self._locator = leaders.locator
        self.topics = topics
        self._identity = [("Laminar-Node", services.node), ("Laminar-Shard", str(services.number))]

    # -- finding a replica ----------------------------------------------------------------

    async def serve_or_pass(
        self, request: Request, topic: str, number: str, *, leader: bool
    ) -> Partition | Response:
        """Return the partition if this shard may serve it, else the answer of a shard that may."""
        try:
            record = self.topics.partition_record(topic, number)
        except Problem as missing:
            raise self._reclaimed(topic, number) or missing from None
        partition = self._services.partitions.get((topic, record.number))
        if partition is not None and (not leader or partition.leads):
            await self._check_id(request, partition)
            return partition
        if LOCAL in request.headers or FORWARDED in request.headers:
            code = "not_leader" if partition is not None else "not_a_replica"
            raise Problem(code, f"{topic}/{number} cannot be served by this node")
        if leader:
            return await self._from_leader(request, topic, record.number)
        problem = Problem("no_leader", f"no replica of {topic}/{number} answers", outcome="not_applied")
        for where in self._locator.replicas(topic, record.number):
            try:
                return await self.pass_on(request, where)
            except Problem as error:
                problem = error
        raise problem

    def _reclaimed(self, topic: str, number: str) -> Problem | None:
        """Return 410 `offset_expired` for a partition that is reclaimed: all of its records have expired."""
        is_number = number.isascii() and number.isdigit() and len(number) <= 9
        record = self._services.view.topics().get(topic)
        seal = lineage.seal_of(record, int(number)) if record is not None and is_number else None
        if seal is None:
            return None
        detail = f"{topic}/{number} ended at {seal.end_offset}, and is reclaimed"
        return Problem("offset_expired", detail, field="offset", value=None, limit=seal.end_offset)

    async def past_the_end(self, request: Request, served: Partition) -> Partition | Response:
        """Return the leader's answer to a read past the end of this replica, which may just lag behind.

        If this shard leads, return the partition. A request that another shard forwarded is forwarded once
        more, to the leader, and then no further.
        """
        if served.leads:
            return served
        topic, number = served.topic, served.number
        if FORWARDED not in request.headers:
            return await self._from_leader(request, topic, number)
        if request.headers[FORWARDED] != "1":
            raise Problem("not_leader", f"{topic}/{number} is not led here", outcome="not_applied")
        where = await self._locator.leader(topic, number, wait_s=SECOND_HOP_WAIT_S)
        here = self._services.partitions.get((topic, number))
        return here if here is not None and here.leads else await self.pass_on(request, where)

    async def _check_id(self, request: Request, partition: Partition) -> None:
        """Refuse a request with an `id` other than this partition's: 410 if that was deleted, else 503."""
        wanted = request.query.get("id")
        if wanted is None or wanted == partition.replica.group.hex():
            return
        if not ID.match(wanted):
            raise Problem("invalid", "id must be 32 hexadecimal digits", field="id", value=wanted, limit=32)
        await self._services.refresh_view()
        record = self.topics.partition_record(partition.topic, str(partition.number))
        named = f"{partition.topic}/{partition.number}"
        if record.group.hex() == wanted:
            raise Problem("not_a_replica", f"this node has not opened its replica of {named} yet")
        raise Problem(
            "partition_recreated",
            f"{named} of id {wanted} was deleted, and {named} was created again",
            field="id",
            value=wanted,
            limit=record.group.hex(),
        )

    async def led(self, request: Request, topic: str, partition: str) -> Partition | Response:
        """Return the partition if this shard leads it, else the leader's answer to the request.

        Use it only for requests that may be repeated.
        """
        return await self.serve_or_pass(request, topic, partition, leader=True)

    async def _from_leader(self, request: Request, topic: str, number: int) -> Partition | Response:
        """Return the partition if this shard leads it, else the leader's answer to the request."""

        async def here(partition: Partition) -> Partition | Response:
            await self._check_id(request, partition)
            return partition

        async def there(where: ReplicaEndpoint) -> Partition | Response:
            response = await self.pass_on(request, where)
            response.headers = [*response.headers, ("Laminar-Leader", where.url)]
            return response

        return await self._leaders(topic, number, here=here, there=there, policy=READ)

    async def pass_on(self, request: Request, where: ReplicaEndpoint) -> Response:
        """Return the answer of another shard to the request."""
        wait_s = integer(request, "wait_ms", 0, maximum=MAX_WAIT_MS) / 1000
        passed: PassedResponse = await self._exchange.ask(
            where.address,
            "http",
            encode_passed(request),
            kind=PassedResponse,
            timeout_s=FORWARDED_READ_S + wait_s,
        )
        return decode_response(passed)

    # -- records --------------------------------------------------------------------------

    async def records(self, request: Request, topic: str, partition: str) -> Response:
        """Answer GET /v1/topics/{topic}/partitions/{partition}/records with records from an offset on."""
        query = request.query
        read = query.get("read", "replica")
        if read not in ("replica", "leader"):
            raise Problem("invalid", "read must be `replica` or `leader`", field="read", value=read)
        format_ = fetch_format(request)
        check_fields(query.get("fields"), format_)
        skip = skips(request)
        max_bytes = integer(request, "max_bytes", DEFAULT_BYTES, minimum=1, maximum=MAX_FETCH_BYTES)
        limit = integer(request, "limit", MAX_FETCH_RECORDS, minimum=1, maximum=MAX_FETCH_RECORDS)
        wait_s = integer(request, "wait_ms", 0, maximum=MAX_WAIT_MS) / 1000
        to = integer(request, "to", OFFSET_LIMIT, maximum=OFFSET_LIMIT)
        seen = integer(request, "min_offset", 0, maximum=OFFSET_LIMIT)
        served = await self.serve_or_pass(request, topic, partition, leader=read == "leader")
        if isinstance(served, Response):
            return served
        deadline = asyncio.get_running_loop().time() + wait_s
        bounds = await self._catch_up(served, read, seen, deadline)
        offset = await self._offset(request, served, bounds)
        found = [] if query.get("offset") == str(offset) else [("Laminar-Offset", str(offset))]
        checked = await self._check_bounds(request, served, bounds, offset)
        if isinstance(checked, Response):
            return checked
        bounds = checked
        if offset >= bounds.end and wait_s:
            await served.reader.wait_past(offset, max(0.0, deadline - asyncio.get_running_loop().time()))
            bounds = served.reader.bounds()
        tag = query.get("tag")
        frames: Sequence[Buffer | SplitFrame] = []
        examined_to = 0
        skipped: list[str] = []
        limited = min(to, offset + limit) < bounds.end
        to = min(to, bounds.end)
        most_bytes = min(max(_SHOWN * max_bytes, DEFAULT_BYTES), MAX_FETCH_BYTES)
        answered = partial(
            self._answer, request, served, bounds, format_, to=to, limit=limit, tag=tag, most_bytes=most_bytes
        )

        def shown(some: Sequence[Buffer], offset: int) -> object:
            return encode_fetch(
                format_, some, offset=offset, wanted=query.get("fields"), to=to, limit=limit, tag=tag
            )

        while offset < to:
            try:
                if tag is None:
                    before = min(to, offset + limit) if limited else None
                    frames = await served.reader.split_frames(offset, max_bytes=max_bytes, before=before)
                else:
                    frames, examined_to = await served.reader.tagged_frames(
                        offset, tag=tag, max_bytes=max_bytes
                    )
            except DamagedRange as damage:
                response = await self.elsewhere(request, served, offset)
                if response is not None:
                    if skipped:
                        found.append((SKIPPED, ",".join(skipped)))
                    response.headers = [*_end_of(response.headers, bounds, read), *found]
                    return response
                if not skip:
                    raise problem_of(damage, served, node=self._services.node, offset=offset) from damage
                skipped.append(f"{max(offset, damage.first_offset)}-{damage.next_offset - 1}")
                offset = damage.next_offset
                continue
            try:
                response = await answered(frames, offset=offset, examined_to=examined_to)
            except BatchError:
                frames, offset, bad = await self._services.off_loop(
                    partial(without_bad_batches, list(map(whole, frames)), offset, read=shown, skip=skip)
                )
                skipped += bad
                if frames:
                    examined_to = Header.unpack(header_of(frames[-1])).next_offset
                    response = await answered(frames, offset=offset, examined_to=examined_to)
                    break
            else:
                break
        else:
            response = await answered([], offset=offset, examined_to=0)
        if skipped:
            found.append((SKIPPED, ",".join(skipped)))
        if found:
            response.headers = [*response.headers, *found]
        return response

    async def elsewhere(self, request: Request, partition: Partition, offset: int | None) -> Response | None:
        """Return another replica's answer to a read of records that are damaged here; None without one."""
        own = self._services.view.partition_url(self._services.node, partition.topic, partition.number)
        others = [
            where for where in self._locator.replicas(partition.topic, partition.number) if where.url != own
        ]
        return await elsewhere(request, offset, others, self.pass_on)

    async def _catch_up(self, partition: Partition, read: str, seen: int, deadline: float) -> Bounds:
        """Wait until this replica has all before `seen`, the request's `min_offset`; return its bounds then.

        Raises:
            Problem: 503 `replica_lagging` if it does not get there in time.
        """
        reader = partition.reader
        bounds = await reader.confirmed_bounds() if read == "leader" else reader.bounds()
        if bounds.end >= seen:
            return bounds
        remaining = max(0.0, deadline - asyncio.get_running_loop().time())
        if not await reader.wait_past(seen - 1, remaining):
            raise self._behind(partition, "min_offset", seen)
        return reader.bounds()

    def _behind(self, partition: Partition, field: str, offset: int) -> Problem:
        """Return 503 `replica_lagging`, which names the leader if this replica knows another one."""
        node = partition.replica.leader_node
        ahead = ""
        headers = []
        if not partition.leads and node is not None:
            ahead = f"; {node} leads"
            where = self._locator.where(node, partition.topic, partition.number)
            headers = [("Laminar-Leader", where.url)] if where is not None else []
        return Problem(
            "replica_lagging",
            f"this replica ends at {partition.end_offset}{ahead}",
            field=field,
            value=offset,
            limit=partition.end_offset,
            retry_after_ms=50,
            headers=headers,
        )

    async def _offset(self, request: Request, partition: Partition, bounds: Bounds) -> int:
        text = request.query.get("offset")
        since = request.query.get("since")
        if since is not None:
            if text is not None:
                raise Problem("invalid", "offset and since exclude each other", field="since", value=since)
            return (await partition.reader.at_time(bounds, parse_time(since, field="since")))[0]
        if text is None or text == "earliest":
            return bounds.start
        if text == "latest":
            return bounds.end
        if not DIGITS.match(text) or int(text) >= OFFSET_LIMIT:
            raise Problem(
                "invalid",
                "offset must be a number, `earliest` or `latest`",
                field="offset",
                value=text,
                limit=OFFSET_LIMIT,
            )
        return int(text)

    async def _check_bounds(
        self, request: Request, partition: Partition, bounds: Bounds, offset: int
    ) -> Response | Bounds:
        """Refuse an offset before the start (410) or past the end (416); return the bounds otherwise.

        Only the leader knows the end: for an offset past this replica's end, its answer is returned.
        """
        if offset > bounds.end:
            bounds = partition.reader.bounds()  # more may be committed since they were taken
        if offset < bounds.start:
            raise expired(partition.context, offset)
        if offset <= bounds.end:
            return bounds
        if not partition.leads and LOCAL in request.headers:
            raise self._behind(partition, "offset", offset)
        led = await self.past_the_end(request, partition)
        if isinstance(led, Response):
            return led
        end = await led.reader.confirmed_end()
        if offset > end:
            raise Problem(
                "offset_beyond_end", f"the partition ends at {end}", field="offset", value=offset, limit=end
            )
        return partition.reader.bounds()

    async def _answer(
        self,
        request: Request,
        partition: Partition,
        bounds: Bounds,
        format_: FetchFormat,
        frames: Sequence[Buffer | SplitFrame],
        *,
        offset: int,
        to: int,
        limit: int,
        tag: str | None,
        examined_to: int,
        most_bytes: int,
    ) -> Response:
        wanted = request.query.get("fields")
        encode = partial(
            encode_fetch,
            format_,
            frames,
            offset=offset,
            to=to,
            limit=limit,
            tag=tag,
            wanted=wanted,
            examined_to=examined_to,
            most_bytes=most_bytes,
        )
        long = shows_long(format_, frames, wanted)
        fetched = await self._services.off_loop(encode) if long else encode()
        headers = [
            ("Content-Type", fetched.content_type),
            *self.place(partition, bounds, fetched.next_offset),
        ]
        return Response(200, headers, fetched.body)

    def place(self, partition: Partition, bounds: Bounds, next_offset: int) -> list[tuple[str, str]]:
        """Return the headers of an answer with records: the replica that served it, route and bounds.

        `Laminar-Sealed` says that no record follows `next_offset` in this partition.
        """
        end = partition.final_end
        return [
            *([("Laminar-Sealed", str(end))] if end is not None and next_offset >= end else []),
            *self._identity,
            ("Laminar-Route", str(self.topics.version(partition.topic))),
            ("Laminar-Start-Offset", str(bounds.start)),
            ("Laminar-End-Offset", str(bounds.end)),
            ("Laminar-Next-Offset", str(next_offset)),
        ]

    # -- bounds and digests -----------------------------------------------------------------

    async def offsets(self, request: Request, topic: str, partition: str) -> Response:
        """Answer GET .../offsets?at=earliest|latest|TIME; confirmed by a majority unless read=replica."""
        read = request.query.get("read", "leader")
        if read not in ("replica", "leader"):
            raise Problem("invalid", "read must be `replica` or `leader`", field="read", value=read)
        served = await self.serve_or_pass(request, topic, partition, leader=read == "leader")
        if isinstance(served, Response):
            return served
        reader = served.reader
        bounds = await reader.confirmed_bounds() if read == "leader" else reader.bounds()
        at = request.query.get("at", "latest")
        if at == "latest":
            offset, timestamp_ms = bounds.end, None
        else:
            time_ms = EARLIEST_MS if at == "earliest" else parse_time(at, field="at")
            offset, timestamp_ms = await reader.at_time(bounds, time_ms)
            bounds = reader.bounds()  # the start may have moved while the search waited for the disk
        return Response.json(
            documents.Offsets(
                offset,
                format_time(timestamp_ms) if timestamp_ms is not None else None,
                bounds.start,
                bounds.end,
            ),
            headers=self.place(served, bounds, offset),
        )

    async def digest(self, request: Request, topic: str, partition: str) -> Response:
        """Answer GET .../digest?to_index=N|committed: SHA-256 of the committed log, byte for byte."""
        served = await self.serve_or_pass(request, topic, partition, leader=False)
        if isinstance(served, Response):
            return served
        text = request.query.get("to_index", "committed")
        last = served.committed_index
        if text != "committed":
            last = integer(request, "to_index", last, maximum=served.committed_index)
        while True:
            start_index = served.log.start.index
            try:
                digest = await served.log.digest(max(last, start_index))
                break
            except EntriesTrimmed:
                continue  # the start moved meanwhile: the rest of the log has another digest
            except DamagedRange as damage:
                node = self._services.node
                raise problem_of(damage, served, node=node, offset=damage.first_offset) from damage
        return Response.json(
            documents.Digest(
                node=self._services.node,
                committed_index=served.committed_index,
                last_index=served.log.last_index,
                term=served.replica.core.term,
                to_index=last,
                start_index=start_index,
                digest=digest,
                segments=[
                    documents.SealedSegment(first, sealed.last_index, sealed.digest.hex())
                    for first, sealed in sorted(served.log.quarantine.sealed.items())
                    if sealed.last_index <= last and sealed.digest
                ],
            )
        )
