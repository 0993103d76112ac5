"""GET /metrics of a real node: nothing without a row in the table, both formats, partitions on demand."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx
import msgspec
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

import laminar
from laminar.compiled import described
from laminar.node.api.metrics import names
from laminar.node.api.metrics.shard_numbers import ProcessNumbers
from laminar.node.api.metrics.text import figures_of
from laminar.node.transport.transport import Peer
from tests.node.api.asking import Partition, fresh_metrics, problem, until


@pytest.mark.parametrize("wait", ["-1", "%C2%B2", "9" * 40, "", "%FF", "1&x=%"])
def test_no_request_breaks_the_count_of_its_time(http: httpx.Client, partition: Partition, wait: str) -> None:
    """Not one whose wait is no number, nor one whose query cannot be read."""
    path = f"/v1/topics/{partition.topic}/partitions/0/records?offset=0&wait_ms={wait}"

    assert 400 <= http.get(path).status_code < 500
    assert 200 == http.get("/livez").status_code


async def test_every_number_of_a_process_is_in_the_table(tmp_path: Path) -> None:
    """One that has no row is not shown, and nobody would notice."""
    async with laminar.embed(tmp_path / "data", journal_file_bytes=4 << 20) as node:
        await node.client.create_topic("t")
        answers = [
            await process.methods["stats"](Peer("here", 0, b""), b"") for process in node._processes.values()
        ]
    processes = [msgspec.msgpack.decode(answer, type=ProcessNumbers) for answer in answers]

    assert {"controller", "shard-0"} == {each.role for each in processes}
    assert [] == [found for each in processes for found in figures_of(each.parts)]
    held = {name for each in processes for name in each.histograms}
    assert held == {each.name for each in names.ALL if each.kind == "histogram"} - {names.HTTP_DURATION.name}


def test_openmetrics_is_answered_to_those_who_ask(http: httpx.Client, partition: Partition) -> None:
    partition.append("a")
    accept = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"

    def shown() -> tuple[set[str], set[str]]:
        answer = http.get("/metrics", headers={"Accept": accept})
        plain = http.get("/metrics")
        assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
        assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = openmetrics(answer.text)  # type: ignore[no-untyped-call]  # no types
        return {family.name for family in families}, {family.name for family in prometheus(plain.text)}

    until(lambda: len(set(map(frozenset, shown()))) == 1, shown)  # either may be kept for some seconds
    assert shown()[0] <= {family.name for family in names.ALL}


def test_a_node_tells_whether_its_modules_are_compiled(http: httpx.Client) -> None:
    """As the files beside it say; each process by itself."""
    builds = [
        sample.labels
        for family in prometheus(http.get("/metrics").text)
        for sample in family.samples
        if sample.name == names.BUILD.name
    ]

    assert builds
    assert {(laminar.__version__, described())} == {(each["version"], each["modules"]) for each in builds}


def test_partitions_are_shown_for_one_topic(http: httpx.Client, new_topic: Callable[..., str]) -> None:
    """Whichever shard is asked; and nothing else is shown."""
    topic = new_topic(partitions=3)
    Partition(http, topic, 2).append("a", "b")
    http.put(f"/v1/topics/{topic}/cursors/c", json={"positions": {"2": 1}})

    shown = http.get("/metrics", params={"detail": "partitions", "topic": topic}).text

    found = {
        (sample.name, sample.labels["partition"]): sample.value
        for family in prometheus(shown)
        for sample in family.samples
    }
    assert {"0", "1", "2"} == {number for _, number in found}
    assert (0, 2) == tuple(found["laminar_partition_end_offset", number] for number in ("0", "2"))
    assert 2 == found["laminar_partition_append_records_total", "2"]
    assert 1 == found["laminar_partition_consumer_lag_records", "2"]


def test_a_detail_without_its_topic_is_refused(http: httpx.Client) -> None:
    for query, field in (
        ({"detail": "partitions"}, "topic"),
        ({"topic": "t"}, "topic"),
        ({"detail": "all"}, "detail"),
    ):
        problem(http.get("/metrics", params=query), 422, "invalid", field=field)
    query = {"detail": "partitions", "topic": "nosuch"}
    problem(http.get("/metrics", params=query), 404, "no_such_topic", field="topic")


def test_how_long_requests_take_is_counted_by_operation_and_status(
    http: httpx.Client, partition: Partition
) -> None:
    """A wait that the client asked for is not counted as time."""
    name = "laminar_http_request_duration_seconds"

    def figures(text: str, operation: str, code: str) -> tuple[float, float]:
        found = {"sum": 0.0, "count": 0.0}
        for family in prometheus(text):
            for sample in family.samples if family.name == name else ():
                labels = sample.labels.get("operation"), sample.labels.get("code")
                if labels == (operation, code) and not sample.name.endswith("bucket"):
                    found[sample.name.removeprefix(f"{name}_")] = sample.value
        return found["count"], found["sum"]

    before = fresh_metrics(http)
    appended, fetched = figures(before, "append_to_partition", "201"), figures(before, "fetch", "200")
    missing = figures(before, "describe_topic", "404")
    partition.append("a")
    http.get(f"/v1/topics/{partition.topic}-none")
    began_s = time.monotonic()
    waited = http.get(f"/v1/topics/{partition.topic}/partitions/0/records?offset=1&wait_ms=300")
    took_s = time.monotonic() - began_s
    assert 200 == waited.status_code and took_s >= 0.3

    until(lambda: figures(fresh_metrics(http), "fetch", "200")[0] > fetched[0])
    after = fresh_metrics(http)
    assert appended[0] + 1 == figures(after, "append_to_partition", "201")[0]
    assert missing[0] + 1 == figures(after, "describe_topic", "404")[0]
    count, total = figures(after, "fetch", "200")
    assert fetched[0] + 1 == count
    assert total - fetched[1] < took_s - 0.25, "the wait is counted"


def test_what_a_consumer_has_not_read_has_an_age(http: httpx.Client, partition: Partition) -> None:
    """The age of its next record; 0 when it has read all."""

    def age(name: str) -> float:
        where = {"topic": partition.topic, "consumer": name}
        families = prometheus(fresh_metrics(http))
        [found] = [
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "laminar_consumer_lag_seconds" and sample.labels == where
        ]
        return found

    partition.append("a")
    for name, position in (("slow", 0), ("done", 1)):
        http.put(f"/v1/topics/{partition.topic}/cursors/{name}", json={"positions": {"0": position}})
    began_s = time.monotonic()

    first = age("slow")
    until(lambda: first < age("slow"))
    assert age("slow") <= time.monotonic() - began_s + 5
    assert 0 == age("done")
