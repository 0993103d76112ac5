"""The text of a node's metrics, by the Prometheus client library.

Importing the library takes 30 ms of CPU (it brings an HTTP server along), so `metrics` imports this module
when the first scrape comes, and not at the start of a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from laminar.compiled import described

__all__ = ["CONTENT_TYPE", "text_of"]


_Family = GaugeMetricFamily | CounterMetricFamily


def text_of(processes: list[dict[str, Any]], *, up: Mapping[str, bool]) -> bytes:
    """Return the metrics of a node from its processes' statistics; `up`: by name, whether one answered."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Scrape(processes, up))
    return generate_latest(registry)


def _summed(families: Sequence[_Family], rows: Iterable[Sequence[Any]]) -> Sequence[_Family]:
    """Return the families with the sums by channel of rows of a topic, a channel, and a number for each."""
    sums: dict[tuple[str, str], list[int]] = {}
    for topic, channel, *numbers in rows:
        held = sums.setdefault((topic, channel), [0] * len(families))
        for place, number in enumerate(numbers):
            held[place] += number
    for where, numbers in sorted(sums.items()):
        for family, number in zip(families, numbers, strict=True):
            family.add_metric(where, number)
    return families


class _Scrape(Collector):
    """Metric families made from the statistics of each process."""

    def __init__(self, processes: list[dict[str, Any]], up: Mapping[str, bool]) -> None:
        self._processes = processes
        self._up = up

    def collect(self) -> Iterable[Metric]:
        """Yield a family for each number, labelled by process; partitions' ones by topic and partition."""
        yield from self._numbers()
        yield from self._partitions()
        yield from self._routes()
        yield from self._channels()
        yield self._principals()
        yield from self._channel_counts()
        up = GaugeMetricFamily(
            "laminar_process_up", "1 where a process of this node answers", labels=["process"]
        )
        for name, answers in self._up.items():
            up.add_metric([name], int(answers))
        yield up
        yield InfoMetricFamily("laminar_build", "the build that runs", {"modules": described()})

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

    def _routes(self) -> Iterator[Metric]:
        """Yield what became of changes of routes while this node led the catalog, and partitions by state."""
        changes = CounterMetricFamily(
            "laminar_route_changes",
            "Changes of routes that ended while this node led them",
            labels=["result"],
        )
        phases = SummaryMetricFamily(
            "laminar_route_phase_seconds", "How long a phase of a change of a route took", labels=["phase"]
        )
        states = GaugeMetricFamily(
            "laminar_partitions", "Partitions that this node leads, by state", labels=["state"]
        )
        for process in self._processes:
            routes = process.get("routes", {})
            for result, count in routes.get("changes", {}).items():
                changes.add_metric([result], count)
            for phase, found in routes.get("phases", {}).items():
                phases.add_metric([phase], count_value=found["count"], sum_value=found["ms"] / 1000)
        led = [
            each for process in self._processes for each in process.get("partitions", []) if each["leading"]
        ]
        counted = Counter(each["state"] for each in led)
        for state in ("waiting", "open", "sealed"):
            states.add_metric([state], counted[state])
        undrained = GaugeMetricFamily(
            "laminar_undrained_cursors",
            "Cursors that are before the ends of partitions which have ended, and which this node leads",
        )
        versions = GaugeMetricFamily(
            "laminar_route_version",
            "Version of the topic's route, where this node leads a partition of it",
            labels=["topic"],
        )
        known: dict[str, int] = {}
        for each in led:
            known[each["topic"]] = max(each["route"], known.get(each["topic"], 0))
        for topic, version in sorted(known.items()):
            versions.add_metric([topic], version)
        ended = [each["cursors"] for each in led if each["state"] == "sealed"]
        undrained.add_metric([], sum(lag > 0 for cursors in ended for lag, _ in cursors.values()))
        yield from (changes, phases, states, versions, undrained)

    def _principals(self) -> Metric:
        """Return how many requests were refused for limits, of at most some hundred principals by name."""
        family = CounterMetricFamily(
            "laminar_principal_refused",
            "Requests refused for a limit of their principal",
            labels=["principal"],
        )
        refused: Counter[str] = Counter()
        for process in self._processes:
            refused.update(process.get("principals", {}).get("refused", {}))
        for name, count in sorted(refused.items()):
            family.add_metric([name], count)
        return family

    def _channels(self) -> Iterator[Metric]:
        """Yield where channels stand, summed over the partitions that this node leads."""
        families = [
            GaugeMetricFamily(f"laminar_channel_{name}", text, labels=["topic", "channel"])
            for name, text in (
                ("depth", "Records to be given out yet, at most, and those that are out"),
                ("out", "Records that are given out, and neither acknowledged nor failed"),
                ("aside", "Records that wait to be tried again"),
                ("dead", "Records that failed too often"),
                ("lost", "Records that left the log before they were done"),
                ("kept_bytes", "Bytes that retention would trim if the channel, maybe with others, let it"),
            )
        ]
        yield from _summed(
            families,
            (
                (partition["topic"], name, *numbers)
                for process in self._processes
                for partition in process.get("partitions", [])
                for name, numbers in partition["channels"].items()
            ),
        )

    def _channel_counts(self) -> Iterator[Metric]:
        """Yield what became of the records of channels while this node led their partitions."""
        families = [
            CounterMetricFamily(f"laminar_channel_{name}", text, labels=["topic", "channel"])
            for name, text in (
                ("acknowledged", "Records that were acknowledged"),
                ("redelivered", "Records that were given out again"),
                ("late", "Records of which a consumer said something when its time was over"),
                ("died", "Records that failed too often, and are dead from then on"),
                ("overdue", "Records that were given out again more than a second after their time"),
            )
        ]
        # One that was deleted and made again is two, for a moment.
        rows = (row for process in self._processes for row in process.get("channel_counts", []))
        yield from _summed(families, rows)

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
