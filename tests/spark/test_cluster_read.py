"""Three nodes: reads are spread over replicas; the death of a node costs time, not records, nor doubles."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import laminar
from laminar.spark.read.cluster import Cluster, resolve_endpoints
from laminar.spark.read.options import parse
from laminar.spark.read.plan import Range
from laminar.testing.cluster import LocalCluster
from tests.spark.waiting import await_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PARTITIONS = 3


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("nodes"), shards=1) as cluster:
        yield cluster


@pytest.fixture
def topic(nodes: LocalCluster, request: pytest.FixtureRequest) -> Iterator[laminar.Topic[bytes]]:
    with laminar.connect(nodes.urls) as client:
        yield client.create_topic(request.node.name, partitions=PARTITIONS, replicas=3)


def fill(topic: laminar.Topic[bytes], count: int, *, first: int = 0) -> None:
    with topic.producer() as producer:
        for number in range(first, first + count):
            producer.send(b"%d" % number, b"key %d" % (number % 17))


def test_reads_are_spread_over_replicas(nodes: LocalCluster, topic: laminar.Topic[bytes]) -> None:
    """Each range is complete, from any replica, and no replica serves them all."""
    fill(topic, 3_000)
    options = parse({"subscribe": topic.name, "laminar.endpoints": ",".join(nodes.urls)})
    here = Cluster(resolve_endpoints(options), timeout_s=30)
    served = here.session.reads_by_node
    # One node may lead all partitions, and followers learn of an end after the leader.
    deadline = time.monotonic() + 60
    try:
        while len(served) < 2 and time.monotonic() < deadline:
            for partition, end in topic.offsets().items():
                for start in range(0, end, 100):
                    wanted = Range(topic.name, partition, start, min(start + 100, end))
                    rows = sum(stop - first for _, first, stop in here.read(wanted))
                    assert rows == len(wanted)
    finally:
        here.close()

    assert len(served) >= 2, served


def test_one_replica_alone_is_read(
    nodes: LocalCluster, topic: laminar.Topic[bytes], spark: SparkSession
) -> None:
    """Each of the three by its number, and no other; all are equal, and a fourth is an error."""
    from laminar.spark.pipelines.compare import compare_replicas
    from laminar.spark.pipelines.session import cluster_options

    fill(topic, 300)
    options = parse({"subscribe": topic.name, "laminar.endpoints": ",".join(nodes.urls)})
    wanted = Range(topic.name, 0, 0, topic.offsets()[0])
    asked: list[str] = []
    for number in range(3):
        here = Cluster(resolve_endpoints(options), timeout_s=30)
        try:
            rows = sum(stop - first for _, first, stop in here.read(wanted, replica=number))
            assert rows == len(wanted)
            asked += here.session.reads_by_node
            with pytest.raises(laminar.NotFound, match="there is no replica 3"):
                next(here.read(wanted, replica=3))
        finally:
            here.close()
    told = compare_replicas(spark, cluster_options(nodes.urls), topic.name)

    assert 3 == len(asked) == len(set(asked))
    assert [(300, 300, True)] * 2 == [(each.records, each.others, each.equal) for each in told]


def test_a_query_reads_everything_once_though_a_node_is_killed(
    nodes: LocalCluster, topic: laminar.Topic[bytes], spark: SparkSession, tmp_path: Path
) -> None:
    """SIGKILL of a node under load, and its return: nothing is missing, nothing is doubled."""
    fill(topic, 500)
    under_way = threading.Event()
    sent: list[int] = []

    def produce() -> None:
        for first in range(500, 3_000, 100):
            fill(topic, 100, first=first)
            sent.append(first)
            if first == 1_000:
                under_way.set()

    query = (
        spark.readStream.format("laminar")
        .option("laminar.endpoints", ",".join(nodes.urls))
        .option("subscribe", topic.name)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", "200")
        .load()
        .selectExpr("cast(value as string) as value")
        .writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start(str(tmp_path / "out"))
    )
    producing = threading.Thread(target=produce)
    producing.start()
    try:
        assert under_way.wait(120)
        nodes.kill(2)
        producing.join()
        nodes.restart(2)
        await_rows(query, 3_000)
    finally:
        producing.join()
        query.stop()

    values = sorted(int(row.value) for row in spark.read.parquet(str(tmp_path / "out")).collect())
    assert 25 == len(sent)
    assert list(range(3_000)) == values


@pytest.mark.long
def test_topic_to_topic_over_a_nodes_death(
    nodes: LocalCluster, topic: laminar.Topic[bytes], spark: SparkSession, tmp_path: Path
) -> None:
    """SIGKILL of a node that leads, stages and coordinates: each record is there once, each key in order."""
    with laminar.connect(nodes.urls) as client:
        out = client.create_topic(f"{topic.name}-out", partitions=PARTITIONS + 1, replicas=3)
        fill(topic, 3_000)
        query = (
            spark.readStream.format("laminar")
            .option("laminar.endpoints", ",".join(nodes.urls))
            .option("subscribe", topic.name)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", "300")
            .load()
            .select("key", "value")
            .writeStream.format("laminar")
            .option("laminar.endpoints", ",".join(nodes.urls))
            .option("topic", out.name)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )
        try:
            while sum(out.offsets().values()) < 500:
                assert query.isActive, query.exception()
            nodes.kill(1)
            await_rows(query, 3_000)
            nodes.restart(1)
        finally:
            query.stop()

        by_key: dict[bytes | None, list[int]] = {}
        for record in out.read():
            by_key.setdefault(record.key, []).append(int(record.raw))
    assert {b"key %d" % key: list(range(key, 3_000, 17)) for key in range(17)} == by_key
