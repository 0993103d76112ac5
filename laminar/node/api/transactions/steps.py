"""Steps of sinks and their transactions, each carried out by the leader of one partition.

The leaders of the partitions of `_transactions` coordinate: they begin epochs, decide batches and list sinks.
The leaders of the others hold stages: they store, prepare, publish and forget them. A step may be repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from laminar.batch import verify
from laminar.http.api.deadlines import FORWARDED_SINK_STEP_S
from laminar.http.api.problems import Problem
from laminar.node.api.common.leader_call import SINK_STEP, LeaderCall
from laminar.node.api.common.makers import maker_of
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.api.records.stale_routes import NOT_SAID, StaleRoutes, has_keys
from laminar.node.api.transactions.abandoned_stages import is_over
from laminar.node.channels.deliveries import Deliveries
from laminar.node.channels.pinning import others_of
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.pins import PartAcks
from laminar.node.partition.state.sinks import Sink, Target
from laminar.node.transactions.coordinator import (
    TOPIC,
    Coordinator,
    Part,
    Prepared,
)
from laminar.node.transactions.participant import Batch, Participant
from laminar.node.transport.transport import Peer
from laminar.wire.key_route import Route, logical_of_key

COORDINATORS = 8
CHECK_S = 0.5
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


class SinkSteps:
    """Asks partitions' leaders for steps of sinks, and carries out those of partitions led here."""

    def __init__(
        self, services: ShardServices, leaders: LeaderCall, topics: TopicLookup, deliveries: Deliveries
    ) -> None:
        self._services = services
        self._leaders = leaders
        self._deliveries = deliveries
        self._stale = StaleRoutes(topics)
        self._coordinators: dict[int, Coordinator] = {}
        self._route = Route.even(COORDINATORS)
        services.every(CHECK_S, self._go_on, to_the_end=True)

    # -- asking leaders ------------------------------------------------------------------------

    async def ask_coordinator(self, operation: str, sink: bytes, **more: Any) -> SinkAnswer:
        """Send an operation on a sink to the sink's coordinator, and return its answer. Raises `Problem`."""
        number = self._route.partition_of(logical_of_key(sink))
        request = SinkRequest(TOPIC, number, operation, sink, **more)
        answer: SinkAnswer = await self.at_leader(request, SinkAnswer)
        return answer

    async def at_leader(self, request: AnyRequest, kind: type[Any]) -> Any:
        """Send a request to its partition's leader, and return the answer. Raises `Problem`."""
        return await self._leaders.ask(
            "sinks",
            request,
            kind,
            here=self._do,
            policy=SINK_STEP,
            timeout_s=FORWARDED_SINK_STEP_S,
            payload=(type(request).__name__, request),
        )

    async def status(self, sink: bytes) -> Sink:
        """Return the sink's committed state from its coordinator."""
        return (await self.ask_coordinator("status", sink)).sink

    async def over(self, sinks: Sequence[bytes]) -> list[bytes]:
        """Return those of the sinks that have no batch under way, by their coordinators' committed state.

        Sinks whose coordinators do not answer are left out.
        """
        by_place: dict[int, list[bytes]] = {}
        for sink in sinks:
            by_place.setdefault(self._route.partition_of(logical_of_key(sink)), []).append(sink)
        answers = await asyncio.gather(
            *(
                self.at_leader(OverRequest(TOPIC, place, some), list[bytes])
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
        return (await self.ask_coordinator("end", sink, epoch=epoch)).sink

    async def fence(self, sink: bytes, epoch: int, number: int) -> Sink:
        """Make it impossible that batch `number` is decided under `epoch`; return the sink."""
        return (await self.ask_coordinator("fence", sink, epoch=epoch, number=number)).sink

    # -- at the leader -----------------------------------------------------------------------

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
        prepared: Prepared = await self.at_leader(request, Prepared)
        return prepared

    async def publish(self, sink: bytes, number: int, epoch: int, target: Target) -> None:
        """Ask a partition's leader to publish its prepared part of a batch. Raises `Problem`."""
        if await self.is_gone(target):
            return
        request = PublishRequest(
            *(target.topic, target.partition, sink, number, epoch, target.group, target.prepare_index),
            pin_index=target.pin_index,
            has_records=target.has_records,
        )
        await self.at_leader(request, type(None))

    async def is_gone(self, target: Target) -> bool:
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
