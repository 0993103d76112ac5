"""Routes of topics: create, describe, change, delete."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping

import msgspec

from laminar.http.api.documents import topics as documents
from laminar.http.api.documents.shared import Setting
from laminar.http.api.names import AUDIT_TOPIC, SYSTEM_TOPICS, TRACE_TOPIC
from laminar.http.api.parameters import MAX_NUMBER, MAX_PAGE, TOPIC_HAVING, TOPIC_SORTS
from laminar.http.api.problems import Problem, over_limit
from laminar.http.api.roles import What
from laminar.http.api.timestamps import format_time
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import owner_of, principal_of
from laminar.node.api.cluster.replica_status import ReplicaStatus
from laminar.node.api.cluster.topic_pages import Place, page_of
from laminar.node.api.cluster.topic_sums import TopicSumsRoute
from laminar.node.api.cluster.topic_sums import document as sums_document
from laminar.node.api.common.etags import changed, etag, names, required
from laminar.node.api.common.json_body import json_body
from laminar.node.api.common.placement_call import PlacementCall
from laminar.node.api.common.query import flag, integer, next_link, one_of
from laminar.node.api.common.services import ShardServices, check_enabled
from laminar.node.api.common.slices import in_slices
from laminar.node.api.common.topic_lookup import TopicLookup
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import (
    CatalogRequest,
    DeleteTopicRequest,
    TopicRequest,
    TopicSettingsRequest,
)
from laminar.node.transport.transport import TransportError
from membership.records import PartitionRecord, TopicRecord
from membership.requests import AlterTopic, Result

_NAME = re.compile(r"[A-Za-z0-9._-]{1,200}")
MORE_PARTITIONS = "Delete a topic, or set `max_partitions` higher on every node."
"""The hint of a refusal because of the quota of partitions."""

LOWEST_OF_AUDIT = {"retention_ms": 24 * 3_600_000, "retention_bytes": 16 << 20}
"""The lowest retention of `_audit`, so that an admin cannot delete the records of recent actions."""

_LOWEST = {
    AUDIT_TOPIC: LOWEST_OF_AUDIT,
    TRACE_TOPIC: {"retention_ms": 60_000, "retention_bytes": 1 << 20},
}
"""By internal topic: the settings that an admin may change, with the lowest value of each."""

LONGEST_NUMBER = 20
"""The most digits of a sum in `after`."""

IMPORTS_SINCE = 7
"""The code version from which on all nodes support imports of topics."""

LED_WAIT_S = 2.0
LED_RETRY_S = 0.02


class TopicRoutes:
    """The handlers of topic routes."""

    def __init__(
        self,
        services: ShardServices,
        topics: TopicLookup,
        states: ReplicaStatus,
        placement: PlacementCall,
        sums: TopicSumsRoute,
    ) -> None:
        self._services = services
        self._topics = topics
        self._states = states
        self._placement = placement
        self._sums = sums

    # -- resources -----------------------------------------------------------------------

    def _placed(self, record: TopicRecord) -> int:
        """Return the number of replicas of the topic's partition that has the fewest."""
        return _fewest_replicas(self._services.view.partitions_of(record.name))

    def _describe(self, record: TopicRecord) -> documents.Topic:
        partitions = {each.number: each for each in self._services.view.partitions_of(record.name)}
        is_live = all(
            number in partitions and partitions[number].state == "live" for number in record.numbers
        )
        return documents.Topic(
            topic=record.name,
            partitions=record.partitions,
            replicas=record.replicas,
            replicas_placed=_fewest_replicas(partitions.values()),
            settings=record.settings,
            route=self._topics.route(record).version,
            state="live" if is_live and "importing" not in record.settings else "creating",
            created=format_time(record.created_ms),
            version=record.version,
        )

    async def topics(self, request: Request) -> Response:
        """Answer GET /v1/topics with a page of the topics on which the principal has a role."""
        prefix, contains = request.query.get("prefix", ""), request.query.get("contains", "")
        limit = integer(request, "limit", 100, minimum=1, maximum=MAX_PAGE)
        sort, with_sums = one_of(request, "sort", TOPIC_SORTS), flag(request, "stats")
        having = one_of(request, "having", TOPIC_HAVING) if "having" in request.query else ""
        after = request.query.get("after", "")
        needs_sums = with_sums or sort != "name" or having == "cursors"
        sums = await self._sums.of_cluster() if needs_sums else None
        # A topic's place: (0, name), or with a sort by a sum (-sum, name).
        begin: tuple[int, str] = (0, after)
        if sort != "name":
            begin = _place_in(after, sort) if after else (-MAX_NUMBER, "")
        column = TOPIC_SORTS.index(sort)
        topics = self._services.view.topics()
        # Whether a topic has cursors is for those who may list them.
        needed: What = "read" if having == "cursors" else "describe"
        shown = principal_of(request).among(topics, needed, within=prefix)
        wanted = contains.lower()

        def is_wanted(name: str) -> bool:
            if wanted not in name.lower():
                return False
            if having == "channels":
                return bool(topics[name].channels)
            return having == "" or (sums is not None and name in sums.with_cursors)

        def place(name: str) -> Place:
            return (0 if sums is None or sort == "name" else -sums.of(name)[column], name)

        clock = self._services.clock
        found, total = await page_of(
            (name for name in shown if is_wanted(name)), place, begin=begin, limit=limit, clock=clock
        )
        page = found[:limit]
        described: list[documents.Topic] = []

        def describe(place: Place) -> None:
            # It may have been deleted in the meantime.
            record = self._services.view.topics().get(place[1])
            if record is not None:
                described.append(self._describe(record))

        await in_slices(page, describe, clock=clock)
        answer = documents.TopicPage(described, total)
        if having == "cursors" and sums is not None:
            answer.silent = sums.silent_on_cursors
        elif with_sums and sums is not None:
            answer.silent = sums.silent
        if with_sums and sums is not None:
            for each in described:
                each.stats = sums_document(sums.of(each.topic), partitions=len(topics[each.topic].numbers))
        headers = []
        if len(found) > limit:
            value, name = page[-1]
            answer.next = name if sort == "name" else f"{-value}/{name}"
            given = {name: request.query.get(name, "") for name in ("contains", "sort", "stats", "having")}
            headers.append(next_link("/v1/topics", prefix=prefix, **given, limit=limit, after=answer.next))
        return Response.json(answer, headers=headers)

    async def topic(self, request: Request, topic: str) -> Response:
        """Answer GET /v1/topics/{topic} with the topic's settings and numbers."""
        record = self._topics.record(topic)
        if names(request.headers.get("if-none-match", ""), record.version):
            return Response(304, [etag(record.version)])
        return Response.json(self._describe(record), headers=[etag(record.version)])

    async def create(self, request: Request, topic: str) -> Response:
        """Answer PUT /v1/topics/{topic}, once every replica is created."""
        if _NAME.fullmatch(topic) is None or topic in (".", ".."):
            raise Problem(
                "invalid",
                "a topic's name has 1 to 200 of A-Z a-z 0-9 . _ - and is not . or ..",
                field="topic",
                value=topic,
                limit=200,
            )
        new = json_body(request, documents.NewTopic)
        replicas = self._default_replicas if new.replicas is None else new.replicas
        settings: dict[str, Setting] = msgspec.to_builtins(new.settings)
        _check_fewest(settings, replicas)
        if "importing" in settings:  # an older node would permit other clients to use the topic meanwhile
            await check_enabled(self._services, IMPORTS_SINCE, "an import")
        wanted = TopicRequest(
            topic, new.partitions, replicas, settings, new.allow_fewer_replicas, owner_of(request)
        )
        result = await self._make(wanted)
        if result.outcome == "already_exists":
            raise _already_exists(wanted, result.topic)
        record = self._topics.record(topic)
        described = self._describe(record)
        if result.outcome == "created":
            headers = [("Location", f"/v1/topics/{topic}"), etag(record.version)]
            return Response.json(described, status=201, headers=headers)
        return Response.json(described, headers=[etag(record.version)])

    @property
    def _default_replicas(self) -> int:
        return self._services.settings.default_replicas

    async def make(
        self, topic: str, *, partitions: int, settings: Mapping[str, Setting] | None = None
    ) -> None:
        """Create an internal topic unless it exists, with fewer replicas if there are too few nodes.

        The topic asks for `default_replicas` all the same, so that replicas are added when nodes join.
        """
        await self._make(
            TopicRequest(
                topic, partitions, self._default_replicas, dict(settings or {}), allow_fewer_replicas=True
            )
        )

    async def _make(self, wanted: TopicRequest) -> Result:
        answer = await self._ask(wanted)
        topic, result = wanted.name, answer.result
        assert result is not None
        if result.outcome != "already_exists":
            await self._until_seen(topic, answer.version)
            if self._describe(self._topics.record(topic)).state == "live":
                await self._until_led(topic)
        return result

    async def _until_seen(self, topic: str, version: int) -> None:
        """Wait up to 5 s until this shard's view has reached catalog `version`.

        Raises:
            Problem: 503 `being_created` if the topic is still missing then.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 5.0
        while loop.time() < deadline:
            if self._services.view.version >= version:
                break
            await self._services.view_change(0.2)
        if topic not in self._services.view.topics():
            raise Problem("being_created", f"topic {topic!r} is being created", retry_after_ms=500)

    async def _until_led(self, topic: str) -> None:
        """Wait up to `LED_WAIT_S` for a new topic's first elections, so that it is usable at once."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LED_WAIT_S
        wanted = set(self._topics.record(topic).numbers)
        while loop.time() < deadline:
            states = await self._states.of(topic)
            if wanted <= {state.partition for state in states.values() if state.leading}:
                return
            await asyncio.sleep(LED_RETRY_S)

    async def update(self, request: Request, topic: str) -> Response:
        """Answer PATCH /v1/topics/{topic}: change replicas and settings, if If-Match names the version."""
        version = await self._if_match(request, topic)
        patch = json_body(request, documents.TopicPatch)
        changes: dict[str, Setting | None] = msgspec.to_builtins(patch.settings)
        _check_system(topic, changes)
        _check_fewest(changes, self._placed(self._topics.record(topic)))
        if patch.replicas is msgspec.UNSET:
            answer = await self._ask(TopicSettingsRequest(topic, changes, version))
            self._changed(answer, topic)
        else:
            await self._alter(AlterTopic(topic, version, patch.replicas, changes), patch.allow_fewer_replicas)
        await self._wait_for_newer_view(topic, version)
        return await self.topic(request, topic)

    async def _alter(self, change: AlterTopic, allow_fewer_replicas: bool) -> None:
        """Change a topic's number of replicas; the planner adds or removes them.

        Raises:
            Problem: 422 for fewer than `min_replicas`; 503 `too_few_nodes`; 412 if the version has changed;
                or the catalog refuses the change.
        """
        record = self._topics.record(change.name)
        assert change.replicas is not None
        _check_fewest(record.settings | change.changes, change.replicas, field="replicas")
        result = await self._placement.once(
            change,
            absent=lambda: _no_such_topic(change.name),
            allow_fewer_replicas=allow_fewer_replicas,
        )
        if result.outcome == "conflict":
            now = record.version if result.topic is None else result.topic.version
            raise changed(f'"{change.version}"', now, what="topic")

    async def _wait_for_newer_view(self, topic: str, version: int) -> None:
        for _ in range(20):
            known = self._services.view.topics().get(topic)
            if known is None or known.version != version:
                return
            await self._services.view_change(0.1)

    async def delete(self, request: Request, topic: str) -> Response:
        """Answer DELETE /v1/topics/{topic}: its data goes to each node's trash."""
        version = await self._if_match(request, topic)
        answer = await self._ask(DeleteTopicRequest(topic, version))
        self._changed(answer, topic)
        await self._wait_for_newer_view(topic, version)
        return Response.json(documents.DeletedTopic(topic), status=202)

    async def _if_match(self, request: Request, topic: str) -> int:
        """Return the topic's version if If-Match names it; refresh the view first if it does not.

        Raises:
            Problem: 428 `if_match_required`, or 412 `precondition_failed`.
        """
        record = self._topics.record(topic)
        wanted = required(request.headers.get("if-match"), what="topic")
        if not names(wanted, record.version):
            await self._services.refresh_view()
            record = self._topics.record(topic)
        if not names(wanted, record.version):
            raise changed(wanted, record.version, what="topic")
        return record.version

    def _changed(self, answer: CatalogAnswer, topic: str) -> None:
        result = answer.result
        assert result is not None
        if result.outcome == "conflict":
            raise Problem(
                "precondition_failed",
                result.detail or "the topic has changed in the meantime",
                field="if-match",
            )
        if result.outcome == "absent":
            raise _no_such_topic(topic)

    async def _ask(self, request: CatalogRequest) -> CatalogAnswer:
        """Ask the catalog's leader and return its answer. Every request compares and sets: a retry is safe.

        Raises:
            Problem: the catalog refused the request, or has no leader.
        """
        try:
            answer = await self._services.ask_catalog(request)
        except TransportError as error:
            raise Problem("no_leader", f"the catalog: {error}", outcome="unknown") from error
        if answer.error == "too_few_nodes":
            assert isinstance(request, TopicRequest)
            raise _too_few_nodes(request, answer)
        if answer.error == "quota" and answer.what:
            raise over_limit(answer.what, answer.value, answer.limit, detail=answer.detail)
        if answer.error == "quota":
            raise Problem(
                "quota",
                f"all topics together would have {answer.value} partitions",
                field="partitions",
                value=answer.value,
                limit=answer.limit,
                hint=MORE_PARTITIONS,
            )
        if answer.error:
            raise Problem(
                "no_leader", answer.detail or "the catalog has no leader at the moment", outcome="unknown"
            )
        result = answer.result
        assert result is not None
        if result.outcome in ("invalid", "failed"):
            raise Problem("invalid", result.detail)
        if result.outcome == "conflict" and isinstance(request, TopicRequest):
            raise Problem(
                "no_leader", f"the catalog changed in the meantime: {result.detail}", outcome="not_applied"
            )
        return answer


def _fewest_replicas(partitions: Iterable[PartitionRecord]) -> int:
    return min((len(each.replicas) for each in partitions), default=0)


def _place_in(after: str, sort: str) -> tuple[int, str]:
    """Decode `after` in a list that is sorted by a sum: return the sort key and name of the last topic shown.

    Raises:
        Problem: 422 `invalid`.
    """
    value, _, name = after.partition("/")
    if not name or not value.isascii() or not value.isdigit() or len(value) > LONGEST_NUMBER:
        detail = f"with sort={sort}, after must be `next` of the previous page"
        raise Problem("invalid", detail, field="after", value=after)
    return -int(value), name


def _too_few_nodes(request: TopicRequest, answer: CatalogAnswer) -> Problem:
    """Return 503 `too_few_nodes`: with fewer disks than asked for, acknowledged data could be lost."""
    alive = f"{answer.limit} node is alive" if answer.limit == 1 else f"{answer.limit} nodes are alive"
    return Problem(
        "too_few_nodes",
        f"topic {request.name!r} needs {answer.value} nodes for its {answer.value} replicas, and {alive}",
        field="settings.min_replicas" if request.allow_fewer_replicas else "replicas",
        value=answer.value,
        limit=answer.limit,
        outcome="not_applied",
    )


def _already_exists(wanted: TopicRequest, known: TopicRecord | None) -> Problem:
    """Return 409 `already_exists`, which lists the differences from the existing topic."""
    different: list[tuple[str, Setting | None, Setting | None]] = []
    if known is not None:
        if known.partitions != wanted.partitions:
            different.append(("partitions", wanted.partitions, known.partitions))
        if known.replicas != wanted.replicas:
            different.append(("replicas", wanted.replicas, known.replicas))
        for name in sorted(known.settings.keys() | wanted.settings.keys()):
            asked, is_ = wanted.settings.get(name), known.settings.get(name)
            if asked != is_:
                different.append((f"settings.{name}", asked, is_))
    texts = [f"{name} is {_or_not_set(is_)}, not {_or_not_set(asked)}" for name, asked, is_ in different]
    return Problem(
        "already_exists",
        f"topic {wanted.name!r} exists with another configuration: {'; '.join(texts)}",
        field=different[0][0] if different else "topic",
        value=_or_not_set(different[0][1]) if different else wanted.name,
        limit=_or_not_set(different[0][2]) if different else None,
    )


def _or_not_set(value: Setting | None) -> Setting:
    return "not set" if value is None else value


def _check_system(topic: str, changes: Mapping[str, Setting | None]) -> None:
    """Refuse changes that would harm an internal topic; the retention of some may change, down to a bound.

    Raises:
        Problem: 422 `invalid`.
    """
    if topic not in SYSTEM_TOPICS:
        return
    lowest = _LOWEST.get(topic, {})
    for name, value in changes.items():
        if name not in lowest:
            also = "".join(f" and {each}" for each in lowest)
            raise Problem(
                "invalid",
                f"{topic} is an internal topic: only its number of replicas{also} may be changed",
                field="topic",
                value=topic,
                outcome="not_applied",
            )
        if isinstance(value, int) and value < lowest[name]:
            raise Problem(
                "invalid",
                f"{topic} needs its history: {name} must be at least {lowest[name]}",
                field=f"settings.{name}",
                value=value,
                limit=lowest[name],
                outcome="not_applied",
            )


def _no_such_topic(topic: str) -> Problem:
    return Problem("no_such_topic", f"there is no topic {topic!r}", field="topic", value=topic)


def _check_fewest(
    settings: Mapping[str, Setting | None], replicas: int, *, field: str = "settings.min_replicas"
) -> None:
    """Refuse a `min_replicas` above the number of replicas, with which nothing could be appended.

    `field` names the one of the two that the request would change.

    Raises:
        Problem: 422 `invalid`.
    """
    fewest = settings.get("min_replicas")
    if isinstance(fewest, int) and fewest > replicas:
        of_replicas = field == "replicas"
        raise Problem(
            "invalid",
            f"min_replicas must be at most the number of replicas, {replicas}",
            field=field,
            value=replicas if of_replicas else fewest,
            limit=fewest if of_replicas else replicas,
        )
