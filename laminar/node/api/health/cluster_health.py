"""The health of the whole cluster: any shard asks one shard of each node, which asks its siblings.

A node that does not answer is a problem itself: an unknown state never counts as healthy. Nothing here asks
the catalog's leader, so there is an answer also while the catalog has none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from laminar.http.api.documents import cluster as documents
from laminar.http.protocol.messages import Request, Response
from laminar.node.access.principals import Principal, principal_of
from laminar.node.api.admin.led_partitions import LedPartitions
from laminar.node.api.admin.operations import UnderWay, holders
from laminar.node.api.common.forwarding import Exchange
from laminar.node.api.common.node_call import NodeCall, of_siblings
from laminar.node.api.common.services import HostServices
from laminar.node.api.common.slices import Kept, in_slices
from laminar.node.api.health.imports import merge_ages, stopped_import
from laminar.node.api.health.problems import (
    CATALOG,
    MOST_LEADERLESS,
    Found,
    Since,
    document,
    limited,
    merged,
)
from laminar.node.api.health.shard_health import ShardHealth, ShardReport, added
from laminar.node.runtime.boot import role_name
from laminar.node.transport.transport import Peer
from membership.records import PartitionRecord, TopicRecord

MORE_LEADERS: Final = 2
"""A node may lead its share by weight, a tenth more, and this many partitions, before it counts as uneven."""


class NodeReport(msgspec.Struct, frozen=True, array_like=True):
    """The merged reports of a node's shards; `is_whole` says that all of them have answered."""

    found: list[Found]
    left_out: dict[str, int]
    leads: int
    is_whole: bool
    imports: dict[str, int] = {}
    """By topic the time in ms since its import last made a request to this node."""


class _Seen(msgspec.Struct, frozen=True):
    """The result of the last round of questions to all nodes."""

    found: list[Found]
    left_out: Counter[str]
    silent: list[str]
    nodes: list[documents.NodeHealth]


class ClusterHealth:
    """The handler of GET /v1/health, and the transport method by which a shard answers for its node."""

    def __init__(
        self,
        services: HostServices,
        exchange: Exchange,
        shard: ShardHealth,
        led: LedPartitions,
        under_way: UnderWay,
    ) -> None:
        self._services = services
        self._shard = shard
        self._nodes_asked = NodeCall[NodeReport](
            services, exchange, method="node_health", own=self.node_report, kind=NodeReport
        )
        self._led = led
        self._under_way = under_way
        self._since = Since(services.clock.wall_ms)
        self._seen = Kept(self._look, clock=services.clock, version=lambda: services.view.version)

    async def health(self, request: Request) -> Response:
        """Answer GET /v1/health: problems of topics that the principal may not describe are only counted."""
        seen = await self._seen.get()
        return Response.json(self._answer(seen, principal_of(request)))

    def _answer(self, seen: _Seen, principal: Principal) -> documents.Health:
        view = self._services.view
        may = {topic: principal.may("describe", topic) for topic in {each.topic for each in seen.found}}
        listed, left = limited(each for each in seen.found if not each.topic or may[each.topic])
        left += seen.left_out
        left += Counter(each.code for each in seen.found if each.topic and not may[each.topic])
        critical = any(each.is_critical for each in seen.found)
        is_well = not (seen.found or seen.left_out or seen.silent)
        topics = view.topics()
        return documents.Health(
            status="critical" if critical else "well" if is_well else "warning",
            problems=[document(each) for each in listed],
            left_out=dict(sorted(left.items())),
            silent=seen.silent,
            nodes=seen.nodes,
            topics=len(topics),
            partitions=0 if view.message is None else len(view.message.catalog.partitions),
        )

    # -- one node ------------------------------------------------------------------------

    async def on_node_health(self, peer: Peer, payload: bytes) -> NodeReport:
        """Answer another node with the merged reports of this one's shards."""
        return await self.node_report()

    async def node_report(self) -> NodeReport:
        """Return the merged reports of this node's shards."""
        services = self._services
        answers = await of_siblings(services, "shard_health")
        reports = [await self._shard.report()]
        reports += [
            msgspec.msgpack.decode(answer, type=ShardReport)
            for answer in answers.values()
            if answer is not None
        ]
        silent = [role_name(role) for role, answer in answers.items() if answer is None]
        now_ms, left = services.clock.wall_ms(), Counter[str]()
        found = [
            Found(
                "node_silent",
                services.node,
                f"{name} of node {services.node} does not answer: the state of its replicas is unknown",
                since_ms=now_ms,
            )
            for name in silent
        ]
        imports = dict[str, int]()
        for report in reports:
            found += report.found
            added(left, report.left_out)
            merge_ages(imports, report.imports)
        kept, more = limited(merged(found), most={"no_leader": MOST_LEADERLESS})
        leads = sum(each.leads for each in reports)
        return NodeReport(kept, dict(left + more), leads, not silent, imports)

    # -- all nodes -----------------------------------------------------------------------

    async def _look(self) -> _Seen:
        view = self._services.view
        names = sorted(view.nodes()) or [self._services.node]
        reports = await self._nodes_asked.of_all(names)
        answers = {name for name, report in reports.items() if report is not None}
        silent = [name for name in names if name not in answers]
        found, left = list[Found](), Counter[str]()
        for report in reports.values():
            if report is not None:
                found += report.found
                added(left, report.left_out)
        leaderless = [each for each in found if each.code == "no_leader" and each.subject != CATALOG]
        found = [each for each in found if each.code != "no_leader" or each.subject == CATALOG]
        alive = answers | {name for name in names if view.alive(name)}
        found += await self._without_leader(leaderless, alive)
        own = [
            Found(
                "node_silent", name, f"node {name} is alive, but does not answer the request for its health"
            )
            for name in silent
            if view.alive(name)
        ]
        own += [
            Found("node_dead", name, f"node {name} does not answer")
            for name in silent
            if not view.alive(name)
        ]
        own += await self._in_the_dark(alive)
        own += self._old_programs()
        own += await self._changes()
        own += self._uneven(reports)
        own += await self._stopped_imports(reports)
        found += self._since.noted(own)
        return _Seen(merged(found), left, silent, await self._nodes(reports))

    async def _without_leader(self, found: Sequence[Found], alive: set[str]) -> list[Found]:
        """Return the partitions that have no leader, of those with a replica that knows of none.

        A replica that is only cut off from its leader knows of none either, so all replicas are considered.
        """
        if not found:
            return []
        partitions = {each.subject: self._partition(each.subject) for each in found}
        nodes = {node for record in partitions.values() if record is not None for node in holders(record)}
        led = {place for places in (await self._led.of(nodes & alive)).values() for place in places or ()}
        texts: dict[str, list[str]] = {}
        for each in found:
            texts.setdefault(each.subject, []).extend([each.node] if each.text else [])
        return [
            msgspec.structs.replace(
                each,
                text=_leaderless_text(each.subject, texts[each.subject], partitions[each.subject], alive),
                is_critical=True,
            )
            for each in found
            if each.subject not in led
        ]

    def _partition(self, place: str) -> PartitionRecord | None:
        topic, _, number = place.rpartition("/")
        return self._services.view.partition(topic, int(number))

    async def _in_the_dark(self, alive: set[str]) -> list[Found]:
        """Return the partitions of which all nodes with a replica are down.

        This covers partitions that no shard can report. A live node does not count as down, even if it runs
        an older program that makes no report.
        """
        message = self._services.view.message
        if message is None or alive >= message.catalog.nodes.keys():
            return []
        found: list[Found] = []

        def look(record: PartitionRecord) -> None:
            if not holders(record) & alive:
                place = f"{record.topic}/{record.number}"
                text = _leaderless_text(place, [], record, alive)
                found.append(Found("no_leader", place, text, record.topic, is_critical=True))

        await in_slices(list(message.catalog.partitions.values()), look, clock=self._services.clock)
        return found

    def _old_programs(self) -> Iterator[Found]:
        view = self._services.view
        known = {name: record.code_version for name, record in view.nodes().items()}
        newest = max(known.values(), default=0)
        for name, version in known.items():
            if version < newest:
                text = (
                    f"node {name} keeps code version {newest} from being enabled: its program knows "
                    f"{version}, the cluster has enabled {view.code_version}"
                )
                yield Found("program_old", name, text)

    async def _changes(self) -> list[Found]:
        """Return the changes of placement and of routes that are under way, with what blocks them."""
        view = self._services.view
        if view.message is None:
            return []
        state = view.message.catalog
        operations = await self._under_way.get()
        found = []
        steps = sum(each.kind in ("join", "leave") for each in operations)
        if steps:
            text = f"{steps} replicas join or leave their groups"
            found.append(Found("change_waiting", "placement", text))
        for each in operations:
            blocked = "".join(f"; blocked: {reason}" for reason in each.blocked_by)
            progress = f"{each.done} of {each.total}"
            topic = each.what.partition("/")[0]
            if each.kind == "drain":
                text = f"node {each.what} drains: {progress} partitions are elsewhere{blocked}"
                found.append(Found("change_waiting", each.what, text))
            elif each.kind == "replicas":
                text = f"{each.why}: {progress} partitions have them{blocked}"
                found.append(Found("change_waiting", each.what, text, topic))
            elif each.kind in ("pin", "move"):
                text = f"{each.what} is not where it should be: {progress} replicas are, {each.why}{blocked}"
                found.append(Found("change_waiting", each.what, text, topic))
        for record in state.topics.values():
            if record.change is not None and record.change.state == "closing":
                place = f"{record.name}@{record.change.version}"
                text = f"route {record.change.version} of {record.name} waits for its inputs to be sealed"
                found.append(Found("change_waiting", place, text, record.name))
        return found

    def _uneven(self, reports: Mapping[str, NodeReport | None]) -> Iterator[Found]:
        """Yield nodes that lead more than their share by weight."""
        records = self._services.view.nodes()
        leads = {
            name: report.leads
            for name, report in reports.items()
            if report is not None and report.is_whole and name in records and not records[name].draining
        }
        total, weights = sum(leads.values()), sum(records[name].effective_weight for name in leads)
        for name, count in leads.items():
            share = total * records[name].effective_weight / weights if weights else 0.0
            if count > 1.1 * share + MORE_LEADERS:
                text = f"node {name} leads {count} partitions, its share is {share:.0f}"
                yield Found("leaders_uneven", name, text)

    async def _stopped_imports(self, reports: Mapping[str, NodeReport | None]) -> list[Found]:
        """Return the problems of topics that are closed for an import which seems to have stopped."""
        ages, found = dict[str, int](), list[Found]()
        for report in reports.values():
            if report is not None:
                merge_ages(ages, report.imports)
        now_ms = self._services.clock.wall_ms()

        def look(record: TopicRecord) -> None:
            found.extend(stopped_import(record, ages.get(record.name), now_ms=now_ms))

        await in_slices(list(self._services.view.topics().values()), look, clock=self._services.clock)
        return found

    async def _nodes(self, reports: Mapping[str, NodeReport | None]) -> list[documents.NodeHealth]:
        message, held = self._services.view.message, Counter[str]()
        partitions = [] if message is None else list(message.catalog.partitions.values())
        await in_slices(partitions, lambda record: held.update(holders(record)), clock=self._services.clock)
        return [
            documents.NodeHealth(
                node=name,
                answers=report is not None,
                leads=report.leads if report is not None and report.is_whole else None,
                replicas=held[name],
            )
            for name, report in reports.items()
        ]


def _leaderless_text(
    place: str, recovering: Sequence[str], record: PartitionRecord | None, answers: Iterable[str]
) -> str:
    """Return the text about a partition without a leader: which replicas are recovering or missing."""
    absent = sorted(set() if record is None else holders(record) - set(answers))
    text = f"{place} has no leader"
    if recovering:
        text += f": {', '.join(sorted(set(recovering)))} may have forgotten appends"
    return f"{text}, it waits for {', '.join(absent)}" if absent else text
