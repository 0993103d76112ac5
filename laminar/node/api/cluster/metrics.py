"""The metrics of a node: any shard answers for all processes, by asking the others at scrape time.

Each process gives its statistics as JSON; here they become Prometheus metric families.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from laminar.http.protocol.messages import Request, Response
from laminar.node.api.cluster.health import Watch
from laminar.node.api.common.services import HostServices
from laminar.node.runtime.boot import role_name, role_number
from laminar.node.transport.transport import Peer, TransportError

ASK_TIMEOUT_S = 2.0


class _Scrape(Collector):
    """Metric families made from the statistics of each process."""

    def __init__(self, processes: list[dict[str, Any]]) -> None:
        self._processes = processes

    def collect(self) -> Iterable[Metric]:
        """Yield a family for each number, labelled by process; partitions' ones by topic and partition."""
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
        start = GaugeMetricFamily(
            "laminar_start_offset", "Earliest offset of this node's replica", labels=labels
        )
        size = GaugeMetricFamily("laminar_log_bytes", "Bytes of this node's replica", labels=labels)
        leads = GaugeMetricFamily("laminar_leader", "1 where this node leads the partition", labels=labels)
        failed = GaugeMetricFamily(
            "laminar_log_failed",
            "1 where a write or sync of the partition's files failed here: its replica has stopped",
            labels=labels,
        )
        fetched = CounterMetricFamily(
            "laminar_fetched_bytes", "Bytes of batches served to readers", labels=labels
        )
        lag = GaugeMetricFamily(
            "laminar_cursor_lag", "Records between the cursor and the end", labels=[*labels, "cursor"]
        )
        overtaken = GaugeMetricFamily(
            "laminar_cursor_overtaken",
            "Records that retention deleted before this cursor passed them",
            labels=[*labels, "cursor"],
        )
        staged = GaugeMetricFamily(
            "laminar_staged_batches",
            "Batches of sinks that are staged in the partition and not published, where this node leads it",
            labels=labels,
        )
        staged_bytes = GaugeMetricFamily(
            "laminar_staged_bytes", "Bytes of these batches, where this node leads it", labels=labels
        )
        partitions = [each for process in self._processes for each in process.get("partitions", [])]
        cursors: dict[str, set[str]] = {}
        for partition in partitions:
            cursors.setdefault(partition["topic"], set()).update(partition["cursors"])
        for partition in partitions:
            where = [partition["topic"], str(partition["partition"])]
            appended.add_metric(where, partition["appended_batches"])
            end.add_metric(where, partition["end_offset"])
            start.add_metric(where, partition["start_offset"])
            size.add_metric(where, partition["bytes"])
            leads.add_metric(where, int(partition["leading"]))
            failed.add_metric(where, int(partition["log_failed"]))
            fetched.add_metric(where, partition["fetched_bytes"])
            if partition["leading"]:
                staged.add_metric(where, partition["staged_batches"])
                staged_bytes.add_metric(where, partition["staged_bytes"])
                # (lag, overtaken) of a cursor without a position in this partition: all is unread.
                unread = partition["end_offset"] - partition["start_offset"], 0
                for name in sorted(cursors[partition["topic"]]):
                    lagging, gone = partition["cursors"].get(name, unread)
                    lag.add_metric([*where, name], lagging)
                    overtaken.add_metric([*where, name], gone)
        yield from (appended, start, end, size, leads, failed, fetched, lag, overtaken, staged, staged_bytes)


class MetricsRoute:
    """The handler of GET /metrics, and the `stats` method by which siblings are asked."""

    def __init__(self, services: HostServices, watch: Watch, datagrams: Callable[[], dict[str, int]]) -> None:
        self._services = services
        self._datagrams = datagrams
        self._watch = watch

    def own(self) -> dict[str, Any]:
        """Return this shard's statistics."""
        services = self._services
        found = services.statistics()
        return {
            "role": role_name(services.number),
            **found,
            "datagrams": self._datagrams(),
            "node": found["node"] | self._watch.statistics(),
            "partitions": [
                {
                    "topic": partition.topic,
                    "partition": partition.number,
                    "leading": partition.leads,
                    "log_failed": partition.log.failure is not None,
                    "appended_batches": partition.appends.appended_batches,
                    "start_offset": partition.start_offset,
                    "end_offset": partition.end_offset,
                    "bytes": partition.log.size_bytes,
                    "fetched_bytes": partition.reader.fetched_bytes,
                    "staged_batches": len(partition.state.stages),
                    "staged_bytes": partition.state.stages.size_bytes,
                    "cursors": (
                        {
                            name: (
                                max(0, partition.end_offset - cursor.position),
                                max(0, partition.start_offset - cursor.position),
                            )
                            for name in partition.cursors.names()
                            if (cursor := partition.cursor_commands.get(name)) is not None
                        }
                    ),
                }
                for partition in services.partitions.values()
            ],
        }

    async def on_stats(self, peer: Peer, payload: bytes) -> bytes:
        """Answer a sibling with this shard's statistics."""
        return msgspec.json.encode(self.own())

    async def metrics(self, request: Request) -> Response:
        """Answer GET /metrics."""
        services = self._services
        siblings = services.siblings
        answers = await asyncio.gather(
            *(services.ask_sibling(role, "stats", timeout_s=ASK_TIMEOUT_S) for role in siblings),
            return_exceptions=True,
        )
        processes = [self.own()]
        up = GaugeMetricFamily(
            "laminar_process_up", "1 where a process of this node answers", labels=["process"]
        )
        up.add_metric([role_name(services.number)], 1)
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
        """Return the families given."""
        return self._families
