"""Requests that change a topic's route: the decisions of the catalog's leader before a change begins.

A change replaces its *inputs* (neighbouring partitions, which end) by its *outputs* (new partitions over the
same keys). The leader places the outputs on nodes that answer, and gives the reason if a change cannot begin.
The rules in `membership.route_rules` decide once more, when the command is applied.
"""

from __future__ import annotations

import random
from typing import Protocol

from laminar.node.catalog.group import CatalogGroup
from laminar.node.catalog.messages.requests import BeginRouteRequest
from laminar.node.catalog.node_directory import NodeDirectory
from laminar.node.host.clock import Clock
from laminar.node.placement.wanted import zones_of
from membership.records import Pin, TopicRecord
from membership.requests import (
    BeginChange,
    CloseChange,
    PinPartition,
    Result,
)
from membership.route_rules import route_of
from router import partition_hash, place

# How often a change of a route is begun again, because what its placement rests on has changed meanwhile.
BEGIN_TRIES = 3
SYSTEM_TOPIC = "_transactions"
"""As in `laminar.node.transactions.coordinator`: a sink's name selects one of its partitions for good."""

ROUTE_OWNER = "route"
"""The owner of the pins of partitions that a change of a route keeps off some nodes."""


class Refused(Exception):
    """The request is refused. `error` is a code of the HTTP error table; the rest goes into the problem."""

    def __init__(
        self, error: str, detail: str = "", *, value: int = 0, limit: int = 0, what: str = ""
    ) -> None:
        """Make the refusal; `what` names the limit if it is one of a principal's."""
        super().__init__(detail or error)
        self.error = error
        self.detail = detail
        self.value = value
        self.limit = limit
        self.what = what


class Placing(Protocol):
    """The catalog leader's knowledge of the nodes on which new partitions may be placed."""

    async def until_known(self, wanted: int) -> None:
        """Wait a short time until at least `wanted` nodes are up, and gossip has heard from all."""

    def weights_for(self, replicas: int) -> dict[str, float]:
        """Return, by node, the placement weights of the nodes that answer now; of all if too few answer."""


class RouteRequests:
    """Begins changes of routes, on the catalog's leader: checks the request, places the outputs, proposes."""

    def __init__(
        self,
        directory: NodeDirectory,
        placing: Placing,
        *,
        clock: Clock,
        rng: random.Random,
        max_partitions: int,
    ) -> None:
        self._directory = directory
        self._placing = placing
        self._clock = clock
        self._rng = rng
        self._max_partitions = max_partitions

    async def begin(self, group: CatalogGroup, request: BeginRouteRequest) -> Result:
        """Begin a change of a topic's route, with new group ids and a placement of its outputs.

        Raises:
            Refused: see `BeginRouteRequest`.
            NotEnabled: a node's program does not know routes.
        """
        if request.topic == SYSTEM_TOPIC:
            detail = f"topic {request.topic!r} belongs to the system, and keeps its partitions"
            raise Refused("invalid", detail=detail)
        catalog = group.catalog
        for _ in range(BEGIN_TRIES):
            topic = catalog.state().topics.get(request.topic)
            if topic is None:
                return Result("absent", catalog.state().version)
            await self._check_place(group, request, topic)
            result = await catalog.change_route(self._begun(group, request))
            result = await self._forced(group, request, result) or result
            if result.outcome != "conflict":
                break
            _check_conflict(request, result)
        if result.outcome in ("invalid", "failed"):
            raise Refused("invalid", detail=result.detail)
        if result.outcome == "quota":
            raise Refused(
                "quota", detail=result.detail, value=result.value, limit=result.limit, what=result.what
            )
        if result.ok and request.avoid:
            await _pin_outputs(group, request, result)
        return result

    async def _check_place(self, group: CatalogGroup, request: BeginRouteRequest, topic: TopicRecord) -> None:
        """Raise `Refused` if the outputs of a change can't be placed now."""
        state = group.catalog.state()
        if topic.change is not None or route_of(topic).version != request.after:
            return  # what is under way or done was placed
        partitions = len(state.partitions) + len(request.cuts) + 1
        if partitions > self._max_partitions:
            raise Refused("quota", value=partitions, limit=self._max_partitions)
        wanted = _replicas_of_outputs(group, request, topic)
        await self._placing.until_known(wanted)
        fit = self._directory.placement_weights().keys() - set(request.avoid)
        if len(fit) < wanted:
            raise Refused("too_few_nodes", value=wanted, limit=len(fit))

    def _begun(self, group: CatalogGroup, request: BeginRouteRequest) -> BeginChange:
        """Return the command that begins the requested change, with its outputs placed on nodes."""
        state = group.catalog.state()
        topic = state.topics.get(request.topic)
        outputs = len(request.cuts) + 1
        placement: list[list[str]] = [[] for _ in range(outputs)]
        if topic is not None:
            first = topic.next_partition or topic.partitions
            weights = {
                node: weight
                for node, weight in self._placing.weights_for(topic.replicas).items()
                if node not in request.avoid
            }
            zones = zones_of(state)
            placement = [
                place(partition_hash(topic.name, first + each), weights, topic.replicas, zones=zones)
                for each in range(outputs)
            ]
        return BeginChange(
            topic=request.topic,
            after=request.after,
            inputs=request.inputs,
            cuts=request.cuts,
            groups=[self._rng.randbytes(16) for _ in range(outputs)],
            placement=placement,
            order=request.order,
            begun_ms=self._clock.wall_ms(),
            wait_ms=request.wait_ms,
            abandon=request.abandon,
            force=request.force,
        )

    async def _forced(self, group: CatalogGroup, request: BeginRouteRequest, result: Result) -> Result | None:
        """Force the change that an equal request has begun, if it is closing; return the result or None."""
        change = None if result.topic is None else result.topic.change
        if result.outcome != "exists" or not request.force or change is None or change.state != "closing":
            return None
        return await group.catalog.change_route(CloseChange(request.topic, change.id, force=True))


def _replicas_of_outputs(group: CatalogGroup, request: BeginRouteRequest, topic: TopicRecord) -> int:
    """Return how many replicas an output needs: as many as an input has, and no more than the topic asks for.

    The inputs have fewer than the topic asks for if it was created while too few nodes were there.
    """
    partitions = group.catalog.state().partitions
    inputs = [partitions.get(f"{topic.name}/{number}") for number in request.inputs]
    held = [len(each.replicas) for each in inputs if each is not None]
    least = int(topic.settings.get("min_replicas", 1))
    return min(topic.replicas, max(least, *held, 1))


def _check_conflict(request: BeginRouteRequest, result: Result) -> None:
    """Raise `Refused` for a change that the topic's present route excludes: no other try can succeed."""
    topic = result.topic
    if topic is None:
        return
    if topic.change is not None:
        raise Refused("in_progress", detail=result.detail, value=topic.change.version)
    version = route_of(topic).version
    if version != request.after:
        raise Refused("precondition_failed", detail=result.detail, value=request.after, limit=version)


async def _pin_outputs(group: CatalogGroup, request: BeginRouteRequest, result: Result) -> None:
    """Pin the outputs of a change to the nodes that they were placed on."""
    change = None if result.topic is None else result.topic.change
    catalog = group.catalog
    for output in () if change is None else change.outputs:
        key = f"{request.topic}/{output.number}"
        record = catalog.state().partitions.get(key)
        if record is None or record.pin is not None:
            continue
        nodes = [each.node for each in record.replicas]
        reason = f"a change of the route keeps it off {', '.join(sorted(request.avoid))}"
        pin = PinPartition(key, record.version, Pin(nodes, ROUTE_OWNER, reason))
        await catalog.change_placement(pin)
