"""Appends: to a partition, or to a topic whose partitions this shard chooses by key.

The usual path makes no task: the leader's shard parses the body, knocks at the partition's
door and answers when the future of its receipt is done. Everything else (another leader, an
election under way, a body for several partitions) goes through a coroutine.

A request is passed on only while nobody can have carried it out. Once it may have been, the
answer is 504 `outcome_unknown`, unless the batches carry a producer id, which makes a second
try harmless.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from laminar.batch import Batch, Header, build
from laminar.http.errors import CODES, Problem
from laminar.http.messages import Request, Response
from laminar.http.payload import Append, parse_append
from laminar.http.records import Limits, Records
from laminar.node.api.cluster import integer
from laminar.node.api.exchange import (
    FORWARDED,
    Exchange,
    PassedRequest,
    PassedResponse,
    decode_response,
    encode_passed,
)
from laminar.node.api.locate import Locator, Where
from laminar.node.api.topics import TopicRoutes
from laminar.node.partition import Partition, Receipt
from laminar.node.producers import NOBODY
from laminar.route import LOGICAL_PARTITIONS, Route, logical_of_key

if TYPE_CHECKING:
    from laminar.node.shard import Shard

BATCH_TYPE = "application/vnd.laminar.batch"
FORWARD_TIMEOUT_S = 15.0
GIVE_UP_S = 5.0
RETRY_S = 0.02
_CONDITION = re.compile(r'"?([0-9]{1,16})"?\Z', re.ASCII)


class _Placed(msgspec.Struct):
    partition: int
    offset: int
    count: int


class _Answer(msgspec.Struct):
    placed: list[_Placed]


class AppendRoutes:
    """Handlers of the two append routes."""

    def __init__(
        self, shard: Shard, exchange: Exchange, locator: Locator, topics: TopicRoutes, *, limits: Limits
    ) -> None:
        self._shard = shard
        self._exchange = exchange
        self._locator = locator
        self._topics = topics
        self.limits = limits
        self._spread = 0
        self._routes: dict[int, Route] = {}
        self._loop = asyncio.get_running_loop()
        self._block = (
            f"Content-Type: application/json\r\nLaminar-Node: {shard.boot.node}\r\n"
            f"Laminar-Shard: {shard.number}\r\nLaminar-Route: 0\r\n"
        ).encode()

    # -- one partition -------------------------------------------------------------------

    def leads(self, topic: str, partition: str) -> Partition | None:
        """The partition, if it exists and is led here. No checks: the hot path's first question."""
        if not partition.isdigit():
            return None
        found = self._shard.partitions.get((topic, int(partition)))
        return found if found is not None and found.leads else None

    def partition(self, request: Request, topic: str, partition: str) -> Response | Awaitable[Response]:
        """POST /v1/topics/{topic}/partitions/{partition}/records."""
        led = self.leads(topic, partition)
        if led is not None:
            return self._here(request, led)
        record = self._topics.partition_record(topic, partition)
        if FORWARDED in request.headers:
            raise Problem("not_leader", f"{topic}/{partition} is not led here", outcome="not_applied")
        return self._elsewhere(request, topic, record.number)

    def _here(self, request: Request, partition: Partition) -> Response | Awaitable[Response]:
        append = self._parse(request)
        condition = request.headers.get("if-match")
        if condition is not None:
            self._check_offset(partition, condition)
        if append.records is not None:
            receipts = [partition.append_records(append.records)]
        else:
            receipts = self._append_frames(partition, append.frames)
        if len(receipts) == 1:
            answer: asyncio.Future[Response] = self._loop.create_future()
            receipts[0].add_done_callback(lambda done: self._answer_one(answer, done, partition))
            return answer
        return self._answer_many(receipts, partition)

    def _parse(self, request: Request) -> Append:
        return parse_append(request, limits=self.limits)

    def _append_frames(
        self, partition: Partition, frames: Sequence[memoryview]
    ) -> list[asyncio.Future[Receipt]]:
        """In order, each checked as the one before it left the partition.

        What is refused at the first is refused as a whole. After that something is proposed: a later
        refusal is told together with what becomes of those before it, never as if nothing had been done.
        """
        # A leader stamps batches in place, so it needs them writable and its own.
        frames = [memoryview(bytearray(frame)) if frame.readonly else frame for frame in frames]
        receipts: list[asyncio.Future[Receipt]] = []
        for frame in frames:
            try:
                receipts.append(partition.append_frame(frame, Header.unpack(frame)))
            except Problem as problem:
                if not receipts:
                    raise
                refused: asyncio.Future[Receipt] = self._loop.create_future()
                refused.set_exception(problem)
                receipts.append(refused)
                break
        return receipts

    def _check_offset(self, partition: Partition, condition: str) -> None:
        found = _CONDITION.match(condition)
        if found is None:
            raise Problem("invalid", 'If-Match is an offset: "812"', field="if-match", value=condition)
        wanted = found[1]
        if not partition.stands_at(int(wanted)):
            raise Problem(
                "precondition_failed",
                "the partition does not end at this offset",
                field="if-match",
                value=int(wanted),
                limit=partition.log.next_offset,
            )

    def _answer_one(
        self, answer: asyncio.Future[Response], done: asyncio.Future[Receipt], partition: Partition
    ) -> None:
        if answer.done():
            done.exception()  # taken note of: nobody waits any more
            return
        error = done.exception()
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(self._answer([done.result()], partition))

    async def _answer_many(self, receipts: list[asyncio.Future[Receipt]], partition: Partition) -> Response:
        results = await asyncio.gather(*receipts, return_exceptions=True)
        return self._answer(_whole(results, partition.topic), partition)

    def _answer(self, receipts: Sequence[Receipt], partition: Partition) -> Response:
        """The receipt, written by hand: it is the same few fields a hundred thousand times."""
        placed = ",".join(
            [f'{{"partition":{r.partition},"offset":{r.offset},"count":{r.count}}}' for r in receipts]
        )
        appended = sum([receipt.count for receipt in receipts])
        body = (
            f'{{"appended":{appended},"placed":[{placed}],'
            f'"durable":{{"replicas":{partition.replicas},"synced":true,"flush":"commit"}}}}\n'
        ).encode()
        headers: list[tuple[str, str]] = []
        if any(receipt.duplicate for receipt in receipts):
            headers.append(("Laminar-Replayed", "1"))
        if appended != 1:
            return Response(200, headers, body, header_block=self._block)
        offset = receipts[0].offset
        headers.append(
            ("Location", f"/v1/topics/{partition.topic}/partitions/{partition.number}/records/{offset}")
        )
        return Response(201, headers, body, header_block=self._block)

    async def _elsewhere(self, request: Request, topic: str, number: int) -> Response:
        """Another shard leads, or nobody does right now: pass the request on, once it is known to whom."""
        deadline = self._loop.time() + GIVE_UP_S
        repeatable = self._repeatable(request)
        payload: bytes | None = None
        while True:
            where = await self._locator.leader(topic, number)
            partition = self.leads(topic, str(number))
            if partition is not None:
                answer = self._here(request, partition)
                return answer if isinstance(answer, Response) else await answer
            if payload is None:
                payload = encode_passed(request)
            problem = None
            try:
                return await self._pass_on(where, payload)
            except Problem as refused:
                problem = refused
            if not _may_retry(problem, repeatable) or self._loop.time() >= deadline:
                raise _final(problem)
            self._locator.forget(topic, number)
            await asyncio.sleep(RETRY_S)

    async def _pass_on(self, where: Where, payload: bytes) -> Response:
        passed: PassedResponse = await self._exchange.ask(
            where.address, "http", payload, kind=PassedResponse, timeout_s=FORWARD_TIMEOUT_S
        )
        response = decode_response(passed)
        if response.status >= 400:
            raise Problem.decode(passed.body, status=passed.status)
        response.headers = [*response.headers, ("Laminar-Leader", where.url)]
        return response

    def _repeatable(self, request: Request) -> bool:
        """Whether a second try of this body is recognised: every batch carries a producer id."""
        if request.headers.get("content-type") != BATCH_TYPE:
            return False
        return all(Header.unpack(frame).producer_id != NOBODY for frame in self._parse(request).frames)

    # -- a topic -------------------------------------------------------------------------

    async def topic(self, request: Request, topic: str) -> Response:
        """POST /v1/topics/{topic}/records: by key, by `logical`, else spread."""
        record = self._topics.record(topic)
        append = self._parse(request)
        if append.records is not None:
            records = append.records
        else:
            records = _records_of(append.frames)
        logical = integer(request, "logical", -1, minimum=0, maximum=LOGICAL_PARTITIONS - 1)
        route = self._routes.get(record.partitions)
        if route is None:
            route = self._routes[record.partitions] = Route.even(record.partitions)
        parts = self._split(
            records, route, logical if "logical" in request.query else None, record.partitions
        )
        answers = await asyncio.gather(
            *(self._append_part(topic, number, part) for number, part in parts), return_exceptions=True
        )
        placed = _whole(answers, topic)
        replicas = self._replicas(topic, parts[0][0])
        return Response.json(
            {
                "appended": sum(receipt.count for receipt in placed),
                "placed": [
                    {"partition": receipt.partition, "offset": receipt.offset, "count": receipt.count}
                    for receipt in placed
                ],
                "durable": {"replicas": replicas, "synced": True, "flush": "commit"},
            },
            headers=[("Laminar-Node", self._shard.boot.node), ("Laminar-Route", "0")],
        )

    def _replicas(self, topic: str, number: int) -> int:
        record = self._shard.view.partition(topic, number)
        return len(record.replicas) if record is not None else 0

    def _split(
        self, records: Records, route: Route, logical: int | None, partitions: int
    ) -> list[tuple[int, Records]]:
        if logical is not None:
            return [(route.partition_of(logical), records)]
        keys = records.keys
        self._spread = (self._spread + 1) % partitions
        if keys is None:
            return [(self._spread, records)]
        rows: dict[int, list[int]] = {}
        for row, key in enumerate(keys):
            number = self._spread if key is None else route.partition_of(logical_of_key(bytes(key)))
            rows.setdefault(number, []).append(row)
        if len(rows) == 1:
            return [(next(iter(rows)), records)]
        return [(number, records.take(chosen)) for number, chosen in rows.items()]

    async def _append_part(self, topic: str, number: int, records: Records) -> Receipt:
        """One partition's part of a topic's append, on its leader, wherever that is."""
        deadline = self._loop.time() + GIVE_UP_S
        while True:
            where = await self._locator.leader(topic, number)
            try:
                partition = self.leads(topic, str(number))
                if partition is not None:
                    return await partition.append_records(records)
                return await self._append_remote(where, topic, number, records)
            except Problem as problem:
                if not _may_retry(problem, False) or self._loop.time() >= deadline:
                    raise _final(problem) from problem
            self._locator.forget(topic, number)
            await asyncio.sleep(RETRY_S)

    async def _append_remote(self, where: Where, topic: str, number: int, records: Records) -> Receipt:
        frame = build(
            records.values,
            keys=records.keys,
            timestamps=records.timestamps,
            tags=records.tags,
            headers=records.headers,
        )
        request = PassedRequest(
            "POST",
            f"/v1/topics/{topic}/partitions/{number}/records",
            {"content-type": BATCH_TYPE, FORWARDED: "1", "host": "forwarded"},
            frame,
        )
        response = await self._pass_on(where, msgspec.msgpack.encode(request))
        assert isinstance(response.body, (bytes, bytearray, memoryview))
        placed = msgspec.json.decode(response.body, type=_Answer).placed[0]
        return Receipt(placed.partition, placed.offset, placed.count)


def _records_of(frames: Sequence[memoryview]) -> Records:
    """Batches for a topic are taken apart, as their records may belong to several partitions."""
    parts = []
    for frame in frames:
        batch = Batch(frame)
        if batch.header.producer_id != NOBODY:
            raise Problem(
                "invalid",
                "a batch with a producer id belongs to one partition: append it there",
                field="producer_id",
                value=batch.header.producer_id.hex(),
            )
        parts.append(Records.of_batch(batch))
    return Records.concat(parts)


def _may_retry(problem: Problem, repeatable: bool) -> bool:
    if problem.code not in ("not_leader", "no_leader", "draining", "not_a_replica"):
        return repeatable and problem.code == "outcome_unknown"
    return repeatable or problem.outcome == "not_applied"


def _final(problem: Problem) -> Problem:
    """What the client is told: a leader lost in the middle is an outcome nobody knows."""
    if problem.code in ("no_leader", "not_leader") and problem.outcome == "unknown":
        return Problem("outcome_unknown", problem.detail)
    if problem.code == "not_leader":
        return Problem("no_leader", problem.detail, outcome="not_applied")
    return problem


def _whole(results: Sequence[Any], topic: str) -> list[Receipt]:
    """All receipts, or an error that lists what is durable all the same."""
    receipts = [result for result in results if isinstance(result, Receipt)]
    failures = [result for result in results if isinstance(result, BaseException)]
    if not failures:
        return receipts
    unknown = (each for each in failures if not isinstance(each, Problem) or each.outcome == "unknown")
    worst = next(unknown, failures[0])
    if not isinstance(worst, Problem) or not receipts:
        raise worst
    durable = ", ".join(f"{r.partition}: {r.offset} to {r.offset + r.count - 1}" for r in receipts)
    detail = f"{worst.detail or worst.title}; durable in {topic} all the same: {durable}"
    if CODES[worst.code].retriable:
        # Nobody may repeat the whole of it as if nothing had been done.
        raise Problem("outcome_unknown", detail) from worst
    worst.detail, worst.outcome = detail, "unknown"
    raise worst
