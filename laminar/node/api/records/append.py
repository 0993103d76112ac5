"""Appends: to a partition, or to a topic whose partitions this shard chooses by key.

The usual path makes no task: the leader's shard decodes the body, hands the records to the partition and
answers when the future of their receipt resolves. Everything else (another leader, an election in progress, a
body for several partitions) goes through a coroutine.

A request is passed on only while it cannot have been carried out yet. Once it may have been, the answer is
504 `outcome_unknown`, unless the batches carry a producer id or a key, which makes a second attempt harmless.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence

import msgspec

from laminar.batch import BATCH_TYPE, Header, build
from laminar.http.api import documents
from laminar.http.api.append_body import Append, all_marked, parse_append, records_of
from laminar.http.api.deadlines import FORWARDED_APPEND_S
from laminar.http.api.problems import Problem
from laminar.http.api.records import Limits, Records
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.common.answer_head import AnswerHead
from laminar.node.api.common.attempts import merge_receipts
from laminar.node.api.common.forwarding import (
    FORWARDED,
    KEYED,
    PART,
    PLAIN,
    Exchange,
    Forwarder,
    PassedRequest,
    PassedResponse,
    decode_response,
    encode_passed,
)
from laminar.node.api.common.leader_call import LeaderCall, append_policy
from laminar.node.api.common.leader_lookup import ReplicaEndpoint
from laminar.node.api.common.query import integer
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.ack_accepted import FLUSH, accepted, window_headers
from laminar.node.api.records.background_decoding import BackgroundDecoding
from laminar.node.api.records.idempotency import (
    KEY_TIME,
    BatchIdentity,
    build_identified,
    has_identity,
    identified,
    identity_of,
    named,
)
from laminar.node.api.records.stale_routes import StaleRoutes, route_said
from laminar.node.partition.deduplication import is_duplicate
from laminar.node.partition.flush_policy import policy_of
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route, logical_of_key

_PART_GROWS = 3
_CONDITION = re.compile(r'"?([0-9]{1,16})"?\Z', re.ASCII)


class AppendRoutes:
    """The handlers of the two append routes."""

    def __init__(
        self,
        services: ShardServices,
        exchange: Exchange,
        leaders: LeaderCall,
        topics: TopicLookup,
        *,
        limits: Limits,
    ) -> None:
        self._services = services
        self._exchange = exchange
        self._leaders = leaders
        self._topics = topics
        self.limits = limits
        # The limits for a part of a topic's append. The whole was within the limits when it came; but as a
        # batch it can be larger than as records, for example because keys were fields of their values.
        self._part_limits = msgspec.structs.replace(
            limits,
            max_body_bytes=_PART_GROWS * limits.max_body_bytes,
            max_record_bytes=_PART_GROWS * limits.max_record_bytes,
        )
        self._spread = 0
        self._decoding = BackgroundDecoding(self.parse, lambda *job: services.off_loop(*job))
        self._loop = asyncio.get_running_loop()
        self._head = AnswerHead(services, topics)
        self._stale = StaleRoutes(topics)

    # -- one partition -------------------------------------------------------------------

    def replica(self, topic: str, partition: str) -> Partition | None:
        """Return this shard's replica of the partition, if it has one."""
        if not (partition.isascii() and partition.isdigit()):
            return None
        return self._services.partitions.get((topic, int(partition)))

    def partition(self, request: Request, topic: str, partition: str) -> Response | Awaitable[Response]:
        """Answer POST /v1/topics/{topic}/partitions/{partition}/records."""
        replica = self.replica(topic, partition)
        if replica is not None and replica.context.leads:
            return self._here(request, replica)
        record = self._topics.partition_record(topic, partition)
        if FORWARDED in request.headers:
            raise Problem("not_leader", f"{topic}/{partition} is not led here", outcome="not_applied")
        return self._elsewhere(request, topic, record.number)

    def _here(self, request: Request, partition: Partition) -> Response | Awaitable[Response]:
        if self._decoding.at_once(request, partition):
            return self._appended(request, partition, self.parse(request))
        return self._decoding.in_turn(
            request, partition, lambda append: self._appended(request, partition, append)
        )

    def _appended(
        self, request: Request, partition: Partition, append: Append
    ) -> Response | Awaitable[Response]:
        condition = request.headers.get("if-match")
        at = None if condition is None else _offset_of(condition)
        mark = None
        made_ms: int | None = None
        if _is_part(request):
            # The identity is in the batch already; only the key's time is in the head.
            made_ms = int(request.headers[KEY_TIME]) if KEY_TIME in request.headers else None
        else:
            mark = identity_of(request, scope="partition")
        if mark is not None:
            append = Append(None, identified(append, mark))
            made_ms = mark.made_ms
        if self._stale.matter(partition) and not _is_part(request):
            self._stale.check_append(partition, append, route_said(request.headers))
        if request.query.get("ack", "committed") != "committed":
            if at is not None and not (
                append.frames and is_duplicate(partition.context, Header.unpack(append.frames[0]))
            ):
                _check_end(partition, at)
            return accepted(
                request,
                append,
                partition,
                self._head.block(partition.topic),
                self._topics.version(partition.topic),
            )
        if append.records is None:
            receipts = self._append_frames(partition, append.frames, at, mark, made_ms)
        else:
            if at is not None:
                _check_end(partition, at)
            receipts = [partition.appends.append_records(append.records)]
        if len(receipts) == 1:
            answer: asyncio.Future[Response] = self._loop.create_future()
            receipts[0].add_done_callback(lambda done: self._answer_one(answer, done, partition))
            return answer
        return self._answer_many(receipts, partition)

    def parse(self, request: Request) -> Append:
        """Decode the records or batches of a body; call it in a thread if the body is large.

        Raises:
            Problem: 400, 413 or 422.
        """
        if request.parsed is not None:
            append: Append = request.parsed
            return append
        if not _is_part(request):
            return parse_append(request, limits=self.limits)
        return parse_append(request, limits=self._part_limits, keyed=request.headers[PART] == KEYED)

    def _append_frames(
        self,
        partition: Partition,
        frames: Sequence[memoryview],
        at: int | None = None,
        mark: BatchIdentity | None = None,
        made_ms: int | None = None,
    ) -> list[asyncio.Future[Receipt]]:
        """Append batches in order, each checked in the state that the one before it left; return receipts.

        If the first is refused, the request is refused as a whole. A later refusal ends the list as a failed
        receipt, so that it is reported with the outcome of the batches before it, and never as if nothing had
        been done. `at`: the offset that the first batch must get; a batch that is recognised as a retry is
        not checked against it. `mark` and `made_ms`: the request's identity, and the time of its key.

        Raises:
            Problem: the first batch is refused.
        """
        # A leader stamps batches in place, so it needs writable copies of its own.
        frames = [memoryview(bytearray(frame)) if frame.readonly else frame for frame in frames]
        receipts: list[asyncio.Future[Receipt]] = []
        for frame in frames:
            try:
                header = Header.unpack(frame)
                if at is not None:
                    if not is_duplicate(partition.context, header):
                        _check_end(partition, at)
                    at += header.count
                receipts.append(partition.appends.append_frame(frame, header, key_made_ms=made_ms))
            except Problem as problem:
                named(problem, mark)
                if not receipts:
                    raise
                refused: asyncio.Future[Receipt] = self._loop.create_future()
                refused.set_exception(problem)
                receipts.append(refused)
                break
        return receipts

    def _answer_one(
        self, answer: asyncio.Future[Response], done: asyncio.Future[Receipt], partition: Partition
    ) -> None:
        if answer.done():
            done.exception()  # retrieved, so that it is not logged: the client has gone
            return
        error = done.exception()
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(self._answer([done.result()], partition))

    async def _answer_many(self, receipts: list[asyncio.Future[Receipt]], partition: Partition) -> Response:
        results = await asyncio.gather(*receipts, return_exceptions=True)
        return self._answer(merge_receipts(results, partition.topic), partition)

    def _answer(self, receipts: Sequence[Receipt], partition: Partition) -> Response:
        """Return the answer with these receipts. Its JSON is formatted by hand, as this is the hot path."""
        placed = ",".join(
            [f'{{"partition":{r.partition},"offset":{r.offset},"count":{r.count}}}' for r in receipts]
        )
        appended = sum([receipt.count for receipt in receipts])
        # The last: a repetition among them may have been acknowledged long before the others.
        window = max([receipt.window for receipt in receipts if receipt.window is not None])
        body = (
            f'{{"appended":{appended},"placed":[{placed}],'
            f'"durable":{{"replicas":{window.voters},{FLUSH[partition.log.policy.name]}}}}}\n'
        ).encode()
        block = self._head.block(partition.topic) + window_headers(window)
        headers: list[tuple[str, str]] = []
        if any(receipt.duplicate for receipt in receipts):
            headers.append(("Laminar-Replayed", "1"))
        if appended != 1:
            return Response(200, headers, body, header_block=block)
        offset = receipts[0].offset
        headers.append(
            ("Location", f"/v1/topics/{partition.topic}/partitions/{partition.number}/records/{offset}")
        )
        return Response(201, headers, body, header_block=block)

    async def _elsewhere(self, request: Request, topic: str, number: int) -> Response:
        """Append at the leader's shard, or here if this shard leads by then."""
        repeatable = self._repeatable(request)
        payload: bytes | None = None

        async def here(partition: Partition) -> Response:
            answer = self._here(request, partition)
            return answer if isinstance(answer, Response) else await answer

        async def there(where: ReplicaEndpoint) -> Response:
            nonlocal payload
            if payload is None:
                payload = encode_passed(request)
            return await self._pass_on(where, payload)

        # An append here stamps the body's batches in place, so it can't be tried here a second time.
        policy = append_policy(repeatable=repeatable, repeats_here=False)
        return await self._leaders(topic, number, here=here, there=there, policy=policy)

    async def _pass_on(self, where: ReplicaEndpoint, payload: bytes) -> Response:
        passed: PassedResponse = await self._exchange.ask(
            where.address, "http", payload, kind=PassedResponse, timeout_s=FORWARDED_APPEND_S
        )
        response = decode_response(passed)
        if response.status >= 400:
            raise Problem.decode(passed.body, status=passed.status)
        response.headers = [*response.headers, ("Laminar-Leader", where.url)]
        return response

    def _repeatable(self, request: Request) -> bool:
        """Return whether a second attempt is recognised: by the head, or by producer ids in all batches."""
        if has_identity(request):
            return True
        if request.headers.get("content-type") != BATCH_TYPE:
            return False
        return all_marked(request.body)

    # -- a topic -------------------------------------------------------------------------

    async def topic(self, request: Request, topic: str) -> Response:
        """Answer POST /v1/topics/{topic}/records: partitions by `logical`, else by key, else round-robin."""
        record = self._topics.record(topic)
        append = await self._decoding.parsed(request)
        records = append.records if append.records is not None else records_of(append.frames)
        logical = integer(request, "logical", -1, minimum=0, maximum=LOGICAL_PARTITIONS - 1)
        route = self._topics.route(record)
        mark = identity_of(request, scope="topic")
        if mark is None:
            self._spread = (self._spread + 1) % len(route)
            spread = route.numbers[self._spread]
        else:
            # So that records without a key go to the same partition when the request is repeated.
            spread = route.partition_of(logical_of_key(mark.producer_id))
        parts = _split(records, route, logical if "logical" in request.query else None, spread)
        work = [
            self._append_part(topic, number, part)
            if mark is None
            else self._append_part(topic, number, build_identified(part, mark), made_ms=mark.made_ms)
            for number, part in parts
        ]
        answers = await asyncio.gather(*work, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, Problem):
                named(answer, mark)
        placed = merge_receipts(answers, topic)
        replicas = self._replicas(topic, parts[0][0])
        headers = [("Laminar-Node", self._services.node), ("Laminar-Route", str(route.version))]
        if any(receipt.duplicate for receipt in placed):
            headers.append(("Laminar-Replayed", "1"))
        flush = policy_of(record.settings).name
        return Response.json(
            documents.Appended(
                sum(receipt.count for receipt in placed),
                [documents.Placed(receipt.partition, receipt.offset, receipt.count) for receipt in placed],
                documents.Durability(replicas, flush == "commit", flush),
            ),
            headers=headers,
        )

    def _replicas(self, topic: str, number: int) -> int:
        record = self._services.view.partition(topic, number)
        return len(record.replicas) if record is not None else 0

    async def _append_part(
        self, topic: str, number: int, part: Records | bytearray, *, made_ms: int | None = None
    ) -> Receipt:
        """Append one partition's part of a topic's append at the partition's leader.

        `part` is records, or a batch with an identity, by which the leader recognises a second attempt.
        """

        async def here(partition: Partition) -> Receipt:
            if isinstance(part, Records):
                return await partition.appends.append_records(part)
            # A copy: the leader stamps it in place, and there may be another attempt.
            frame = bytearray(part)
            return await partition.appends.append_frame(frame, Header.unpack(frame), key_made_ms=made_ms)

        async def there(where: ReplicaEndpoint) -> Receipt:
            return await self._append_remote(where, topic, number, part, made_ms)

        policy = append_policy(repeatable=not isinstance(part, Records), repeats_here=True)
        return await self._leaders(topic, number, here=here, there=there, policy=policy)

    async def _append_remote(
        self, where: ReplicaEndpoint, topic: str, number: int, part: Records | bytearray, made_ms: int | None
    ) -> Receipt:
        headers = {"content-type": BATCH_TYPE, FORWARDED: "1", "host": "forwarded", PART: PLAIN}
        if isinstance(part, Records):
            frame = build(
                part.values,
                keys=part.keys,
                timestamps=part.timestamps,
                tags=part.tags,
                headers=part.headers,
            )
        else:
            frame = part
            headers[PART] = KEYED
            if made_ms is not None:
                headers[KEY_TIME] = str(made_ms)
        target = f"/v1/topics/{topic}/partitions/{number}/records"
        response = await self._pass_on(
            where, msgspec.msgpack.encode(PassedRequest("POST", target, headers, frame))
        )
        assert isinstance(response.body, (bytes, bytearray, memoryview))
        placed = msgspec.json.decode(response.body, type=documents.Appended).placed[0]
        replayed = any(name == "Laminar-Replayed" for name, _ in response.headers)
        return Receipt(placed.partition, placed.offset, placed.count, duplicate=replayed)


def _is_part(request: Request) -> bool:
    """Return whether another shard made the request as one part of a topic's append.

    A client can't make one: it has a connection of its own, and its header of that name is not passed on.
    """
    return PART in request.headers and isinstance(request.connection, Forwarder)


def _split(records: Records, route: Route, logical: int | None, spread: int) -> list[tuple[int, Records]]:
    """Return the records by partition: all by `logical` if given, else by key; without a key to `spread`."""
    if logical is not None:
        return [(route.partition_of(logical), records)]
    keys = records.keys
    if keys is None:
        return [(spread, records)]
    rows: dict[int, list[int]] = {}
    for row, key in enumerate(keys):
        number = spread if key is None else route.partition_of(logical_of_key(bytes(key)))
        rows.setdefault(number, []).append(row)
    if len(rows) == 1:
        return [(next(iter(rows)), records)]
    return [(number, records.take(chosen)) for number, chosen in rows.items()]


def _offset_of(condition: str) -> int:
    found = _CONDITION.match(condition)
    if found is None:
        raise Problem("invalid", 'If-Match must be an offset: "812"', field="if-match", value=condition)
    return int(found[1])


def _check_end(partition: Partition, offset: int) -> None:
    if not partition.appends.would_start_at(offset):
        raise Problem(
            "precondition_failed",
            "the partition does not end at this offset",
            field="if-match",
            value=offset,
            limit=partition.log.next_offset,
        )
