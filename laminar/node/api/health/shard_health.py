"""Find the problems of one shard's replicas, and, in shard 0, those of its node and of the cluster.

Each shard checks its replicas every `CHECK_S`, so that it knows since when a problem exists, and again when
it is asked. It checks in slices and yields in between, so that other work goes on.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Final

import msgspec

from laminar.http.api.names import AUDIT_TOPIC
from laminar.node.api.cluster.health import Watch, in_sync_of
from laminar.node.api.common.services import HostServices
from laminar.node.api.common.slices import Kept, in_slices
from laminar.node.api.health.imports import SeenImports
from laminar.node.api.health.problems import (
    CATALOG,
    MOST_LEADERLESS,
    Found,
    Since,
    limited,
)
from laminar.node.partition.partition import Partition
from laminar.node.partition.retention import Rules
from laminar.node.runtime.boot import ChildState, role_name
from laminar.node.transactions.coordinator import TOPIC as TRANSACTIONS
from laminar.node.transport.transport import Peer
from membership.records import TopicRecord

_log = logging.getLogger("laminar.health")

CHECK_S: Final = 10.0
"""The pause between two checks of all replicas without a request."""
SOON: Final = 0.9
"""A consumer is nearly overtaken when its oldest unread records have reached this part of their retention."""
MOST_RANGES: Final = 3


class ShardReport(msgspec.Struct, frozen=True, array_like=True):
    """A shard's problems, the number of problems left out by code, and the number of partitions it leads."""

    found: list[Found]
    left_out: dict[str, int] = {}
    leads: int = 0
    imports: dict[str, int] = {}
    """By topic the time in ms since its import last made a request to this shard."""


class ShardHealth:
    """Finds the problems of one shard's replicas, and reports them for GET /v1/health."""

    def __init__(self, services: HostServices, watch: Watch) -> None:
        self._services = services
        self._watch = watch
        self.imports = SeenImports(services.view, services.clock.monotonic_ms)
        self._since = Since(services.clock.wall_ms)
        self._report = Kept(self._look, clock=services.clock, version=lambda: services.view.version)
        services.every(CHECK_S, self._check)

    async def _check(self) -> None:
        try:
            await self.report()
        except Exception:  # noqa: BLE001  # a mistake here must not end a process that serves
            _log.exception("this shard cannot look at its health")

    async def report(self) -> ShardReport:
        """Return the present problems; callers at the same time share one check."""
        return await self._report.get()

    async def on_shard_health(self, peer: Peer, payload: bytes) -> bytes:
        """Answer another process of this node with this shard's report."""
        return msgspec.msgpack.encode(await self.report())

    async def _look(self) -> ShardReport:
        found: list[Found] = []
        leads = 0

        def look(partition: Partition) -> None:
            nonlocal leads
            record = self._services.view.topics().get(partition.topic)
            if record is not None:
                leads += partition.replica.core.is_leader and partition.replica.failure is None
                found.extend(self._of_partition(partition, record))

        await in_slices(list(self._services.partitions.values()), look, clock=self._services.clock)
        found += self._of_stopped()
        if self._services.number == 0:
            found += self._of_node()
            found += self._of_cluster()
        noted = self._since.noted(found)
        kept, left = limited(noted, most={"no_leader": MOST_LEADERLESS})
        return ShardReport(kept, dict(left), leads, self.imports.ages_ms())

    # -- replicas ------------------------------------------------------------------------

    def _of_partition(self, partition: Partition, record: TopicRecord) -> Iterator[Found]:
        node, place, topic = self._services.node, f"{partition.topic}/{partition.number}", partition.topic
        replica = partition.replica
        failure = replica.failure or partition.log.failure
        if failure is not None:
            yield Found("log_failed", place, f"{place} on {node} has stopped: {failure}", topic, node=node)
        if replica.core.dropped.get("abandoned"):
            text = f"{place} on {node} holds records that the cluster has discarded, and takes no part"
            yield Found("lost", place, text, topic, node=node)
        if len(partition.log.quarantine):
            alone = len(replica.configuration.voters) == 1
            yield Found("damaged", place, self._damage(partition, place), topic, alone, node=node)
        if replica.leader_node is None:
            # `text` only tells whether it is recovering: the node that answers writes the text, as it knows
            # more.
            yield Found("no_leader", place, "recovering" if replica.core.recovering else "", topic, node=node)
        elif replica.core.is_leader:
            yield from self._of_led(partition, record, place)

    def _of_led(self, partition: Partition, record: TopicRecord, place: str) -> Iterator[Found]:
        topic = partition.topic
        voters = partition.replica.configuration.voters
        in_sync = in_sync_of(partition)
        behind = sorted({partition.replica.nodes[member] for member in voters} - set(in_sync))
        if behind:
            yield Found("under_replicated", place, f"{place} is not in sync on {', '.join(behind)}", topic)
        fewest = int(record.settings.get("min_replicas", 1))
        if len(in_sync) < fewest:
            text = f"{place} refuses appends: {len(in_sync)} replica(s) in sync, min_replicas is {fewest}"
            yield Found("appends_refused", place, text, topic, is_critical=True)
        kept = partition.context.kept_log
        if kept is not None:
            text = f"{place}: {kept.size_bytes:,} bytes are kept beyond the retention by {kept}"
            yield Found("channel_blocked", place, text, topic, is_critical=self._services.space.low)
        yield from self._of_cursors(partition, record)

    def _of_cursors(self, partition: Partition, record: TopicRecord) -> Iterator[Found]:
        """Yield problems for consumers whose unread records retention has trimmed, or will trim soon."""
        commands, start, end = partition.cursor_commands, partition.start_offset, partition.end_offset
        names = commands.names()
        soon = self._expiring_before(partition, record) if names else 0
        for name in names:
            cursor = commands.get(name)
            if cursor is None:
                continue
            subject = f"{partition.topic}/{name}"
            if cursor.position < start:
                text = f"{start - cursor.position:,} records of partition {partition.number} were deleted"
                yield Found("overtaken", subject, f"{text} before {name} read them", partition.topic)
            elif cursor.position < min(soon, end):
                text = (
                    f"retention soon deletes records of partition {partition.number} that {name} has not read"
                )
                yield Found("overtaken_soon", subject, text, partition.topic)

    def _expiring_before(self, partition: Partition, record: TopicRecord) -> int:
        """Return the offset before which retention will trim records soon; 0 if it will not."""
        rules = Rules.of(record.settings)
        segments = partition.log.sealed_segments()
        if not segments or (rules.retention_ms is None and rules.retention_bytes is None):
            return 0
        oldest = segments[0]
        age_ms = self._services.clock.wall_ms() - oldest.last_row.append_time_ms
        too_old = rules.retention_ms is not None and age_ms > SOON * rules.retention_ms
        size = sum(each.size for each in segments)
        too_large = rules.retention_bytes is not None and size > SOON * rules.retention_bytes
        return oldest.next_offset if too_old or too_large else 0

    def _damage(self, partition: Partition, place: str) -> str:
        ranges = [
            f"{each.first_offset} to {each.next_offset - 1}"
            for each in itertools.islice(partition.log.quarantine, MOST_RANGES)
            if each.next_offset > each.first_offset
        ]
        what = f"offsets {', '.join(ranges)}" if ranges else "entries without records"
        return f"{place} is damaged on {self._services.node}: {what}"

    def _of_stopped(self) -> Iterator[Found]:
        """Yield problems for replicas that are not open, because their files are missing or unreadable."""
        services = self._services
        for entry in services.lost:
            place = f"{entry.topic}/{entry.partition}"
            text = f"{place} on {services.node}: its files are lost"
            yield Found("lost", place, text, entry.topic, node=services.node)
        for entry, reason in services.failed.values():
            place = f"{entry.topic}/{entry.partition}"
            text = f"{place} on {services.node} has stopped: {reason}"
            yield Found("log_failed", place, text, entry.topic, node=services.node)

    # -- the node, and what it sees of the others -----------------------------------------

    def _of_node(self) -> Iterator[Found]:
        services = self._services
        node, space = services.node, services.space
        if space.low:
            text = (
                f"node {node} refuses appends: its disk has {space.free_bytes:,} bytes free, "
                f"the minimum is {space.threshold_bytes:,}"
            )
            yield Found("disk_low", node, text, is_critical=True)
        elif space.threshold_bytes and space.free_bytes < 2 * space.threshold_bytes:
            text = (
                f"the disk of node {node} has {space.free_bytes:,} bytes free, "
                f"appends need {space.threshold_bytes:,}"
            )
            yield Found("disk_low", node, text)
        if not services.ready:
            yield Found("not_ready", node, f"node {node} is not ready: it has no view of its cluster yet")
        if not services.knows_its_replicas:
            text = f"node {node} is not ready: a manifest is lost, it asks the catalog which replicas it held"
            yield Found("not_ready", node, text)
        for child in services.board.read_all():
            name = role_name(child.role)
            if child.state == ChildState.GIVEN_UP:
                text = f"{name} of node {node} died too often and is not started again"
                yield Found("process_given_up", node, text, is_critical=True)
            elif child.state != ChildState.READY:
                did = "died and is being started again" if child.state == ChildState.DEAD else "is starting"
                yield Found("not_ready", node, f"{name} of node {node} {did}")

    def _of_cluster(self) -> Iterator[Found]:
        view = self._services.view
        if view.message is None:
            return
        if not self._watch.catalog_is_led():
            text = "the catalog has no leader: no topic can be created, changed or deleted"
            yield Found("no_leader", CATALOG, text, is_critical=True)
        for name, record in view.nodes().items():
            if record.rolled_back:
                text = f"the data folder of node {name} is an older copy: it takes part in nothing"
                yield Found("folder_rolled_back", name, text, is_critical=True)
            elif not view.alive(name):
                yield Found("node_dead", name, f"node {name} does not answer")
        topics = view.topics()
        for name, placed in self._watch.fewer_placed().items():
            text = f"{name} has {placed} of the {topics[name].replicas} replicas asked for"
            yield Found("under_replicated", name, text, name)
        wanted = self._services.settings.default_replicas
        for name in (TRANSACTIONS, AUDIT_TOPIC):
            system = topics.get(name)
            if system is not None and system.replicas < wanted:
                text = f"{name} has {system.replicas} of {wanted} replicas (default_replicas)"
                yield Found("under_replicated", name, text, name)


def added(counts: Counter[str], more: dict[str, int]) -> None:
    """Add the numbers in `more` to `counts`; both are counts of problems by code."""
    for code, number in more.items():
        counts[code] += number
