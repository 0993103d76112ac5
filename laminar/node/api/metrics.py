"""/metrics: any shard answers for the whole node, by asking its siblings at scrape time.

Processes count in plain integers; only here do they become Prometheus's text format, through
a registry that lives for one scrape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from laminar.http.messages import Request, Response
from laminar.node.boot import role_name, role_number
from laminar.node.transport import Peer, TransportError, UnixAddress

if TYPE_CHECKING:
    from laminar.node.shard import Shard

ASK_TIMEOUT_S = 2.0


class _Scrape(Collector):
    """Families made from the statistics of each process."""

    def __init__(self, processes: list[dict[str, Any]]) -> None:
        self._processes = processes

    def collect(self) -> Iterable[Metric]:
        """One family per number, labelled by process; partitions by topic and partition."""
        yield from self._numbers()
        yield from self._partitions()

    def _numbers(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for process in self._processes:
            for part, numbers in process.items():
                if not isinstance(numbers, dict):
                    continue
                for name, value in numbers.items():
                    if isinstance(value, bool) or not isinstance(value, (int, float)):
                        continue
                    full = f"laminar_{part}_{name}"
                    family = families.get(full)
                    if family is None:
                        family = families[full] = GaugeMetricFamily(
                            full, f"{part}: {name}", labels=["process"]
                        )
                    family.add_metric([str(process["role"])], value)  # type: ignore[attr-defined]  # each is a gauge family
        yield from families.values()

    def _partitions(self) -> Iterator[Metric]:
        labels = ["topic", "partition"]
        appended = CounterMetricFamily(
            "laminar_appended_batches", "Batches appended as leader", labels=labels
        )
        end = GaugeMetricFamily(
            "laminar_end_offset", "Committed end offset of this node's replica", labels=labels
        )
        size = GaugeMetricFamily("laminar_log_bytes", "Bytes of this node's replica", labels=labels)
        leads = GaugeMetricFamily("laminar_leader", "1 where this node leads the partition", labels=labels)
        fetched = CounterMetricFamily(
            "laminar_fetched_bytes", "Bytes of batches served to readers", labels=labels
        )
        lag = GaugeMetricFamily("laminar_cursor_lag", "Records behind the end", labels=[*labels, "cursor"])
        for process in self._processes:
            for partition in process.get("partitions", []):
                where = [partition["topic"], str(partition["partition"])]
                appended.add_metric(where, partition["appended_batches"])
                end.add_metric(where, partition["end_offset"])
                size.add_metric(where, partition["bytes"])
                leads.add_metric(where, int(partition["leading"]))
                fetched.add_metric(where, partition["fetched_bytes"])
                for name, behind in partition["cursors"].items():
                    lag.add_metric([*where, name], behind)
        yield from (appended, end, size, leads, fetched, lag)


class MetricsRoute:
    """GET /metrics, and the `stats` method by which siblings are asked."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def own(self) -> dict[str, Any]:
        """This shard's statistics."""
        shard = self._shard
        driver = shard.driver
        return {
            "role": role_name(shard.boot.role),
            "storage": shard.storage.statistics(),
            "http": shard.http.statistics(),
            "transport": shard.transport.statistics(),
            "raft": {
                "groups": len(driver.replicas),
                "leading": sum(replica.leading for replica in driver.replicas.values()),
                "proposals": driver.proposals,
                "syncs": driver.syncs,
                "dropped_messages": driver.dropped_messages,
                "bad_frames": driver.bad_frames,
            },
            "node": {"lost_replicas": len(shard.lost)},
            "partitions": [
                {
                    "topic": partition.topic,
                    "partition": partition.number,
                    "leading": partition.leads,
                    "appended_batches": partition.appended_batches,
                    "end_offset": partition.end_offset,
                    "bytes": partition.log.size_bytes,
                    "fetched_bytes": partition.fetched_bytes,
                    "cursors": (
                        {
                            name: max(0, partition.end_offset - cursor.position)
                            for name in partition.cursors.names()
                            if (cursor := partition.cursor(name)) is not None
                        }
                        if partition.leads
                        else {}
                    ),
                }
                for partition in shard.partitions.values()
            ],
        }

    async def on_stats(self, peer: Peer, payload: bytes) -> bytes:
        """A sibling asks."""
        return msgspec.json.encode(self.own())

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        shard = self._shard
        siblings = [role for role in shard.boot.siblings if role != shard.boot.role]
        answers = await asyncio.gather(
            *(
                shard.transport.call(
                    UnixAddress(shard.boot.unix_name(role)), "stats", b"", timeout=ASK_TIMEOUT_S
                )
                for role in siblings
            ),
            return_exceptions=True,
        )
        processes = [self.own()]
        up = GaugeMetricFamily(
            "laminar_process_up", "1 where a process of this node answers", labels=["process"]
        )
        up.add_metric([role_name(shard.boot.role)], 1)
        for role, answer in sorted(
            zip(siblings, answers, strict=True), key=lambda pair: role_number(pair[0])
        ):
            if isinstance(answer, TransportError):
                up.add_metric([role_name(role)], 0)
                continue
            if isinstance(answer, BaseException):
                raise answer
            up.add_metric([role_name(role)], 1)
            processes.append(msgspec.json.decode(answer))
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Scrape(processes))
        registry.register(_Fixed([up]))
        return Response(200, [("Content-Type", CONTENT_TYPE_LATEST)], generate_latest(registry))


class _Fixed(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """The families given."""
        return self._families
