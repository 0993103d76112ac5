"""Records that are larger than a batch: an error, a null or the whole value, and never a silent null."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import laminar
from laminar.spark.read.options import parse

types = pytest.importorskip("pyspark.sql.types")
pytest.importorskip("pyarrow")

from laminar.spark.read.batch_reader import BatchReader  # noqa: E402  # only with pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Topic = laminar.Topic[bytes]
_HEADER = types.StructType().add("key", types.StringType()).add("value", types.BinaryType())
TYPES = {
    "offset": types.LongType(),
    "key": types.BinaryType(),
    "value": types.BinaryType(),
    "tag": types.StringType(),
    "headers": types.ArrayType(_HEADER),
}
LARGE = 9 << 20


def put(topic: Topic, letter: bytes) -> None:
    """A large record between two small ones, in partition 0."""
    topic.append(b"first", partition=0)
    pieces = itertools.repeat(letter * (1 << 20), LARGE >> 20)
    topic.append_stream(pieces, b"a key", tag="t", headers={"own": b"1"}, partition=0, timestamp_ms=1)
    topic.append(b"last", partition=0)


@pytest.fixture
def read(topic: Topic, url: str, no_connection_is_left: None) -> Iterator[Callable[..., list[Any]]]:
    """``read("value binary", option=value, ...)``: the rows of a batch of the test's topic."""

    def rows(columns: str, **options: str) -> list[Any]:
        given = {"laminar.endpoints": url, "subscribe": topic.name, "columns": columns, **options}
        parsed = parse(given, streaming=False)
        schema = types.StructType([types.StructField(name, TYPES[name]) for name in parsed.columns])
        reader = BatchReader(parsed, schema)
        return [
            tuple(row.values())
            for partition in reader.partitions()
            for batch in reader.read(partition)
            for row in batch.to_pylist()
        ]

    yield rows


def test_a_large_record_is_an_error_unless_the_query_says_how_to_read_it(
    topic: Topic, read: Callable[..., list[Any]]
) -> None:
    """With topic, offset, size and the option. Who wants no values, or not this record, is not held up."""
    put(topic, b"A")

    with pytest.raises(ValueError, match=rf"{topic.name}/0: the value at 1 has {LARGE} bytes.*largeRecords="):
        read("value")
    assert [(b"first",), (None,), (b"last",)] == read("value", largeRecords="null")
    assert [(0,), (1,), (2,)] == read("offset")
    with pytest.raises(ValueError, match="option largeRecords must be one of error, null, fetch"):
        read("value", largeRecords="all")


def test_a_large_record_is_fetched_whole(topic: Topic, read: Callable[..., list[Any]]) -> None:
    """With its own key, tag and headers, and none of those that stand for its value where it is not."""
    put(topic, b"A")

    found = read("offset,key,value,tag,headers", largeRecords="fetch", tag="t")

    assert [(1, b"a key", b"A" * LARGE, "t", [{"key": "own", "value": b"1"}])] == found


def test_pipelines_keep_large_records_or_say_that_they_can_not(
    spark: SparkSession, url: str, topic: Topic, client: laminar.Client, tmp_path: Path
) -> None:
    """An archive has the value; a comparison sees that one differs; a replay says what it can't write."""
    import pyarrow.dataset

    from laminar.spark.pipelines.archive import archive
    from laminar.spark.pipelines.compare import Side, compare
    from laminar.spark.pipelines.replay import replay
    from laminar.spark.pipelines.session import cluster_options

    other = client.create_topic(f"{topic.name}-other", partitions=3, replicas=1)
    put(topic, b"A")
    put(other, b"B")
    cluster, folder = cluster_options(url), tmp_path / "archive"

    assert 3 == archive(spark, cluster, topic.name, str(folder))
    kept = pyarrow.dataset.dataset(list(folder.rglob("*.parquet"))).to_table(["offset", "value"]).to_pylist()
    assert {0: 5, 1: LARGE, 2: 4} == {row["offset"]: len(row["value"]) for row in kept}
    sides = [Side(cluster=cluster, topic=each.name) for each in (topic, other)]
    found = compare(spark, *sides, columns=["value"])
    assert {"different": 1} == {each.kind: each.count for each in found.differences if each.count}
    with pytest.raises(Exception, match=f"column value: a value has {LARGE} bytes; the sink writes values"):
        replay(spark, cluster, other.name, archive=str(folder), checkpoint=str(tmp_path / "replay"))
