"""The routes of appends: to one partition, or to a topic, with the partitions chosen here by key.

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

from laminar.batch import BATCH_TYPE, Column, Header, has_column
from laminar.http.api.append_body import Append, all_marked, parse_append, parse_if_short
from laminar.http.api.limits import Limits
from laminar.http.api.problems import Problem
from laminar.http.protocol.messages import Later, Request, Response
from laminar.node.access.principals import owner_of
from laminar.node.api.common.answer_head import AnswerHead, durability
from laminar.node.api.common.attempts import merge_receipts
from laminar.node.api.common.forwarding import (
    FORWARDED,
    KEYED,
    PART,
    Exchange,
    Forwarder,
    encode_passed,
    requester_of,
)
from laminar.node.api.common.leader_call import LeaderCall, append_policy
from laminar.node.api.common.leader_lookup import ReplicaEndpoint
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.ack_accepted import accepted
from laminar.node.api.records.background_decoding import BackgroundDecoding
from laminar.node.api.records.idempotency import (
    EPOCH,
    KEY,
    KEY_TIME,
    PRODUCER,
    SEQUENCE,
    BatchIdentity,
    has_identity,
    identified,
    identity_of,
    named,
)
from laminar.node.api.records.new_ids import NewIds
from laminar.node.api.records.stale_routes import StaleRoutes, route_said
from laminar.node.api.records.topic_append import pass_append_on
from laminar.node.partition.deduplication import is_duplicate
from laminar.node.partition.partition import Partition
from laminar.node.partition.problems import FROM_TABLES
from laminar.node.partition.receipts import Receipt

_PART_GROWS = 3
# Headers that ask for more than a plain append: most heads have none of these.
_GUARANTEES = frozenset((KEY, KEY_TIME, PRODUCER, EPOCH, SEQUENCE, "if-match"))
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
        new_ids: NewIds | None = None,
    ) -> None:
        self._services = services
        self._now_ms = services.clock.wall_ms
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
        self._decoding = BackgroundDecoding(self.parse, lambda *job: services.off_loop(*job), services.bulk)
        self._head = AnswerHead(services, topics)
        self._stale = StaleRoutes(topics)
        self._new_ids = new_ids or NewIds(services)

    # -- one partition -------------------------------------------------------------------

    def replica(self, topic: str, partition: str) -> Partition | None:
        """Return this shard's replica of the partition, if it has one."""
        if not (partition.isascii() and partition.isdigit()):
            return None
        return self._services.partitions.get((topic, int(partition)))

    def partition(self, request: Request, topic: str, partition: str) -> Response | Awaitable[Response]:
        """Answer POST /v1/topics/{topic}/partitions/{partition}/records with the receipt of the append."""
        replica = self.replica(topic, partition)
        if replica is not None and replica.context.leads:
            return self._here(request, replica)
        record = self._topics.partition_record(topic, partition)
        if FORWARDED in request.headers:
            raise Problem("not_leader", f"{topic}/{partition} is not led here", outcome="not_applied")
        return self._elsewhere(request, topic, record.number)

    def _here(self, request: Request, partition: Partition) -> Response | Awaitable[Response]:
        if self._decoding.at_once(request, partition):
            append: Append | None = request.parsed
            if append is None:
                limits, keyed = self._limits_for(request) if PART in request.headers else (self.limits, False)
                append = parse_if_short(request, limits=limits, now_ms=self._now_ms, keyed=keyed)
            if append is not None:
                return self._appended(request, partition, append)

        def decoded(append: Append) -> Response | Awaitable[Response]:
            partition.context.check_leads()  # it may have been deposed since it was asked
            return self._appended(request, partition, append)

        return self._decoding.in_turn(request, partition, decoded)

    def _appended(
        self, request: Request, partition: Partition, append: Append
    ) -> Response | Awaitable[Response]:
        """Append to a partition that this shard leads, and return the answer.

        A refusal that depends on the leader's tables (of producers and keys) is answered only once a majority
        has confirmed the leader, because the tables of a deposed leader may be old.
        """
        trace = partition.context.trace
        if trace is not None:
            trace.requester = requester_of(request, self._services.node)
        try:
            return self._proposed(request, partition, append)
        except Problem as problem:
            if problem.code not in FROM_TABLES:
                raise
            return self._answer_many([partition.appends.refused(problem)], partition)
        finally:
            if trace is not None:
                trace.requester = None

    def _proposed(
        self, request: Request, partition: Partition, append: Append
    ) -> Response | Awaitable[Response]:
        at: int | None = None
        mark: BatchIdentity | None = None
        made_ms: int | None = None
        if not _GUARANTEES.isdisjoint(request.headers):
            condition = request.headers.get("if-match")
            at = None if condition is None else _offset_of(condition, append)
            if _is_part(request):
                # The identity is in the batch already; only the key's time is in the head.
                made_ms = int(request.headers[KEY_TIME]) if KEY_TIME in request.headers else None
            else:
                mark = identity_of(request, scope="partition")
            if mark is not None:
                append = Append(None, identified(append, mark))
                made_ms = mark.made_ms
        records = append.records
        may_have_keys = records is None or records.keys is not None
        if may_have_keys and self._stale.matter(partition) and not _is_part(request):
            self._stale.check_append(partition, append, route_said(request.headers))
        if request.query.get("ack", "committed") != "committed":
            return self._accepted(request, partition, append, at)
        if records is None:
            principal = self._limited(request)
            receipts = self._append_frames(partition, append, at, mark, made_ms, principal)
        else:
            if at is not None:
                _check_end(partition, at)
            receipts = [partition.appends.append_records(records)]
        if len(receipts) == 1:
            return Later(receipts[0], lambda receipt: self._answer([receipt], partition))
        return self._answer_many(receipts, partition)

    def _accepted(self, request: Request, partition: Partition, append: Append, at: int | None) -> Response:
        if at is not None and not (
            append.frames and is_duplicate(partition.context, Header.unpack(append.frames[0]))
        ):
            _check_end(partition, at)
        principal = self._limited(request)
        return accepted(
            request,
            append,
            partition,
            self._head,
            self._topics.version(partition.topic),
            count=lambda header: self._new_ids.count(partition, header.producer_id, principal),
        )

    def _limited(self, request: Request) -> str:
        """Return the principal whose limit of new producers applies; "" while no limits are set."""
        return owner_of(request) if self._services.view.limits else ""

    def parse(self, request: Request) -> Append:
        """Decode the records or batches of a body; call it in a thread if the body is large.

        Raises:
            Problem: 400, 413 or 422.
        """
        if request.parsed is not None:
            append: Append = request.parsed
            return append
        limits, keyed = self._limits_for(request)
        return parse_append(request, limits=limits, now_ms=self._now_ms, keyed=keyed)

    def _limits_for(self, request: Request) -> tuple[Limits, bool]:
        """Return the limits of a body, and whether its batches may have idempotency keys."""
        return (
            (self._part_limits, request.headers[PART] == KEYED) if _is_part(request) else (self.limits, False)
        )

    def _append_frames(
        self,
        partition: Partition,
        append: Append,
        at: int | None = None,
        mark: BatchIdentity | None = None,
        made_ms: int | None = None,
        principal: str = "",
    ) -> list[asyncio.Future[Receipt]]:
        """Append batches in order, each checked against the state after the previous one; return receipts.

        If the first batch is refused, the request is refused as a whole. A later refusal ends the list as a
        failed receipt, so that it is reported together with the outcome of the earlier batches, and never as
        if nothing had been appended. `at` is the offset that the first batch must get; a batch that is
        recognised as a retry is not checked against it. `mark` and `made_ms` are the request's identity, and
        the time of its key.

        Raises:
            Problem: the first batch is refused.
        """
        # A leader stamps batches in place, so it needs writable copies of its own.
        frames = [memoryview(bytearray(frame)) if frame.readonly else frame for frame in append.frames]
        headers = append.headers or [Header.unpack(frame) for frame in frames]
        receipts: list[asyncio.Future[Receipt]] = []
        for frame, header in zip(frames, headers, strict=True):
            try:
                if at is not None:
                    if not is_duplicate(partition.context, header):
                        _check_end(partition, at)
                    at += header.count
                if principal:
                    self._new_ids.count_batch(partition, header, principal)
                receipts.append(partition.appends.append_frame(frame, header, key_made_ms=made_ms))
            except Problem as problem:
                named(problem, mark)
                if not receipts:
                    raise
                receipts.append(partition.appends.refused(problem))
                break
        return receipts

    async def _answer_many(self, receipts: list[asyncio.Future[Receipt]], partition: Partition) -> Response:
        results = await asyncio.gather(*receipts, return_exceptions=True)
        return self._answer(merge_receipts(results, partition.topic), partition)

    def _answer(self, receipts: Sequence[Receipt], partition: Partition) -> Response:
        """Return the answer with these receipts. Its JSON is written by hand because this is the hot path."""
        placed: list[str] = []
        delayed: list[str] = []
        appended, window, replayed = 0, None, False
        for receipt in receipts:
            appended += receipt.count
            replayed = replayed or receipt.duplicate
            if receipt.delayed is None:
                placed.append(
                    f'{{"partition":{receipt.partition},"offset":{receipt.offset},"count":{receipt.count}}}'
                )
            else:
                delayed += receipt.delayed_ids
            # The last: a repetition among them may have been acknowledged long before the others.
            if window is None or (receipt.window is not None and receipt.window > window):
                window = receipt.window
        assert window is not None, "an append is acknowledged without its copies"
        ids = f',"scheduled":{msgspec.json.encode(delayed).decode()}' if delayed else ""
        body = (
            f'{{"appended":{appended},"placed":[{",".join(placed)}],'
            f'"durable":{{"replicas":{window.voters},{durability(partition)}}}{ids}}}\n'
        ).encode()
        block = self._head.block(partition.topic, window)
        headers = [("Laminar-Replayed", "1")] if replayed else []
        if appended != 1:
            return Response(200, headers, body, header_block=block)
        place = f"partitions/{partition.number}/records/{receipts[0].offset}"
        if delayed:
            place = f"delayed/{delayed[0]}"
        block += f"Location: /v1/topics/{partition.topic}/{place}\r\n".encode()
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
            return await pass_append_on(self._exchange, where, payload)

        # An append here stamps the body's batches in place, so it can't be tried here a second time.
        policy = append_policy(repeatable=repeatable, repeats_here=False)
        return await self._leaders(topic, number, here=here, there=there, policy=policy)

    def _repeatable(self, request: Request) -> bool:
        """Return whether the leader would recognise a second attempt, by a key or by producer ids.

        The head names a key or a producer, or all batches of the body have producer ids.
        """
        if has_identity(request):
            return True
        if request.headers.get("content-type") != BATCH_TYPE:
            return False
        return all_marked(request.body)


def _is_part(request: Request) -> bool:
    """Return whether the request is one partition's part of a topic's append, sent by another shard.

    A client cannot forge that: its connection is of another kind, and its header of that name is not
    forwarded.
    """
    return PART in request.headers and isinstance(request.connection, Forwarder)


def _offset_of(condition: str, append: Append) -> int:
    found = _CONDITION.match(condition)
    if found is None:
        raise Problem("invalid", 'If-Match must be an offset: "812"', field="if-match", value=condition)
    has_times = append.records is not None and append.records.delivery_times is not None
    if has_times or any(has_column(frame, Column.DELIVERY_TIME) for frame in append.frames):
        raise Problem(
            "invalid",
            "a delayed record has no offset yet",
            field="if-match",
            value=condition,
        )
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
