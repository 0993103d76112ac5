"""Write the numbers of a node's processes as metrics, in Prometheus' text format or as OpenMetrics.

The text comes in pieces, so that the event loop may turn in between (`pieces`). Rows of topics, consumers
etc. are summed over the processes; numbers of processes have the label `process`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

from laminar.histogram import SECONDS
from laminar.node.api.metrics import names
from laminar.node.api.metrics.names import Family
from laminar.node.api.metrics.shard_numbers import (
    MOST_CONSUMERS,
    ConsumerNumbers,
    PartitionNumbers,
    ProcessNumbers,
    TopicNumbers,
)

PROMETHEUS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_TYPE: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

PARTITION_STATES: Final = (
    *("waiting", "open", "sealed", "under_replicated", "refusing"),
    *("leaderless", "stopped", "damaged"),
)

Rows = Iterable[tuple[Sequence[str], float]]

# The most rows of a piece.
_PIECE_ROWS: Final = 500
_BOUNDS: Final = (*map(repr, SECONDS), "+Inf")


def accepts_openmetrics(accept: str) -> bool:
    """Return whether an `Accept` header asks for OpenMetrics."""
    return "application/openmetrics-text" in accept


class Text:
    """Writes metrics in one of the two formats."""

    def __init__(self, *, openmetrics: bool) -> None:
        self._openmetrics = openmetrics

    def of_node(self, processes: Sequence[ProcessNumbers], *, up: Mapping[str, bool]) -> Iterator[str]:
        """Yield the text of all families but those of partitions; `up` says which processes answered."""
        yield from self._family(names.PROCESS_UP, (((name,), int(is_up)) for name, is_up in up.items()))
        versions = {(each.version, each.python, each.modules): 1 for each in processes}
        yield from self._family(names.BUILD, versions.items())
        for (part, key), family in names.OF_PROCESSES.items():
            rows = [
                ((each.role,), value * family.scale if family.scale != 1.0 else value)
                for each in processes
                if (value := each.parts.get(part, {}).get(key)) is not None
            ]
            if rows:
                yield from self._family(family, rows)
        yield from self._of_transport(processes)
        yield from self._histograms(processes)
        yield from self._states(processes)
        yield from self._routes(processes)
        yield from self._family(
            names.PRINCIPAL_REFUSED,
            _summed(((name,), count) for each in processes for name, count in each.refused.items()),
        )
        yield from self._topics(processes)
        yield from self._channels(processes)
        if self._openmetrics:
            yield "# EOF\n"

    def of_partitions(self, topic: str, rows: Sequence[PartitionNumbers]) -> Iterator[str]:
        """Yield the text of the families of partitions and their consumers, of one topic."""
        ordered = sorted(rows, key=lambda row: row.number)
        for family, name in zip(names.OF_PARTITIONS, _PARTITION_FIELDS, strict=True):
            yield from self._family(
                family, [((topic, str(row.number)), int(getattr(row, name))) for row in ordered]
            )
        for place, family in ((0, names.OF_CONSUMERS[0]), (1, names.OF_CONSUMERS[3])):
            labelled = family._replace(kind="gauge", labels=("topic", "partition", "consumer"))
            labelled = labelled._replace(name=labelled.name.replace("consumer", "partition_consumer"))
            yield from self._family(
                labelled,
                [
                    ((topic, str(row.number), name), figures[place])
                    for row in ordered
                    for name, figures in sorted(row.consumers.items())
                ],
            )
        if self._openmetrics:
            yield "# EOF\n"

    # -- families ------------------------------------------------------------------------

    def _head(self, family: Family) -> str:
        # Prometheus' format names a counter as its samples; OpenMetrics names the family without `_total`.
        name = family.name if self._openmetrics else family.sample
        unit = f"# UNIT {name} {family.unit}\n" if self._openmetrics and family.unit else ""
        return f"# HELP {name} {_escaped_help(family.help)}\n# TYPE {name} {family.kind}\n{unit}"

    def _family(self, family: Family, rows: Rows) -> Iterator[str]:
        """Yield the text of a counter or gauge; nothing without a row."""
        template = _template(family.sample, family.labels)
        lines: list[str] = []
        for labels, value in rows:
            if not lines:
                lines.append(self._head(family))
            lines.append(f"{template.format(*map(_escaped, labels))} {_number(value)}\n")
            if len(lines) > _PIECE_ROWS:
                yield "".join(lines)
                lines = [""]
        yield "".join(lines)

    def _placed(
        self, family: Family, places: Sequence[str], values: Sequence[float], *, with_zeros: bool = True
    ) -> Iterator[str]:
        """Yield the text of a counter or gauge with many rows, whose labels (`places`) are already text."""
        name, head = family.sample, self._head(family)
        for first in range(0, len(values), _PIECE_ROWS):
            last = first + _PIECE_ROWS
            rows = zip(places[first:last], values[first:last], strict=True)
            lines = [f"{name}{place}{value}\n" for place, value in rows if with_zeros or value]
            if lines:
                yield head + "".join(lines)
                head = ""

    def _histogram(
        self, family: Family, rows: Iterable[tuple[Sequence[str], Sequence[int], float]]
    ) -> Iterator[str]:
        yield self._head(family)
        for labels, counts, total in rows:
            pairs = [f'{name}="{_escaped(value)}"' for name, value in zip(family.labels, labels, strict=True)]
            where = ",".join(pairs)
            lines = [
                f'{family.name}_bucket{{{where},le="{bound}"}} {count}\n'
                for bound, count in zip(_BOUNDS, accumulate(counts), strict=True)
            ]
            lines.append(
                f"{family.name}_sum{{{where}}} {total!r}\n{family.name}_count{{{where}}} {sum(counts)}\n"
            )
            yield "".join(lines)

    # -- sources -------------------------------------------------------------------------

    def _of_transport(self, processes: Sequence[ProcessNumbers]) -> Iterator[str]:
        for family, prefix in (
            (names.TRANSPORT_REFUSED, "refused_"),
            (names.TRANSPORT_CONNECTIONS, "connections_"),
        ):
            known = {key for part, key in names.OF_PROCESSES if part == "transport"}
            rows = [
                ((each.role, key.removeprefix(prefix)), value)
                for each in processes
                for key, value in each.parts.get("transport", {}).items()
                if key.startswith(prefix) and key not in known
            ]
            yield from self._family(family, rows)

    def _histograms(self, processes: Sequence[ProcessNumbers]) -> Iterator[str]:
        for family in (names.APPEND_COMMIT, names.DISK_SYNC, names.LOOP_DELAY):
            rows = [
                ((each.role,), *each.histograms[family.name])
                for each in processes
                if family.name in each.histograms
            ]
            yield from self._histogram(family, rows)
        added: dict[tuple[str, str], tuple[list[int], float]] = {}
        for each in processes:
            for operation, status, counts, total in each.requests:
                key = operation, str(status)
                held = added.get(key)
                if held is not None:
                    counts = [one + other for one, other in zip(counts, held[0], strict=True)]
                    total += held[1]
                added[key] = counts, total
        yield from self._histogram(
            names.HTTP_DURATION, ((key, counts, total) for key, (counts, total) in sorted(added.items()))
        )

    def _states(self, processes: Sequence[ProcessNumbers]) -> Iterator[str]:
        states: Counter[str] = Counter()
        for each in processes:
            states.update(each.states)
        yield from self._family(names.PARTITIONS, [((state,), states[state]) for state in PARTITION_STATES])
        yield from self._family(names.UNDRAINED, [((), sum(each.undrained for each in processes))])

    def _routes(self, processes: Sequence[ProcessNumbers]) -> Iterator[str]:
        changes: Counter[tuple[str]] = Counter()
        phases = list[str]()
        for each in processes:
            routes = each.parts.get("routes", {})
            changes.update({(result,): count for result, count in routes.get("changes", {}).items()})
            for phase, found in sorted(routes.get("phases", {}).items()):
                where, name = f'{{phase="{phase}"}}', names.ROUTE_PHASE.name
                phases.append(
                    f"{name}_sum{where} {found['ms'] / 1000}\n{name}_count{where} {found['count']}\n"
                )
        yield from self._family(names.ROUTE_CHANGES, sorted(changes.items()))
        if phases:
            yield self._head(names.ROUTE_PHASE) + "".join(phases)

    def _topics(self, processes: Sequence[ProcessNumbers]) -> Iterator[str]:
        topics: dict[str, TopicNumbers] = {}
        for each in processes:
            for place, (name, row) in enumerate(each.topics.items()):
                held = topics.get(name)
                topics[name] = row if held is None else _added(held, row)
                if place % _PIECE_ROWS == 0:
                    yield ""
        ordered = sorted(topics.items())
        yield ""
        places = [f'{{topic="{topic}"}} ' for topic, _ in ordered]
        for family, name in zip(names.OF_TOPICS, _TOPIC_FIELDS, strict=True):
            values = [getattr(row, name) for _, row in ordered]
            # Most topics have none of these, so only those that have some get a series.
            yield from self._placed(family, places, values, with_zeros=name not in _RARE)
        yield from self._consumers(processes, topics)

    def _consumers(
        self, processes: Sequence[ProcessNumbers], topics: Mapping[str, TopicNumbers]
    ) -> Iterator[str]:
        consumers: dict[tuple[str, str], ConsumerNumbers] = {}
        for each in processes:
            for place, (topic, name, row) in enumerate(each.consumers):
                held = consumers.get((topic, name))
                consumers[topic, name] = row if held is None else _added_consumers(held, row)
                if place % _PIECE_ROWS == 0:
                    yield ""
        shown = dict(sorted(list(consumers.items())[:MOST_CONSUMERS]))
        left_out = len(consumers) - len(shown) + sum(each.consumers_left_out for each in processes)
        places = [f'{{topic="{topic}",consumer="{name}"}} ' for topic, name in shown]
        rows = [_whole(row, topics[topic]) for (topic, _), row in shown.items()]
        for place, family in enumerate(names.OF_CONSUMERS):
            yield from self._placed(family, places, [row[place] for row in rows])
        yield from self._family(names.SERIES_LEFT_OUT, [((), left_out)])

    def _channels(self, processes: Sequence[ProcessNumbers]) -> Iterator[str]:
        for families, field in ((names.OF_CHANNELS, "channels"), (names.OF_CHANNEL_COUNTS, "channel_counts")):
            sums: dict[tuple[str, str], list[int]] = {}
            for each in processes:
                for topic, channel, *numbers in getattr(each, field):
                    held = sums.setdefault((topic, channel), [0] * len(families))
                    for place, number in enumerate(numbers):
                        held[place] += number
            ordered = sorted(sums.items())
            for place, family in enumerate(families):
                yield from self._family(family, ((where, numbers[place]) for where, numbers in ordered))


_TOPIC_FIELDS: Final = (
    *("append_records", "append_bytes", "fetch_records", "fetch_bytes"),
    *("log_bytes", "leads", "route", "staged_batches", "staged_bytes", "retention_s"),
)
_RARE: Final = ("staged_batches", "staged_bytes", "retention_s")
_PARTITION_FIELDS: Final = (
    *("leads", "has_failed", "start_offset", "end_offset", "log_bytes"),
    *("append_records", "append_bytes", "fetch_bytes", "staged_batches"),
)


def _template(name: str, labels: Sequence[str]) -> str:
    pairs = ",".join(f'{label}="{{}}"' for label in labels)
    return f"{name}{{{{{pairs}}}}}" if labels else name


def _number(value: float) -> str:
    return str(value)


def _escaped(value: str) -> str:
    """Return the value of a label with characters escaped as both formats require.

    Names of topics need none.
    """
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value


def _escaped_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _summed(rows: Rows) -> Rows:
    sums: Counter[tuple[str, ...]] = Counter()
    for labels, value in rows:
        sums[tuple(labels)] += value  # type: ignore[assignment]  # whole numbers
    return sorted(sums.items())


def _added(one: TopicNumbers, other: TopicNumbers) -> TopicNumbers:
    return TopicNumbers(
        append_records=one.append_records + other.append_records,
        append_bytes=one.append_bytes + other.append_bytes,
        fetch_records=one.fetch_records + other.fetch_records,
        fetch_bytes=one.fetch_bytes + other.fetch_bytes,
        log_bytes=one.log_bytes + other.log_bytes,
        leads=one.leads + other.leads,
        route=max(one.route, other.route),
        staged_batches=one.staged_batches + other.staged_batches,
        staged_bytes=one.staged_bytes + other.staged_bytes,
        unread=one.unread + other.unread,
        most_unread=max(one.most_unread, other.most_unread),
        oldest_s=max(one.oldest_s, other.oldest_s),
        retention_s=max(one.retention_s, other.retention_s),
    )


def _added_consumers(one: ConsumerNumbers, other: ConsumerNumbers) -> ConsumerNumbers:
    return ConsumerNumbers(
        lag=one.lag + other.lag,
        most_lag=max(one.most_lag, other.most_lag),
        oldest_s=max(one.oldest_s, other.oldest_s),
        overtaken=one.overtaken + other.overtaken,
        held=one.held + other.held,
    )


def _whole(row: ConsumerNumbers, topic: TopicNumbers) -> tuple[int, int, float, int]:
    """Return a consumer's lag in a topic, its greatest lag in a partition, age, and overtaken records.

    In a partition in which the consumer has no position, all records count as unread.
    """
    rest = topic.unread - row.held
    most = max(row.most_lag, min(rest, topic.most_unread))
    oldest_s = max(row.oldest_s, topic.oldest_s) if rest > 0 else row.oldest_s
    return row.lag + rest, most, oldest_s, row.overtaken


def figures_of(parts: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield part and key of each statistic of a process that is neither a metric nor listed as not shown."""
    for part, numbers in parts.items():
        for key, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                continue
            known = (part, key) in names.OF_PROCESSES or (part, key) in names.NOT_SHOWN
            if not known and not (part == "transport" and key.startswith(("refused_", "connections_"))):
                yield part, key
