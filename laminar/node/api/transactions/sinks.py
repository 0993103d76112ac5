"""Sinks over HTTP: begin, stage, commit, and the steps of a commit between shards."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from laminar.batch import Batch as RecordBatch
from laminar.batch import BatchError, merge, verify
from laminar.http.api.append_body import batch_problem, parse_append
from laminar.http.api.deadlines import FORWARDED_SINK_STEP_S
from laminar.http.api.documents import transactions as documents
from laminar.http.api.names import SYSTEM_TOPICS
from laminar.http.api.parameters import MAX_EPOCH, MAX_NUMBER, MAX_PAGE
from laminar.http.api.problems import Problem
from laminar.http.api.records import Limits
from laminar.http.api.roles import AFTER_SYSTEM
from laminar.http.api.timestamps import format_time
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import owner_of, principal_of
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.leader_call import SINK_STEP, LeaderCall
from laminar.node.api.common.makers import maker_of
from laminar.node.api.common.query import integer, next_link
from laminar.node.api.common.services import MakeTopic, ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.background_decoding import BackgroundDecoding, client_of
from laminar.node.api.records.idempotency import key_of
from laminar.node.api.records.stale_routes import NOT_SAID, StaleRoutes, has_keys, route_said
from laminar.node.api.transactions.abandoned_stages import is_over
from laminar.node.api.transactions.acks import check_pins, tokens_of
from laminar.node.channels.deliveries import Deliveries
from laminar.node.channels.pinning import others_of
from laminar.node.partition.flush_policy import policy_of
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.pins import PartAcks
from laminar.node.partition.state.sinks import Deletion, Sink, Target
from laminar.node.transactions.coordinator import (
    TOPIC,
    Coordinator,
    Part,
    Prepared,
    id_of,
    id_of_name,
    refuse_epoch,
)
from laminar.node.transactions.participant import Batch, Participant
from laminar.node.transport.transport import Peer
from laminar.wire.channels import MAX_ACKS, Named
from laminar.wire.key_route import Route, logical_of_key

COORDINATORS = 8
CHECK_S = 0.5
# The most partitions that are asked at the same time to forget a sink.
FORGOTTEN_AT_ONCE = 64
_PLACES = [(TOPIC, number) for number in range(COORDINATORS)]


class StageRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to a partition's leader to store a batch of records as a stage."""

    topic: str
    partition: int
    sink: bytes
    number: int
    epoch: int
    stage: int
    frame: bytes
    # The version of the route by which its client chose the partition.
    route: int = NOT_SAID


class PrepareRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to a partition's leader to prepare stages, or to count the prepared ones.

    The answer is a `Prepared`.
    """

    topic: str
    partition: int
    sink: bytes
    number: int
    epoch: int
    stages: list[int]
    prepared: int = 0
    # The jobs that the batch acknowledges there, to be pinned. Without stages they are the whole part.
    acks: list[PartAcks] = []


class PublishRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to a partition's leader to publish a prepared batch, if the partition's id is still `group`."""

    topic: str
    partition: int
    sink: bytes
    number: int
    epoch: int
    group: bytes
    prepare_index: int = 0
    # See `Target`.
    pin_index: int = 0
    has_records: bool = True


class ForgetRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to a partition's leader to forget a deleted sink's epochs up to this one."""

    topic: str
    partition: int
    sink: bytes
    epoch: int
    group: bytes


class ListRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to a coordinator to list its first `limit` sinks after `after`, with names like `prefix*`."""

    topic: str
    partition: int
    prefix: str
    after: str
    limit: int


class OverRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to a coordinator for those of these sinks that have no batch under way."""

    topic: str
    partition: int
    sinks: list[bytes]


class SinkRequest(msgspec.Struct, frozen=True, array_like=True):
    """Request to a coordinator to carry out an `operation` on a sink.

    The operations are: `begin` an epoch; return the sink's `status`; `end` an epoch; `commit` `parts` as
    batch `number`; `fence` (make it impossible that batch `number` is decided under `epoch`); `name` (give
    the next epoch of a producer's name, with the id `producer` if the name is new); `delete` (begin to delete
    the sink); `deleted` (finish that, after all partitions have forgotten the sink).
    """

    topic: str
    partition: int
    operation: str
    sink: bytes
    name: str = ""
    number: int = 0
    epoch: int = 0
    parts: list[Part] = []
    producer: bytes = b""
    # The client's name for this request, of `begin`, `name` or `delete`, so that it may be repeated.
    request: str = ""
    # For `begin`: the sink is single-use, for one batch.
    once: bool = False
    # For `commit`: the driver's digest of the batch, which distinguishes it from others of this number.
    fingerprint: str = ""
    # For `begin` and `name`: the principal that counts as creator of a new sink or name; empty if there is
    # none.
    principal: str = ""


class SinkAnswer(msgspec.Struct, frozen=True, array_like=True):
    """A coordinator's answer: the sink's state, and whether this very request committed the batch."""

    sink: Sink
    applied: bool = False


AnyRequest = (
    StageRequest | PrepareRequest | PublishRequest | ForgetRequest | ListRequest | OverRequest | SinkRequest
)


class SinkRoutes:
    """The handlers of the routes of sinks, and of other shards' requests about sinks."""

    def __init__(
        self,
        services: ShardServices,
        leaders: LeaderCall,
        topics: TopicLookup,
        *,
        deliveries: Deliveries,
        make_topic: MakeTopic,
        limits: Limits,
    ) -> None:
        self._services = services
        self._deliveries = deliveries
        self._leaders = leaders
        self._topics = topics
        self._stale = StaleRoutes(topics)
        self._make_topic = make_topic
        self._decoding = BackgroundDecoding(
            lambda request: (
                request.parsed or parse_append(request, limits=limits, now_ms=services.clock.wall_ms)
            ),
            lambda *job: services.off_loop(*job),
            services.bulk,
        )
        self._loop = asyncio.get_running_loop()
        self._coordinators: dict[int, Coordinator] = {}
        self._route = Route.even(COORDINATORS)
        services.every(CHECK_S, self._go_on, to_the_end=True)

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
        answer = await self._ask_coordinator(
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
        """Answer GET /v1/sinks/{sink}."""
        await self._refresh_for({TOPIC})
        known = TOPIC in self._services.view.topics()
        answer = await self._ask_coordinator("status", id_of(sink)) if known else SinkAnswer(Sink(""))
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
            for each in await asyncio.gather(*(self._at_leader(one, list[Sink]) for one in asked)):
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
        known = (await self._ask_coordinator("delete", id_of(sink), request=named)).sink
        if known.deletion is Deletion.BEGUN:
            await self._forget(id_of(sink), known.epoch)
            await self._ask_coordinator("deleted", id_of(sink), epoch=known.epoch)
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
            await self._at_leader(request, type(None))
        except Problem:
            if not await self._is_gone(Target(request.topic, request.partition, request.group)):
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
            count = await self._at_leader(asked, int)
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
            known = await self.status(id_of(sink))
        # Prepared stages are retained until a newer epoch begins: under an epoch that never began, for ever.
        refuse_epoch(known, body.epoch)
        await self._prepare_for_driver(
            PrepareRequest(body.topic, body.partition, id_of(sink), int(number), body.epoch, body.stages)
        )
        return Response.json(documents.Prepared(body.topic, body.partition, len(set(body.stages))))

    async def _prepare_for_driver(self, request: PrepareRequest) -> None:
        try:
            await self._at_leader(request, Prepared)
        except Problem as problem:
            if problem.code != "no_stage":
                raise
            # The batch may have been committed, and the partition may have forgotten it: ask the coordinator.
            known = await self.status(request.sink)
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
        """Answer PUT /v1/sinks/{sink}/batches/{number}."""
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
        answer = await self._ask_coordinator(
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
        answer = await self._ask_coordinator(
            "name", id_of_name(name), name=name, producer=producer, request=request, principal=principal
        )
        return answer.sink

    # -- what `AbandonedStages` asks ---------------------------------------------------------

    async def status(self, sink: bytes) -> Sink:
        """Return the sink's committed state from its coordinator."""
        return (await self._ask_coordinator("status", sink)).sink

    async def over(self, sinks: Sequence[bytes]) -> list[bytes]:
        """Return those of the sinks that have no batch under way, by their coordinators' committed state.

        Sinks whose coordinators do not answer are left out.
        """
        by_place: dict[int, list[bytes]] = {}
        for sink in sinks:
            by_place.setdefault(self._route.partition_of(logical_of_key(sink)), []).append(sink)
        answers = await asyncio.gather(
            *(
                self._at_leader(OverRequest(TOPIC, place, some), list[bytes])
                for place, some in by_place.items()
            ),
            return_exceptions=True,
        )
        found: list[bytes] = []
        for answer in answers:
            if isinstance(answer, list):
                found += answer
            elif not isinstance(answer, Problem):
                raise answer
        return found

    async def end(self, sink: bytes, epoch: int) -> Sink:
        """End `epoch` of a single-use sink, so that no batch is decided under it; return the sink."""
        return (await self._ask_coordinator("end", sink, epoch=epoch)).sink

    async def fence(self, sink: bytes, epoch: int, number: int) -> Sink:
        """Make it impossible that batch `number` is decided under `epoch`; return the sink."""
        return (await self._ask_coordinator("fence", sink, epoch=epoch, number=number)).sink

    # -- finding leaders -------------------------------------------------------------------

    async def _refresh_for(self, topics: set[str], partitions: Sequence[tuple[str, str]] = ()) -> None:
        """Refresh the view if it lacks one of the topics or partitions, which may be new."""
        known = topics <= self._services.view.topics().keys()
        if not known or not all(self._topics.knows(*each) for each in partitions):
            await self._services.refresh_view()

    async def _made(self) -> None:
        """Create the coordinators' topic unless it exists."""
        if TOPIC not in self._services.view.topics():
            await self._make_topic(TOPIC, partitions=COORDINATORS)

    async def _ask_coordinator(self, operation: str, sink: bytes, **more: Any) -> SinkAnswer:
        number = self._route.partition_of(logical_of_key(sink))
        request = SinkRequest(TOPIC, number, operation, sink, **more)
        answer: SinkAnswer = await self._at_leader(request, SinkAnswer)
        return answer

    async def _at_leader(self, request: AnyRequest, kind: type[Any]) -> Any:
        """Send a request to its partition's leader, and return the answer."""
        return await self._leaders.ask(
            "sinks",
            request,
            kind,
            here=self._do,
            policy=SINK_STEP,
            timeout_s=FORWARDED_SINK_STEP_S,
            payload=(type(request).__name__, request),
        )

    async def on_sinks(self, peer: Peer, payload: bytes) -> Any:
        """Carry out a request of another shard, on a partition that this shard leads."""
        name, raw = msgspec.msgpack.decode(payload, type=tuple[str, msgspec.Raw])
        request: AnyRequest = msgspec.msgpack.decode(raw, type=_KINDS[name])
        return await self._do(self._leaders.led_here(request.topic, request.partition), request)

    async def _do(self, partition: Partition, request: AnyRequest) -> Any:
        """Carry out a request as the partition's leader."""
        if isinstance(request, SinkRequest):
            return await self._coordinate(self._coordinator(partition), request)
        if isinstance(request, ListRequest):
            coordinator = self._coordinator(partition)
            return await coordinator.listed(prefix=request.prefix, after=request.after, limit=request.limit)
        if isinstance(request, OverRequest):
            return await self._coordinator(partition).over(request.sinks)
        if isinstance(request, ForgetRequest):
            # Confirmed first: a deposed leader that has not noticed may not know all stages of the sink.
            await partition.reader.confirmed_end()
            await Participant(partition).forget(request.sink, request.epoch)
            for key in [each for each in partition.state.channels.pins if each[0] == request.sink]:
                if key[2] <= request.epoch:
                    await self._deliveries.of(partition).end_pins(key, done=False)
            return None
        batch = Batch(sink=request.sink, number=request.number, epoch=request.epoch)
        staging = Participant(partition)
        if isinstance(request, StageRequest):
            frame = bytearray(request.frame)
            header = verify(frame)
            known = partition.state.stages.stage(batch.key, request.stage)
            if self._stale.matter(partition) and known is None and has_keys(frame):
                self._stale.check(partition, request.route)
            await staging.stage(batch, request.stage, frame, header)
            return header.count
        if isinstance(request, PrepareRequest):
            return await self._prepare(partition, batch, request)
        if partition.replica.group != request.group:
            # This is another partition of that name. Only the catalog can say whether the one that is meant
            # was deleted.
            detail = f"{request.topic}/{request.partition} here is another group's"
            raise Problem("not_leader", detail, outcome="not_applied")
        steps: list[Coroutine[Any, Any, None]] = []
        if request.has_records:
            steps.append(self._publish(partition, batch, request.prepare_index))
        if request.pin_index:
            delivery = self._deliveries.of(partition)
            steps.append(delivery.end_pins(batch.key, done=True, index=request.pin_index))
        # The jobs of a decided batch are acknowledged, even if its records are lost.
        for done in await asyncio.gather(*steps, return_exceptions=True):
            if isinstance(done, BaseException):
                raise done
        return None

    async def _prepare(self, partition: Partition, batch: Batch, request: PrepareRequest) -> Prepared:
        """Prepare the stages of a part, if it has any, and pin the jobs that it acknowledges."""
        group, staging = partition.replica.group, Participant(partition)
        if request.acks:
            await self._end_older(partition, batch, request.acks)
            if not request.stages and not request.prepared:
                return Prepared(group, 0, await self._deliveries.of(partition).pin(batch.key, request.acks))
        preparing = (
            staging.confirm_prepared(batch, request.prepared)
            if request.prepared
            else staging.prepare(batch, request.stages)
        )
        # Read before any await, during which the batch may be published, so that its prepare no longer
        # counts.
        index = staging.prepare_index_of(batch)
        if not request.acks:
            await preparing
            return Prepared(group, index)
        pinning = self._deliveries.of(partition).pin(batch.key, request.acks)
        _, pin_index = await asyncio.gather(preparing, pinning)
        return Prepared(group, index, pin_index)

    async def _end_older(self, partition: Partition, batch: Batch, acks: Sequence[PartAcks]) -> None:
        """End the pins on these jobs of the sink's earlier batches that can no longer be decided.

        So a driver that tries again under a new epoch need not wait for `AbandonedPins`.
        """
        older = others_of(partition.state.channels, batch.key, acks)
        if not older:
            return
        known = await self.status(batch.sink)
        for key in older:
            if is_over(known, key, partition.replica.group):
                await self._deliveries.of(partition).end_pins(key, done=False)

    @staticmethod
    async def _publish(partition: Partition, batch: Batch, prepare_index: int) -> None:
        staging = Participant(partition)
        if not staging.knows(batch, prepare_index):
            # Confirmed first: a deposed leader that has not noticed may not know of the prepare, and must not
            # call it lost.
            await partition.reader.confirmed_end()
        await staging.publish(batch, prepare_index)

    async def _coordinate(self, coordinator: Coordinator, request: SinkRequest) -> SinkAnswer:
        if request.operation == "begin":
            begun = await coordinator.begin(
                request.sink,
                request.name,
                request.request,
                epoch=request.epoch,
                once=request.once,
                maker=maker_of(self._services.view, request.principal, "sinks"),
            )
            return SinkAnswer(begun)
        if request.operation == "name":
            return SinkAnswer(
                await coordinator.take_name(
                    request.sink,
                    request.name,
                    request.producer,
                    request.request,
                    maker=maker_of(self._services.view, request.principal, "producers"),
                )
            )
        if request.operation == "status":
            return SinkAnswer(await coordinator.status(request.sink))
        if request.operation == "delete":
            return SinkAnswer(await coordinator.delete(request.sink, request.request))
        if request.operation == "deleted":
            return SinkAnswer(await coordinator.deleted(request.sink, request.epoch))
        if request.operation == "end":
            return SinkAnswer(await coordinator.end(request.sink, request.epoch))
        if request.operation == "fence":
            return SinkAnswer(await coordinator.fence(request.sink, request.epoch, request.number))
        if request.operation != "commit":
            # The request comes from a node of a newer version.
            detail = f"this node knows no operation {request.operation!r} of sinks"
            raise Problem("invalid", detail, outcome="not_applied")
        applied = await coordinator.commit(
            request.sink, request.number, request.epoch, request.parts, request.fingerprint
        )
        return SinkAnswer(Sink("", request.epoch, request.number), applied)

    def _coordinator(self, partition: Partition) -> Coordinator:
        found = self._coordinators.get(partition.number)
        if found is None or found.partition is not partition:
            found = Coordinator(partition, self, spawn=self._services.spawn)
            self._coordinators[partition.number] = found
        return found

    # -- what a coordinator asks -------------------------------------------------------------

    async def prepare(self, sink: bytes, number: int, epoch: int, part: Part) -> Prepared:
        """Ask a partition's leader to prepare its part of a batch. Raises `Problem`."""
        request = PrepareRequest(
            part.topic, part.partition, sink, number, epoch, part.stages, part.prepared, part.acks
        )
        prepared: Prepared = await self._at_leader(request, Prepared)
        return prepared

    async def publish(self, sink: bytes, number: int, epoch: int, target: Target) -> None:
        """Ask a partition's leader to publish its prepared part of a batch. Raises `Problem`."""
        if await self._is_gone(target):
            return
        request = PublishRequest(
            *(target.topic, target.partition, sink, number, epoch, target.group, target.prepare_index),
            pin_index=target.pin_index,
            has_records=target.has_records,
        )
        await self._at_leader(request, type(None))

    async def _is_gone(self, target: Target) -> bool:
        """Return whether the partition was deleted; refresh the view first if that lacks it."""
        if self._has(target):
            return False
        await self._services.refresh_view()
        return not self._has(target)

    def _has(self, target: Target) -> bool:
        record = self._services.view.partition(target.topic, target.partition)
        return record is not None and record.group == target.group

    # -- in the background ---------------------------------------------------------------------

    def _go_on(self) -> None:
        """Publish batches that earlier leaders of coordinators led here have decided, but not published."""
        for place in _PLACES:
            partition = self._services.partitions.get(place)
            if partition is not None and partition.leads and partition.state.sinks.undone():
                self._coordinator(partition).finish_all()


_KINDS: dict[str, type[AnyRequest]] = {
    kind.__name__: kind
    for kind in (
        StageRequest,
        PrepareRequest,
        PublishRequest,
        ForgetRequest,
        ListRequest,
        OverRequest,
        SinkRequest,
    )
}


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
