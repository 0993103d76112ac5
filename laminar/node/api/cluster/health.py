"""Health of a node's partitions, and of the cluster as this node sees it.

Each shard checks its own replicas. `/readyz` collects the reports of all shards of the node; `/metrics` shows
each shard's numbers. Every shard knows from its view whether a topic has fewer replicas than it asked for,
and whether the catalog has a leader.
"""

from __future__ import annotations

import asyncio
import resource
from typing import TYPE_CHECKING

import msgspec

from laminar.http.api.names import AUDIT_TOPIC
from laminar.node.api.common.services import HostServices
from laminar.node.api.common.slices import in_slices
from laminar.node.runtime.boot import CONTROLLER
from laminar.node.transactions.coordinator import TOPIC as TRANSACTIONS
from laminar.node.transport.transport import Peer, TransportError

if TYPE_CHECKING:
    from laminar.node.partition.partition import Partition

ASK_TIMEOUT_S = 1.0
MOST_NAMED = 5
KEPT = "channels keep logs beyond their retention"
"""The beginning of the warning that names logs needed by channels, while the disk is low or soon will be."""


class HealthReport(msgspec.Struct, frozen=True):
    """One shard's report of unhealthy partitions, as "topic/number", among those with a replica here."""

    leaderless: list[str] = []
    """Partitions whose replica here knows of no leader."""
    under_replicated: list[str] = []
    """Partitions led here that have fewer voters in sync than the topic asks for replicas."""
    refusing: list[str] = []
    """Partitions led here that have fewer voters in sync than `min_replicas`, so they take no appends."""
    kept: list[tuple[int, str]] = []
    """Logs led here that channels need beyond their retention: their bytes, and a text with the channels."""


class Watch:
    """Checks the health of this shard's partitions, and collects the reports of the node's other shards."""

    def __init__(self, services: HostServices) -> None:
        self._services = services
        # The topics and partitions for which `fewer_placed` was last computed, and its result.
        self._counted: tuple[object, object, dict[str, int]] = (None, None, {})

    async def own(self) -> HealthReport:
        """Return the report on the health of this shard's partitions, which may be many: in slices."""
        leaderless: list[str] = []
        under_replicated: list[str] = []
        refusing: list[str] = []
        kept: list[tuple[int, str]] = []
        topics = self._services.view.topics()

        def check(partition: Partition) -> None:
            record = topics.get(partition.topic)
            if record is None:
                return
            place = f"{partition.topic}/{partition.number}"
            if partition.replica.leader_node is None:
                leaderless.append(place)
            elif partition.replica.core.is_leader:
                in_sync = partition.copies.in_sync()
                if len(in_sync) < record.replicas:
                    under_replicated.append(place)
                if len(in_sync) < int(record.settings.get("min_replicas", 1)):
                    refusing.append(place)
                found = partition.context.kept_log
                if found is not None:
                    kept.append((found.size_bytes, f"{place}, {found.size_bytes} bytes, for {found}"))

        await in_slices(list(self._services.partitions.values()), check, clock=self._services.clock)
        return HealthReport(leaderless, under_replicated, refusing, sorted(kept, reverse=True))

    def fewer_placed(self) -> dict[str, int]:
        """Return the topics with fewer replicas than they ask for, with the number that they have."""
        message = self._services.view.message
        if message is None:
            return {}
        catalog = message.catalog
        topics, partitions = catalog.topics, catalog.partitions
        if self._counted[0] is not topics or self._counted[1] is not partitions:
            fewest: dict[str, int] = {}
            for partition in partitions.values():
                placed, record = len(partition.replicas), topics.get(partition.topic)
                if record is not None and placed < record.replicas:
                    fewest[partition.topic] = min(placed, fewest.get(partition.topic, placed))
            self._counted = topics, partitions, {name: fewest[name] for name in sorted(fewest)}
        return self._counted[2]

    def catalog_is_led(self) -> bool:
        """Return whether this node knows a leader of the catalog."""
        message = self._services.view.message
        return message is not None and bool(message.catalog_leader)

    async def on_health(self, peer: Peer, payload: bytes) -> bytes:
        """Answer another process of this node with the report of this shard."""
        return msgspec.msgpack.encode(await self.own())

    async def _all(self) -> list[HealthReport]:
        """Return the reports of all shards of the node that answer."""
        services = self._services
        answers = await asyncio.gather(
            *(
                services.ask_sibling(role, "health", timeout_s=ASK_TIMEOUT_S)
                for role in services.siblings
                if role != CONTROLLER
            ),
            return_exceptions=True,
        )
        found = [await self.own()]
        for answer in answers:
            if isinstance(answer, TransportError):
                continue  # /readyz reports a process that is down by the status board
            if isinstance(answer, BaseException):
                raise answer
            found.append(msgspec.msgpack.decode(answer, type=HealthReport))
        return found

    async def warnings(self, *, with_names: bool) -> list[str]:
        """Return sentences that warn operators of conditions that do not stop this node from serving.

        With `with_names` they contain the names of topics and partitions, else only their number.
        """
        services = self._services
        reports = await self._all()
        found = []
        if services.space.low:
            refused = "appends and consumers are" if services.space.reserve_is_used else "appends are"
            found.append(f"{refused} refused: {services.space.reason}")
        kept = sorted((each for report in reports for each in report.kept), reverse=True)
        if kept and services.space.free_bytes < 2 * services.space.threshold_bytes:
            found.append(f"{KEPT}: {_named([text for _, text in kept], with_names)}")
        if services.settings.is_insecure:
            found.append(f"insecure: {' and '.join(services.settings.lacks)}")
        if not self.catalog_is_led():
            found.append("the catalog has no leader: no topic can be created, changed or deleted")
        topics = services.view.topics()
        few = [
            f"{name} ({placed} of {topics[name].replicas})" for name, placed in self.fewer_placed().items()
        ]
        if few:
            found.append(f"topics have fewer replicas than asked for: {_named(few, with_names)}")
        for name, what in ((TRANSACTIONS, "named producers and sinks are"), (AUDIT_TOPIC, "the audit is")):
            system = services.view.topics().get(name)
            if system is not None and system.replicas < services.settings.default_replicas:
                found.append(
                    f"{name} has {system.replicas} of {services.settings.default_replicas} replicas "
                    f"(default_replicas): {what} kept on fewer nodes than topics"
                )
        for what, name in (
            ("partitions here have no leader", "leaderless"),
            ("partitions led here take no appends, as too few replicas are in sync", "refusing"),
            ("partitions led here have too few replicas in sync", "under_replicated"),
        ):
            places = sorted(place for report in reports for place in getattr(report, name))
            if places:
                found.append(f"{what}: {_named(places, with_names)}")
        return found

    def statistics(self) -> dict[str, int]:
        """Return gauges for /metrics.

        Topics with too few replicas, whether the catalog is led, file limit.
        """
        return {
            "topics_with_fewer_replicas": len(self.fewer_placed()),
            "catalog_is_led": int(self.catalog_is_led()),
            "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        }


def in_sync_of(partition: Partition) -> list[str]:
    """Return the nodes of the voters in sync: those active lately that have all committed entries.

    Call it only for a partition that this shard leads.
    """
    replica = partition.replica
    # Learners are left out: even one that keeps up does not count for a majority.
    return [
        replica.nodes[member]
        for member in replica.configuration.voters
        if member == replica.replica_id
        or (replica.match_index(member) >= partition.committed_index and partition.context.is_active(member))
    ]


def _named(places: list[str], with_names: bool) -> str:
    if not with_names:
        return str(len(places))
    more = len(places) - MOST_NAMED
    return ", ".join(places[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
