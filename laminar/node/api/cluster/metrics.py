"""The metrics of a node: any shard answers for all processes, by asking the others at scrape time.

Each process gives its statistics as JSON; here they become Prometheus metric families.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from laminar.http.protocol.messages import Request, Response
from laminar.node.api.cluster.exposition import CONTENT_TYPE, Family, Kind, exposition
from laminar.node.api.cluster.health import Watch
from laminar.node.api.common.services import HostServices
from laminar.node.runtime.boot import role_name, role_number
from laminar.node.transport.transport import Peer, TransportError

ASK_TIMEOUT_S = 2.0


def _numbers(processes: Iterable[dict[str, Any]]) -> Iterable[Family]:
    """Return a family for each number of the processes' parts, labelled by process."""
    families: dict[str, Family] = {}
    for process in processes:
        for part, numbers in process.items():
            if not isinstance(numbers, dict):
                continue
            for name, value in numbers.items():
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    continue
                full = f"laminar_{part}_{name}"
                family = families.get(full)
                if family is None:
                    family = families[full] = Family(full, f"{part}: {name}", Kind.GAUGE, ["process"])
                family.add([str(process["role"])], value)
    return families.values()


def _partitions(processes: Iterable[dict[str, Any]]) -> Iterable[Family]:
    """Return the families of the processes' partitions, labelled by topic and partition."""
    labels = ["topic", "partition"]
    appended = Family("laminar_appended_batches_total", "Batches appended as leader", Kind.COUNTER, labels)
    end = Family("laminar_end_offset", "Committed end offset of this node's replica", Kind.GAUGE, labels)
    start = Family("laminar_start_offset", "Earliest offset of this node's replica", Kind.GAUGE, labels)
    size = Family("laminar_log_bytes", "Bytes of this node's replica", Kind.GAUGE, labels)
    leads = Family("laminar_leader", "1 where this node leads the partition", Kind.GAUGE, labels)
    failed = Family(
        "laminar_log_failed",
        "1 where a write or sync of the partition's files failed here: its replica has stopped",
        Kind.GAUGE,
        labels,
    )
    fetched = Family(
        "laminar_fetched_bytes_total", "Bytes of batches served to readers", Kind.COUNTER, labels
    )
    lag = Family(
        "laminar_cursor_lag", "Records between the cursor and the end", Kind.GAUGE, [*labels, "cursor"]
    )
    overtaken = Family(
        "laminar_cursor_overtaken",
        "Records that retention deleted before this cursor passed them",
        Kind.GAUGE,
        [*labels, "cursor"],
    )
    staged = Family(
        "laminar_staged_batches",
        "Batches of sinks that are staged in the partition and not published, where this node leads it",
        Kind.GAUGE,
        labels,
    )
    staged_bytes = Family(
        "laminar_staged_bytes", "Bytes of these batches, where this node leads it", Kind.GAUGE, labels
    )
    partitions = [each for process in processes for each in process.get("partitions", [])]
    cursors: dict[str, set[str]] = {}
    for partition in partitions:
        cursors.setdefault(partition["topic"], set()).update(partition["cursors"])
    for partition in partitions:
        where = [partition["topic"], str(partition["partition"])]
        appended.add(where, partition["appended_batches"])
        end.add(where, partition["end_offset"])
        start.add(where, partition["start_offset"])
        size.add(where, partition["bytes"])
        leads.add(where, int(partition["leading"]))
        failed.add(where, int(partition["log_failed"]))
        fetched.add(where, partition["fetched_bytes"])
        if partition["leading"]:
            staged.add(where, partition["staged_batches"])
            staged_bytes.add(where, partition["staged_bytes"])
            # (lag, overtaken) of a cursor without a position in this partition: all is unread.
            unread = partition["end_offset"] - partition["start_offset"], 0
            for name in sorted(cursors[partition["topic"]]):
                lagging, gone = partition["cursors"].get(name, unread)
                lag.add([*where, name], lagging)
                overtaken.add([*where, name], gone)
    return (appended, start, end, size, leads, failed, fetched, lag, overtaken, staged, staged_bytes)


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
        up = Family("laminar_process_up", "1 where a process of this node answers", Kind.GAUGE, ["process"])
        up.add([role_name(services.number)], 1)
        for role, answer in sorted(
            zip(siblings, answers, strict=True), key=lambda pair: role_number(pair[0])
        ):
            if isinstance(answer, TransportError):
                up.add([role_name(role)], 0)
                continue
            if isinstance(answer, BaseException):
                raise answer
            up.add([role_name(role)], 1)
            processes.append(msgspec.json.decode(answer))
        families = [*_numbers(processes), *_partitions(processes), up]
        return Response(200, [("Content-Type", CONTENT_TYPE)], exposition(families))
