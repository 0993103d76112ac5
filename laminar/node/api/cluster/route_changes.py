"""Routes of changes of a topic's key route: begin one, wait for it, cancel it.

The catalog records a change, and the catalog's leader carries it out (docs/routes.md), so no state is kept
here. A request that is repeated, at any node, finds the change that the first one began.
"""

from __future__ import annotations

import asyncio

from msgspec import UNSET

from laminar.http.api.documents import key_routes as documents
from laminar.http.api.parameters import MAX_WAIT_MS
from laminar.http.api.problems import Problem, over_limit
from laminar.http.protocol.messages import Request, Response
from laminar.node.api.cluster.cut_points import CutPoints
from laminar.node.api.cluster.key_routes import change_document
from laminar.node.api.cluster.topics import MORE_PARTITIONS
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.placement_call import PlacementCall
from laminar.node.api.common.query import integer
from laminar.node.api.common.services import ShardServices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import (
    BeginRouteRequest,
    CatalogRequest,
    RouteProgressRequest,
    RouteRequest,
)
from laminar.node.routes.lineage import order_setting_of
from laminar.node.routes.messages import RouteProgress
from laminar.node.transport.transport import TransportError
from membership.records import KeyRange, RouteChange, TopicRecord
from membership.requests import CancelChange
from membership.route_rules import route_of


class RouteChanges:
    """The handlers of the routes of key route changes."""

    def __init__(
        self,
        services: ShardServices,
        topics: TopicLookup,
        placement: PlacementCall,
        cut_points: CutPoints,
    ) -> None:
        self._services = services
        self._topics = topics
        self._placement = placement
        self._cut_points = cut_points

    async def begin(self, request: Request, topic: str) -> Response:
        """Answer POST /v1/topics/{topic}/routes: 202, or 200 if the same change is done already."""
        wanted = json_body(request, documents.NewRoute)
        await self._placement.newest_view()
        record = self._topics.record(topic)
        order = order_setting_of(record)
        if wanted.force and order == "strict":
            raise _wrong(
                "force", True, False, "the topic's `order` is strict: the order of keys must not be lost"
            )
        if wanted.after == route_of(record).version and record.change is None:
            inputs = self._inputs(record, wanted)
            cuts = wanted.cuts
            if wanted.into is not UNSET:
                cuts = await self._cut_points.of(topic, inputs[0], into=wanted.into)
        else:  # it is begun already, or refused
            cuts = _begun_cuts(record, wanted)
        answer = await self._ask(
            BeginRouteRequest(
                topic=topic,
                after=wanted.after,
                inputs=wanted.inputs,
                cuts=cuts,
                order=order,
                wait_ms=wanted.wait_ms,
                abandon=wanted.abandon,
                force=wanted.force,
                avoid=wanted.avoid,
            ),
            topic,
        )
        await self._placement.until_seen(answer.version)
        record = self._topics.record(topic)
        change = _change_to(record, wanted.after + 1)
        if change is None:
            raise self._no_route(topic, wanted.after + 1, await self._progress(topic))
        location = f"/v1/topics/{topic}/routes/{change.version}"
        return Response.json(
            await self._described(record, change),
            status=200 if change.state == "done" else 202,
            headers=[("Location", location)],
        )

    def _inputs(self, record: TopicRecord, wanted: documents.NewRoute) -> list[KeyRange]:
        """Check a request for a change; return the partitions that it replaces, in the order of their ranges.

        Raises:
            Problem: 422 `invalid`.
        """
        ranges = route_of(record).ranges
        numbers = [each.number for each in ranges]
        for number in wanted.inputs:
            limit = f"{len(numbers)} partitions of route {wanted.after}, each once"
            if wanted.inputs.count(number) > 1:
                raise _wrong("inputs", number, limit, "the partition is named twice")
            if number not in numbers:
                has_ended = number in record.all_numbers
                detail = "the partition has ended: others take its records" if has_ended else None
                raise _wrong("inputs", number, limit, detail or f"the topic has no partition {number}")
        inputs = [each for each in ranges if each.number in wanted.inputs]
        first, end = inputs[0].first, inputs[-1].first + inputs[-1].size
        if sum(each.size for each in inputs) != end - first:
            between = [each.number for each in ranges if first <= each.first < end]
            raise _wrong("inputs", wanted.inputs, between, "these partitions are not neighbours in the route")
        if len(inputs) > 1 and (wanted.cuts or wanted.into is not UNSET):
            raise _wrong(
                "inputs",
                len(inputs),
                1,
                "give several partitions to merge, or one to split",
            )
        if wanted.cuts and wanted.into is not UNSET:
            raise _wrong("into", wanted.into, None, "give cuts or `into`, not both")
        if wanted.into is not UNSET and wanted.into > end - first:
            raise _wrong("into", wanted.into, end - first, "each part needs at least one logical partition")
        before = first
        for cut in wanted.cuts:
            if not before < cut < end:
                limit = f"{before + 1} to {end - 1}"
                raise _wrong("cuts", cut, limit, "cuts must ascend, and lie inside the partition's range")
            before = cut
        unknown = sorted(set(wanted.avoid) - self._services.view.nodes().keys())
        if unknown:
            raise _wrong("avoid", unknown[0], sorted(self._services.view.nodes()), "there is no such node")
        return inputs

    async def describe(self, request: Request, topic: str, version: str) -> Response:
        """Answer GET /v1/topics/{topic}/routes/{version}; wait up to `wait_ms` for the change to end."""
        wait_ms = integer(request, "wait_ms", 0, maximum=MAX_WAIT_MS)
        await self._placement.newest_view()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            record = self._topics.record(topic)
            change = _change_to(record, int(version))
            left_s = deadline - loop.time()
            if change is None or change.state == "done" or left_s <= 0:
                break
            await self._services.view_change(left_s)
        if change is None:
            raise self._no_route(topic, int(version), await self._progress(topic))
        return Response.json(await self._described(record, change))

    async def cancel(self, request: Request, topic: str, version: str) -> Response:
        """Answer DELETE /v1/topics/{topic}/routes/{version}: cancel the change to this route."""
        await self._placement.newest_view()
        change = _change_to(self._topics.record(topic), int(version))
        if change is None:
            raise self._no_route(topic, int(version), RouteProgress())
        step = CancelChange(topic, change.id, self._services.clock.wall_ms())
        answer = await self._ask(RouteRequest(step), topic)
        await self._placement.until_seen(answer.version)
        return Response(204)

    # -- answers -------------------------------------------------------------------------

    async def _described(self, record: TopicRecord, change: RouteChange) -> documents.RouteChange:
        document = change_document(record, change)
        document.waits_for = []
        if change.state != "done":
            progress = await self._progress(record.name)
            if progress.id == change.id:
                document.waits_for = progress.waits_for
        return document

    async def _progress(self, topic: str) -> RouteProgress:
        """Ask the catalog's leader for the progress of the topic's change; empty if it does not answer."""
        try:
            answer = await self._services.ask_catalog(RouteProgressRequest(topic))
        except TransportError:
            return RouteProgress()
        return answer.progress or RouteProgress()

    def _no_route(self, topic: str, version: int, progress: RouteProgress) -> Problem:
        record = self._topics.record(topic)
        detail = f"the route of topic {topic!r} has version {route_of(record).version}"
        if progress.cancelled and progress.because:
            waited = "; ".join(progress.because)
            detail += f"; change {progress.cancelled} was cancelled, as it waited for: {waited}"
        return Problem(
            "no_such_route", detail, field="version", value=version, limit=route_of(record).version
        )

    async def _ask(self, request: CatalogRequest, topic: str) -> CatalogAnswer:
        """Ask the catalog's leader to perform a step, and return its answer.

        Raises:
            Problem: the catalog refused the step, or has no leader.
        """
        try:
            answer = await self._services.ask_catalog(request)
        except TransportError as error:
            raise Problem("no_leader", f"the catalog: {error}", outcome="unknown") from error
        if answer.error == "too_few_nodes":
            raise Problem(
                "too_few_nodes",
                f"the new partitions need {answer.value} nodes, and {answer.limit} may hold them",
                field="avoid",
                value=answer.value,
                limit=answer.limit,
                outcome="not_applied",
            )
        if answer.error == "precondition_failed":
            raise Problem(
                "precondition_failed",
                answer.detail or f"the route has version {answer.limit}",
                field="after",
                value=request.after if isinstance(request, BeginRouteRequest) else None,
                limit=answer.limit,
                outcome="not_applied",
            )
        if answer.error == "quota" and answer.what:
            raise over_limit(answer.what, answer.value, answer.limit, detail=answer.detail)
        if answer.error in ("invalid", "in_progress", "not_enabled", "quota"):
            quota = answer.error == "quota"
            raise Problem(
                answer.error,
                answer.detail or f"all topics together would have {answer.value} partitions",
                field="partitions" if quota else None,
                value=answer.value or None,
                limit=answer.limit or None,
                hint=MORE_PARTITIONS if quota and answer.limit else None,
                outcome="not_applied",
            )
        if answer.error:
            raise Problem(
                "no_leader", answer.detail or "the catalog has no leader at the moment", outcome="unknown"
            )
        result = answer.result
        assert result is not None
        if result.outcome == "absent":
            raise Problem("no_such_topic", f"there is no topic {topic!r}", field="topic", value=topic)
        if result.outcome == "conflict":
            raise Problem("in_progress", result.detail, outcome="not_applied")
        if not result.ok:
            raise Problem("invalid", result.detail, outcome="not_applied")
        return answer


def _change_to(record: TopicRecord, version: int) -> RouteChange | None:
    """Return the change, finished or not, that leads to this version of the route; None if it is unknown."""
    if record.change is not None and record.change.version == version:
        return record.change
    return next((each for each in record.changes or () if each.version == version), None)


def _begun_cuts(record: TopicRecord, wanted: documents.NewRoute) -> list[int]:
    """Return the cuts of the change that an equal request began, or else those of the request."""
    change = _change_to(record, wanted.after + 1)
    if wanted.into is UNSET or change is None or len(change.outputs) != wanted.into:
        return wanted.cuts
    return [each.first for each in change.outputs[1:]]


def _wrong(field: str, value: object, limit: object, detail: str) -> Problem:
    return Problem("invalid", detail, field=field, value=value, limit=limit, outcome="not_applied")
