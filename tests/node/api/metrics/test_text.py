"""The text of metrics: read by Prometheus' own parsers, in both formats, and bounded."""

from __future__ import annotations

import math
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from laminar.histogram import Histogram
from laminar.node.api.metrics import names
from laminar.node.api.metrics.shard_numbers import (
    MOST_CONSUMERS,
    ConsumerNumbers,
    PartitionNumbers,
    ProcessNumbers,
    TopicNumbers,
)
from laminar.node.api.metrics.text import Text

STRANGE = 'a "quoted" \\ name\nof two lines'


def numbers(role: str = "shard-0", **more: Any) -> ProcessNumbers:
    observed = Histogram()
    for value in (0.0001, 0.004, 30.0):
        observed.observe(value)
    parts: dict[str, dict[str, Any]] = {
        "http": {"requests": 7, "responses_2xx": 7},
        "transport": {"refused_tls": 2, "connections_call": 3, "connections_made": 4, "peers": 1},
        "routes": {"changes": {"done": 2}, "phases": {"closing": {"count": 2, "ms": 1500}}},
        "storage": {"journal_longest_sync_us": 2500},
    }
    return ProcessNumbers(
        role,
        parts,
        histograms={names.DISK_SYNC.name: observed.stored()},
        requests=[("fetch", 200, *observed.stored())],
        states={"open": 2},
        topics={"t": TopicNumbers(append_records=5, leads=2, unread=10, most_unread=6)},
        refused={STRANGE: 1},
        channels=[("t", "c", 1, 2, 3, 4, 5, 6)],
        channel_counts=[("t", "c", 1, 2, 3, 4, 5)],
        **more,
    )


def text(*processes: ProcessNumbers, as_openmetrics: bool = False) -> str:
    made = Text(openmetrics=as_openmetrics)
    return "".join(made.of_node(processes, up={"shard-0": True, "shard-1": False}))


def samples(shown: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sample.labels.items())): sample.value
        for family in prometheus(shown)
        for sample in family.samples
    }


def test_both_parsers_read_it_and_find_the_types_of_the_table() -> None:
    """OpenMetrics names the family without `_total`, and has units and an end."""
    known = {family.name: family for family in names.ALL}
    for parse, shown in (
        (prometheus, text(numbers())),
        (openmetrics, text(numbers(), as_openmetrics=True)),
    ):
        found = {family.name: family for family in parse(shown)}
        assert len(found) > 20
        for name, family in found.items():
            assert (known[name].kind, known[name].help) == (family.type, family.documentation)
            for sample in family.samples:
                assert sample.name in names.samples(known[name])
                assert math.isfinite(sample.value)


def test_processes_are_added_up_where_they_have_no_label() -> None:
    found = samples(text(numbers(), numbers("shard-1")))

    assert 10 == found["laminar_append_records_total", (("topic", "t"),)]
    assert 7 == found["laminar_http_requests_total", (("process", "shard-1"),)]
    assert 4 == found["laminar_partitions", (("state", "open"),)]
    assert 2 == found["laminar_principal_refused_total", (("principal", STRANGE),)]
    where = (("operation", "fetch"), ("code", "200"))
    assert 6 == found["laminar_http_request_duration_seconds_count", where]
    assert 4 == found["laminar_http_request_duration_seconds_bucket", (*where, ("le", "0.005"))]
    assert 6 == found["laminar_http_request_duration_seconds_bucket", (*where, ("le", "+Inf"))]
    assert 2 == found["laminar_transport_refused_total", (("process", "shard-0"), ("reason", "tls"))]
    assert 0.0025 == found["laminar_disk_longest_sync_seconds", (("process", "shard-0"),)]
    assert 3.0 == found["laminar_route_phase_seconds_sum", (("phase", "closing"),)] + 1.5


def test_a_consumer_has_read_nothing_where_it_has_no_position() -> None:
    """Of ten records in partitions of six and four it has a position in that of four, at its end but one."""
    consumer = ("t", "c", ConsumerNumbers(lag=1, most_lag=1, held=4))
    found = samples(text(numbers(consumers=[consumer])))

    where = (("topic", "t"), ("consumer", "c"))
    assert 7 == found["laminar_consumer_lag_records", where]
    assert 6 == found["laminar_consumer_lag_records_max", where]


def test_consumers_beyond_the_bound_are_counted() -> None:
    rows = [("t", f"c{number}", ConsumerNumbers()) for number in range(MOST_CONSUMERS)]
    more = [("t", f"d{number}", ConsumerNumbers()) for number in range(3)]
    first = numbers(consumers=rows, consumers_left_out=2)
    shown = text(first, numbers("shard-1", consumers=more))

    found = samples(shown)
    assert 5 == found["laminar_series_left_out", ()]
    assert MOST_CONSUMERS == sum(name == "laminar_consumer_lag_records" for name, _ in found)


def test_partitions_of_one_topic_have_their_own_numbers() -> None:
    rows = [
        PartitionNumbers(number, True, False, 1, 9, 100, 8, 90, 70, 0, {"c": (3, 1)}) for number in (1, 0)
    ]
    shown = "".join(Text(openmetrics=False).of_partitions("t", rows))

    found = samples(shown)
    assert 9 == found["laminar_partition_end_offset", (("topic", "t"), ("partition", "1"))]
    where = (("topic", "t"), ("partition", "0"), ("consumer", "c"))
    assert 3 == found["laminar_partition_consumer_lag_records", where]
