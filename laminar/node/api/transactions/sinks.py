"""Sinks over HTTP: begin, stage, commit, describe, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from laminar.batch import Batch as RecordBatch
from laminar.batch import BatchError, merge
from laminar.http.api.append_body import batch_problem, parse_append
from laminar.http.api.documents import transactions as documents
from laminar.http.api.limits import Limits
from laminar.http.api.names import SYSTEM_TOPICS
from laminar.http.api.parameters import MAX_EPOCH, MAX_NUMBER, MAX_PAGE
from laminar.http.api.problems import Problem
from laminar.http.api.roles import AFTER_SYSTEM
from laminar.http.api.timestamps import format_time
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import owner_of, principal_of
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.query import integer, next_link
from laminar.node.api.common.services import MakeTopic, ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.background_decoding import BackgroundDecoding, client_of
from laminar.node.api.records.idempotency import key_of
from laminar.node.api.records.stale_routes import route_said
from laminar.node.api.transactions.acks import check_pins, tokens_of
from laminar.node.api.transactions.steps import (
    COORDINATORS,
    ForgetRequest,
    ListRequest,
    PrepareRequest,
    SinkAnswer,
    SinkSteps,
    StageRequest,
)
from laminar.node.partition.flush_policy import policy_of
from laminar.node.partition.state.pins import PartAcks
from laminar.node.partition.state.sinks import Deletion, Sink, Target
from laminar.node.transactions.coordinator import (
    TOPIC,
    Part,
    Prepared,
    id_of,
    id_of_name,
    refuse_epoch,
)
from laminar.wire.channels import MAX_ACKS, Named

# The most partitions that are asked at the same time to forget a sink.
FORGOTTEN_AT_ONCE = 64


class SinkRoutes:
    """The handlers of the routes of sinks."""

    def __init__(
        self,
        services: ShardServices,
        steps: SinkSteps,
        topics: TopicLookup,
        *,
        make_topic: MakeTopic,
        limits: Limits,
    ) -> None:
        self._services = services
        self._steps = steps
        self._topics = topics
        self._make_topic = make_topic
        self._decoding = BackgroundDecoding(
            lambda request: (
                request.parsed or parse_append(request, limits=limits, now_ms=services.clock.wall_ms)
            ),
            lambda *job: services.off_loop(*job),
            services.bulk,
        )

    # -- routes --------------------------------------------------------------------------

    async def begin(self, request: Request, sink: str) -> Response:
        """Answer POST /v1/sinks/{sink}: begin the next epoch, or with `epoch` exactly that one.

        With `once` the sink is a single-use sink, for one batch.
        """
        epoch = integer(request, "epoch", 0, minimum=1, maximum=MAX_EPOCH)
        once = _once(request)
        if once and epoch:
            raise Problem(
                "invalid",
                "the epoch of a single-use sink is chosen by the coordinator",
                field="epoch",
                value=epoch,
            )
        named = key_of(request) or self._services.rng.randbytes(16).hex()
        await self._made()
        answer = await self._steps.ask_coordinator(
            "begin",
            id_of(sink),
            name=sink,
            epoch=epoch,
            request=named,
            once=once,
            principal=owner_of(request),
        )
        return Response.json(_described(sink, answer.sink))

    async def describe(self, request: Request, sink: str) -> Response:
        """Answer GET /v1/sinks/{sink} with the sink's epoch and last committed batch."""
        await self._refresh_for({TOPIC})
        known = TOPIC in self._services.view.topics()
        answer = await self._steps.ask_coordinator("status", id_of(sink)) if known else SinkAnswer(Sink(""))
        if not answer.sink.is_listed:
            raise Problem(
                "no_such_sink",
                f"there is no sink {sink!r}",
                field="sink",
                value=sink,
                limit=answer.sink.last_epoch or None,
            )
        return Response.json(_described(sink, answer.sink))

    async def sinks(self, request: Request) -> Response:
        """Answer GET /v1/sinks?prefix=&limit=&after=: a page of the sinks that the principal may write."""
        prefix, after = request.query.get("prefix", ""), request.query.get("after", "")
        limit = integer(request, "limit", 100, minimum=1, maximum=MAX_PAGE)
        principal = principal_of(request)
        await self._refresh_for({TOPIC})
        found: list[Sink] = []
        if TOPIC in self._services.view.topics():
            asked = [
                ListRequest(TOPIC, number, each, after, limit + 1)
                for each in principal.prefixes("write", within=prefix)
                for number in range(COORDINATORS)
            ]
            for each in await asyncio.gather(*(self._steps.at_leader(one, list[Sink]) for one in asked)):
                found += each
        found.sort(key=lambda sink: sink.name)
        page = [sink for sink in found[:limit] if principal.may("write", sink.name)]
        answer = documents.SinkPage([_described(sink.name, sink) for sink in page])
        headers = []
        if len(found) > limit:
            last = found[limit - 1].name
            answer.next = last if principal.may("write", last) else AFTER_SYSTEM
            headers.append(next_link("/v1/sinks", prefix=prefix, limit=limit, after=answer.next))
        return Response.json(answer, headers=headers)

    async def delete(self, request: Request, sink: str) -> Response:
        """Answer DELETE /v1/sinks/{sink}: end its epochs, then remove its entries from all partitions."""
        named = key_of(request) or self._services.rng.randbytes(16).hex()
        await self._refresh_for({TOPIC})
        if TOPIC not in self._services.view.topics():
            raise Problem("no_such_sink", f"there is no sink {sink!r}", field="sink", value=sink)
        known = (await self._steps.ask_coordinator("delete", id_of(sink), request=named)).sink
        if known.deletion is Deletion.BEGUN:
            await self._forget(id_of(sink), known.epoch)
            await self._steps.ask_coordinator("deleted", id_of(sink), epoch=known.epoch)
        return Response(204)

    async def _forget(self, sink: bytes, epoch: int) -> None:
        """Ask all partitions in the view to forget a sink. Partitions created later never knew it."""
        await self._services.refresh_view()
        rest = [
            ForgetRequest(record.topic, record.number, sink, epoch, record.group)
            for record in self._services.view.partitions().values()
            if record.topic != TOPIC
        ]
        while rest:
            at_once, rest = rest[:FORGOTTEN_AT_ONCE], rest[FORGOTTEN_AT_ONCE:]
            done = await asyncio.gather(*map(self._forget_in, at_once), return_exceptions=True)
            for error in done:
                if isinstance(error, BaseException):
                    raise error

    async def _forget_in(self, request: ForgetRequest) -> None:
        try:
            await self._steps.at_leader(request, type(None))
        except Problem:
            if not await self._steps.is_gone(Target(request.topic, request.partition, request.group)):
                raise

    async def stage(self, request: Request, sink: str, number: str) -> Response:
        """Answer POST /v1/sinks/{sink}/batches/{number}/stages?topic=&partition=&stage=&epoch=."""
        for name in ("topic", "partition", "stage", "epoch"):
            if name not in request.query:
                raise Problem("invalid", f"the query parameter {name} is required", field=name)
        topic = request.query["topic"]
        _refuse_system(topic, field="topic")
        await self._refresh_for({topic}, [(topic, request.query["partition"])])
        record = self._topics.partition_record(topic, request.query["partition"])
        if policy_of(self._topics.record(topic).settings).is_interval:
            raise Problem(
                "invalid",
                "transactions require partitions with the flush policy `commit`",
                field="flush",
                value="interval",
                limit="commit",
            )
        append = await self._decoding.parsed(request)
        if append.records is not None:
            frame = append.records.build()
        else:
            frame = _joined(append.frames)
        times = RecordBatch(frame).delivery_times
        if times is not None and max(time or 0 for time in times) > self._services.clock.wall_ms():
            raise Problem(
                "invalid",
                "records of a transaction cannot be delayed",
                field="deliver_at",
                value=max(time or 0 for time in times),
                outcome="not_applied",
            )
        stage = integer(request, "stage", 0, maximum=MAX_NUMBER)
        asked = StageRequest(
            topic,
            record.number,
            id_of(sink),
            int(number),
            integer(request, "epoch", 0, maximum=MAX_EPOCH),
            stage,
            bytes(frame),
            route_said(request.headers),
        )
        async with self._services.bulk.share(client_of(request), len(frame)):
            count = await self._steps.at_leader(asked, int)
        return Response.json(documents.Staged(topic, record.number, stage, count), status=201)

    async def prepare_stages(self, request: Request, sink: str, number: str) -> Response:
        """Answer POST /v1/sinks/{sink}/batches/{number}/prepared: prepare stages before their commit."""
        body = json_body(request, documents.Prepare)
        principal_of(request).require("write", body.topic)
        _refuse_system(body.topic, field="topic")
        await self._refresh_for({body.topic, TOPIC}, [(body.topic, str(body.partition))])
        self._topics.partition_record(body.topic, str(body.partition))
        known = Sink("")
        if TOPIC in self._services.view.topics():
            known = await self._steps.status(id_of(sink))
        # Prepared stages are retained until a newer epoch begins: under an epoch that never began, for ever.
        refuse_epoch(known, body.epoch)
        await self._prepare_for_driver(
            PrepareRequest(body.topic, body.partition, id_of(sink), int(number), body.epoch, body.stages)
        )
        return Response.json(documents.Prepared(body.topic, body.partition, len(set(body.stages))))

    async def _prepare_for_driver(self, request: PrepareRequest) -> None:
        try:
            await self._steps.at_leader(request, Prepared)
        except Problem as problem:
            if problem.code != "no_stage":
                raise
            # The batch may have been committed, and the partition may have forgotten it: ask the coordinator.
            known = await self._steps.status(request.sink)
            refuse_epoch(known, request.epoch)
            if request.number > known.number:
                raise
            raise Problem(
                "already_committed",
                f"batch {known.number} of this sink is committed",
                field="number",
                value=request.number,
                limit=known.number,
                outcome="not_applied",
            ) from problem

    async def commit(self, request: Request, sink: str, number: str) -> Response:
        """Answer PUT /v1/sinks/{sink}/batches/{number}: commit a batch over all its partitions."""
        body = json_body(request, documents.Commit)
        parts = body.parts
        principal = principal_of(request)
        for topic in {part.topic: None for part in parts if part.acks}:
            principal.require("read", topic)
        for topic in {part.topic: None for part in parts if part.stages or part.prepared or not part.acks}:
            principal.require("write", topic)
        await self._refresh_for(
            {part.topic for part in parts}, [(part.topic, str(part.partition)) for part in parts]
        )
        for place, part in enumerate(parts):
            _refuse_system(part.topic, field=f"parts.{place}.topic")
            self._topics.partition_record(part.topic, str(part.partition))
            if bool(part.stages) + bool(part.prepared) != 1 and not (part.acks and not part.stages):
                raise Problem(
                    "invalid",
                    "a part must have `stages`, or `prepared` (their number), or only `acks`",
                    field=f"parts.{place}.stages",
                    value=len(part.stages),
                )
        if len({(part.topic, part.partition) for part in parts}) != len(parts):
            raise Problem("invalid", "each partition may be named only once", field="parts")
        await self._made()
        answer = await self._steps.ask_coordinator(
            "commit",
            id_of(sink),
            number=int(number),
            epoch=body.epoch,
            parts=await self._parts(parts),
            fingerprint=body.fingerprint,
        )
        return Response.json(
            documents.Committed(sink, int(number), "applied" if answer.applied else "already")
        )

    async def _parts(self, parts: Sequence[documents.CommitPart]) -> list[Part]:
        """Convert the parts of a commit to the form of its coordinator. Raises `Problem`: 422, 503."""
        named: dict[tuple[int, int], list[Named]] = {}
        total = 0
        for place, part in enumerate(parts):
            for at, acks in enumerate(part.acks):
                tokens = named[place, at] = tokens_of(part, acks, field=f"parts.{place}.acks.{at}")
                total += sum(each.end - each.first for each in tokens)
        if total > MAX_ACKS:
            raise Problem(
                "invalid",
                f"a batch can acknowledge at most {MAX_ACKS:,} jobs",
                field="parts.acks",
                value=total,
                limit=MAX_ACKS,
                hint="Commit more often.",
            )
        if named:
            await check_pins(self._services)
        if not all(self._channel_id(part.topic, acks.channel) for part in parts for acks in part.acks):
            await self._services.refresh_view()
        return [
            Part(
                topic=part.topic,
                partition=part.partition,
                stages=part.stages,
                prepared=part.prepared,
                acks=[
                    PartAcks(self._channel_id(part.topic, acks.channel), named[place, at])
                    for at, acks in enumerate(part.acks)
                ],
            )
            for place, part in enumerate(parts)
        ]

    def _channel_id(self, topic: str, name: str) -> int:
        """Return the id of a channel in this view; 0 if the view has no such channel.

        The partition decides whether 0 is an error: a batch that is repeated may be committed already, and
        its channel deleted since.
        """
        found = (self._topics.record(topic).channels or {}).get(name)
        return 0 if found is None else found.id

    async def take_name(self, name: str, producer: bytes, request: str, *, principal: str) -> Sink:
        """Raise the epoch of a producer's name at its coordinator; `producer` is the id of a new name.

        A new name counts for the limits of `principal`; for none if that is empty.
        """
        await self._made()
        answer = await self._steps.ask_coordinator(
            "name", id_of_name(name), name=name, producer=producer, request=request, principal=principal
        )
        return answer.sink

    async def _refresh_for(self, topics: set[str], partitions: Sequence[tuple[str, str]] = ()) -> None:
        """Refresh the view if it lacks one of the topics or partitions, which may be new."""
        known = topics <= self._services.view.topics().keys()
        if not known or not all(self._topics.knows(*each) for each in partitions):
            await self._services.refresh_view()

    async def _made(self) -> None:
        """Create the coordinators' topic unless it exists."""
        if TOPIC not in self._services.view.topics():
            await self._make_topic(TOPIC, partitions=COORDINATORS)


def _joined(frames: Sequence[memoryview]) -> bytearray:
    """Return the batches of a body, merged to one.

    Raises:
        Problem: 4xx if there are several batches and one of them has a producer id.
    """
    if len(frames) == 1:
        return bytearray(frames[0])
    try:
        return merge(frames)
    except BatchError as error:
        raise batch_problem(error) from error


def _once(request: Request) -> bool:
    text = request.query.get("once", "false")
    if text not in ("true", "false"):
        raise Problem("invalid", "once must be true or false", field="once", value=text, limit="true, false")
    return text == "true"


def _refuse_system(topic: str, *, field: str) -> None:
    if topic in SYSTEM_TOPICS:
        raise Problem("invalid", "this is an internal topic", field=field, value=topic)


def _described(name: str, sink: Sink) -> documents.Sink:
    return documents.Sink(
        sink=name,
        epoch=sink.epoch,
        committed=sink.number if sink.number >= 0 else None,
        publishing=sink.undone is not None,
        fingerprint=sink.fingerprint or None,
        once=sink.once,
        deleting=sink.deletion is Deletion.BEGUN,
        changed=format_time(sink.changed_ms),
    )
