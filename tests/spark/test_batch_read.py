"""``spark.read.format("laminar")`` shows what was appended, all of it, and only what was asked for."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import laminar
import laminar.spark
from laminar.batch import build

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Read = Callable[..., "DataFrame"]
Topic = laminar.Topic[bytes]


def fill(topic: Topic, count: int, *, first: int = 0) -> None:
    """Records ``first`` to ``first + count - 1`` over all partitions, by key."""
    with topic.producer() as producer:
        for number in range(first, first + count):
            producer.send(b"value %d" % number, b"key %d" % (number % 17))


def places(rows: list[Any]) -> list[tuple[int, int]]:
    return sorted((row.partition, row.offset) for row in rows)


@pytest.mark.usefixtures("compiled")
def test_a_batch_read_equals_what_was_appended(topic: Topic, read: Read) -> None:
    """Every column of every record, as the client reads it."""
    fill(topic, 5_000)
    topic.append(b"", "k", tag="T", headers={"h": b"\x00"}, timestamp_ms=1_600_000_000_001)

    rows = read(
        topic, columns="key,value,topic,partition,offset,timestamp,timestampType,headers,tag"
    ).collect()

    found = {
        (row.partition, row.offset): (
            *(row.key, row.value, row.topic, row.timestamp.timestamp() * 1000, row.timestampType, row.tag),
            {each.key: each.value for each in row.headers or []},
        )
        for row in rows
    }
    expected = {
        (record.partition, record.offset): (
            *(record.key, record.raw, topic.name, record.timestamp, 0 if record.tag else 1, record.tag),
            dict(record.headers),
        )
        for record in topic.read()
    }
    assert expected == found
    assert 5_001 == len(rows)


def test_the_schema_is_the_kafka_source_s(topic: Topic, read: Read) -> None:
    """A Kafka job's expressions work unchanged; headers come when asked for."""
    expected = (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,"
        "timestampType:int"
    )

    assert expected + ">" == read(topic).schema.simpleString()
    assert (
        expected + ",headers:array<struct<key:string,value:binary>>>"
        == read(topic, includeHeaders="true").schema.simpleString()
    )


def test_a_query_may_name_its_columns(topic: Topic, read: Read) -> None:
    """By a schema of its own, in its own order: nothing else is built."""
    fill(topic, 100)

    frame = read(topic, schema="offset bigint, value binary")

    assert ["offset", "value"] == frame.columns
    assert {b"value %d" % number for number in range(100)} == {bytes(row.value) for row in frame.collect()}


def test_of_one_tag_only_its_records_are_read(topic: Topic, read: Read) -> None:
    """The option `tag`: in any column, whatever lies between; also where no value is asked for."""
    for round in range(3):
        fill(topic, 100)
        topic.append(b"%d" % round, "k", tag="red", headers={"n": b"%d" % round})
    of_all = read(topic, columns="tag,offset,partition").where("tag = 'red'")

    found = read(topic, tag="red", columns="value,offset,partition")

    assert [b"0", b"1", b"2"] == [bytes(row.value) for row in found.orderBy("offset").collect()]
    assert places(of_all.collect()) == places(found.collect())
    assert 3 == read(topic, tag="red", schema="key binary").count()
    assert 0 == read(topic, tag="green").count()


@pytest.mark.usefixtures("compiled")
def test_filters_can_be_taken_over(topic: Topic, read: Read) -> None:
    """With `pushdown` the same rows come as without, and partitions that no filter asks for have no task."""
    fill(topic, 300)
    topic.append(b"x", "k", tag="red", timestamp_ms=1_600_000_000_001)
    conditions = {
        "partition = 1 and offset >= 3 and offset < 9": 1,
        "tag = 'red' and offset >= 0": 3,
        "timestamp < '2021-01-01' and value is not null": 3,
        "cast(value as string) like '%7' and partition in (0, 2)": 2,
    }

    for condition, tasks in conditions.items():
        plain = read(topic, columns="partition,offset,value,tag,timestamp").where(condition)
        pushed = read(topic, columns="partition,offset,value,tag,timestamp", pushdown="true").where(condition)
        assert sorted(plain.collect()) == sorted(found := pushed.collect())
        assert found
        assert tasks == pushed.rdd.getNumPartitions()


def test_trace_ids_are_a_column(topic: Topic, read: Read, url: str) -> None:
    """As their producer gave them, 16 bytes."""
    frame = build([b"a", b"b"], trace_ids=[bytes(range(16)), None])
    request = urllib.request.Request(
        f"{url}/v1/topics/{topic.name}/partitions/1/records",
        data=bytes(frame),
        headers={"Content-Type": "application/vnd.laminar.batch"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert 200 == answer.status

    rows = read(topic, columns="offset,traceId").orderBy("offset").collect()

    assert [(0, bytes(range(16))), (1, None)] == [
        (row.offset, row.traceId and bytes(row.traceId)) for row in rows
    ]


def test_an_empty_topic_is_an_empty_frame(topic: Topic, read: Read) -> None:
    """With its schema, and without a task's failure."""
    assert 0 == read(topic).count()


def test_start_and_end_by_offset(topic: Topic, read: Read) -> None:
    """JSON as the Kafka source's: -2 and -1 are the partition's begin and end."""
    fill(topic, 600)
    ends = topic.offsets()

    rows = read(
        topic,
        startingOffsets=f'{{"{topic.name}": {{"0": 5, "1": -2, "2": {ends[2]}}}}}',
        endingOffsets=f'{{"{topic.name}": {{"0": 9, "1": -1, "2": -1}}}}',
    ).collect()

    assert [(0, offset) for offset in range(5, 9)] + [(1, offset) for offset in range(ends[1])] == places(
        rows
    )


def test_one_task_a_partition_or_more(topic: Topic, read: Read) -> None:
    """Each topic partition is a Spark partition; `maxRecordsPerPartition` cuts them, and loses nothing."""
    fill(topic, 900)
    cut = read(topic, maxRecordsPerPartition="100")

    assert 3 == read(topic).rdd.getNumPartitions()
    assert cut.rdd.getNumPartitions() >= 9
    assert places(read(topic).collect()) == places(cut.collect())


def test_several_topics_by_pattern(client: laminar.Client, spark: SparkSession, url: str) -> None:
    """`subscribePattern` takes whole names; each row names its topic."""
    for name in ("pattern-a", "pattern-b", "other-pattern-a"):
        client.create_topic(name, partitions=1, replicas=1).append(name.encode())

    reader = spark.read.format("laminar").option("laminar.endpoints", url)
    rows = reader.option("subscribePattern", "pattern-.*").load().collect()

    assert {("pattern-a", b"pattern-a"), ("pattern-b", b"pattern-b")} == {
        (row.topic, bytes(row.value)) for row in rows
    }


@pytest.mark.parametrize(
    ("options", "schema", "said"),
    [
        ({"maxOffsetsPerTriger": "1"}, None, "did you mean maxOffsetsPerTrigger"),
        ({}, "value string", "column value must be binary, not string"),
        ({"startingOffsets": '{"x": {"0": 1}}'}, None, "give an offset for exactly the partitions"),
    ],
    ids=["option", "schema", "offsets"],
)
def test_what_cannot_be_read_is_said_in_the_driver(
    topic: Topic, read: Read, options: dict[str, str], schema: str | None, said: str
) -> None:
    """An error with the option or column in its text, before any task runs."""
    with pytest.raises(Exception, match=said):
        read(topic, schema=schema, **options).collect()


def test_a_topic_that_is_not_there_is_named(spark: SparkSession, url: str) -> None:
    """Not an empty frame."""
    reader = spark.read.format("laminar").option("laminar.endpoints", url).option("subscribe", "nowhere")

    with pytest.raises(Exception, match="nowhere"):
        reader.load().collect()


def test_configure_sets_what_makes_it_fast(spark: SparkSession) -> None:
    """The Unix socket between JVM and Python, above all."""
    assert laminar.spark.SETTINGS == {name: spark.conf.get(name) for name in laminar.spark.SETTINGS}
