"""``spark.readStream.format("laminar")``: every record once, over micro-batches, restarts and growth."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import laminar
import laminar.spark
from laminar.spark.read.offsets import decode
from tests.spark.waiting import await_rows, rows_of_batches

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Topic = laminar.Topic[bytes]
Start = Callable[..., "StreamingQuery"]
PATIENCE_S = 240


def fill(topic: Topic, count: int, *, first: int = 0) -> None:
    with topic.producer() as producer:
        for number in range(first, first + count):
            producer.send(b"%d" % number, b"key %d" % (number % 17))


@pytest.fixture
def start(spark: SparkSession, url: str, tmp_path: Path, topic: Topic) -> Iterator[Start]:
    """``start(available_now=False, option=value, ...)``: the query from the topic to Parquet."""
    queries = []

    def begin(*, available_now: bool = False, **options: str) -> StreamingQuery:
        rows = (
            spark.readStream.format("laminar")
            .options(**{"laminar.endpoints": url, "subscribe": topic.name, **options})
            .load()
        )
        writer = (
            rows.selectExpr("partition", "offset", "cast(value as string) as value")
            .writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
        )
        trigger = {"availableNow": True} if available_now else {"processingTime": "0 seconds"}
        queries.append(writer.trigger(**trigger).start(str(tmp_path / "out")))
        return queries[-1]

    yield begin
    for query in queries:
        query.stop()


@pytest.fixture
def written(spark: SparkSession, tmp_path: Path) -> Callable[[], list[int]]:
    """The values that the query has written, sorted; a double is there twice."""

    def values() -> list[int]:
        return sorted(int(row.value) for row in spark.read.parquet(str(tmp_path / "out")).collect())

    return values


def journaled(tmp_path: Path, batch: int) -> dict[str, Any]:
    """The source's offset that Spark's journal has for the end of `batch`."""
    lines = (tmp_path / "checkpoint" / "offsets" / str(batch)).read_text().splitlines()
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def test_micro_batches_read_everything_once_over_a_restart(
    topic: Topic, start: Start, written: Callable[[], list[int]]
) -> None:
    """Batches keep to the limit, from the first on; the second run goes on where the first was, with what
    came between.
    """
    fill(topic, 1_000)
    first = start(startingOffsets="earliest", maxOffsetsPerTrigger="300")
    await_rows(first, 1_000)
    sizes = rows_of_batches(first)
    first.stop()
    fill(topic, 500, first=1_000)
    second = start(startingOffsets="earliest", maxOffsetsPerTrigger="300")
    await_rows(second, 500)
    fill(topic, 100, first=1_500)
    await_rows(second, 600)

    assert list(range(1_600)) == written()
    assert len(sizes) == 4
    assert max(sizes) <= 300 + 3


def test_the_start_is_pinned_by_the_first_batch(
    topic: Topic, start: Start, written: Callable[[], list[int]], tmp_path: Path
) -> None:
    """From "latest" batch 0 reads nothing and ends there; only what came afterwards is read."""
    fill(topic, 100)
    query = start()
    query.processAllAvailable()
    fill(topic, 50, first=100)
    await_rows(query, 50)
    ends = {(topic.name, partition): end for partition, end in topic.offsets().items()}
    first = decode(journaled(tmp_path, 0))
    batches = [
        int(path.name) for path in (tmp_path / "checkpoint" / "offsets").iterdir() if path.suffix == ""
    ]

    assert 100 == sum(first.positions.values())
    assert first.since == first.positions
    assert ends == decode(journaled(tmp_path, max(batches))).positions
    assert list(range(100, 150)) == written()


def test_a_restart_within_batch_0_loses_nothing(
    topic: Topic, start: Start, written: Callable[[], list[int]], tmp_path: Path
) -> None:
    """Spark asks for the first offset again: "latest" must mean what it meant the first time."""
    fill(topic, 100)
    query = start()
    query.processAllAvailable()
    query.stop()
    commits = tmp_path / "checkpoint" / "commits"
    for name in ("0", ".0.crc"):
        (commits / name).unlink()  # as after a crash between the batch's offsets and its commit
    fill(topic, 50, first=100)
    again = start(available_now=True)

    assert again.awaitTermination(PATIENCE_S)
    assert list(range(100, 150)) == written()


def test_available_now_ends_while_the_log_grows(
    topic: Topic, start: Start, written: Callable[[], list[int]]
) -> None:
    """It reads what was there when it began, in several batches, and ends; the next run reads the rest."""
    fill(topic, 500)
    enough = threading.Event()
    sent = [500]

    def grow() -> None:
        while not enough.is_set():
            fill(topic, 20, first=sent[0])
            sent[0] += 20
            enough.wait(0.1)

    growing = threading.Thread(target=grow)
    growing.start()
    try:
        first = start(available_now=True, startingOffsets="earliest", maxOffsetsPerTrigger="200")
        ended = first.awaitTermination(PATIENCE_S)
        sizes = rows_of_batches(first)
    finally:
        enough.set()
        growing.join()
    read_first = len(written())
    second = start(available_now=True, startingOffsets="earliest")

    assert ended
    assert len(sizes) >= 3
    assert 500 <= read_first < sent[0]
    assert second.awaitTermination(PATIENCE_S)
    assert list(range(sent[0])) == written()


def test_progress_and_listeners_show_the_lag(topic: Topic, start: Start, spark: SparkSession) -> None:
    """startOffset, endOffset and latestOffset are in the query's progress, as offsets."""
    fill(topic, 100)
    reported: queue.Queue[laminar.spark.QueryLag] = queue.Queue()
    listener = laminar.spark.LagListener(reported.put)
    spark.streams.addListener(listener)
    try:
        query = start(startingOffsets="earliest", maxOffsetsPerTrigger="60")
        await_rows(query, 100)
        source = next(p for p in query.recentProgress if p["numInputRows"])["sources"][0]
        lags: list[laminar.spark.QueryLag] = []
        while not lags or lags[-1].total:
            lags.append(reported.get(timeout=PATIENCE_S))
    finally:
        spark.streams.removeListener(listener)

    assert 100 == sum(json.loads(source["latestOffset"])[f"{topic.name}:{number}"] for number in range(3))
    assert source["endOffset"] != source["latestOffset"]
    assert 0 < lags[0].total <= 100
    assert 100 == sum(lags[-1].read_to.values())


def test_an_exception_names_what_is_wrong(start: Start, topic: Topic) -> None:
    """A start that cannot be ends the query, with the reason in its exception."""
    query = start(startingOffsets=json.dumps({topic.name: {"0": 1}}))

    with pytest.raises(Exception, match="give an offset for exactly the partitions"):
        query.processAllAvailable()


def test_a_query_of_a_topic_created_again_fails_or_reads_all_of_the_new_one(
    topic: Topic, client: laminar.Client, start: Start, written: Callable[[], list[int]]
) -> None:
    """By default it does not go on; without `failOnDataLoss` nothing of the new topic is passed over."""
    fill(topic, 30)
    assert start(available_now=True, startingOffsets="earliest").awaitTermination(PATIENCE_S)
    topic.delete()
    fill(client.create_topic(topic.name, partitions=3, replicas=1), 20, first=100)

    with pytest.raises(Exception, match=f"{topic.name}/0 was read to .*created again.*failOnDataLoss"):
        start(available_now=True).awaitTermination(PATIENCE_S)
    assert start(available_now=True, failOnDataLoss="false").awaitTermination(PATIENCE_S)
    assert [*range(30), *range(100, 120)] == written()


def test_a_query_goes_over_a_split_and_a_merge(
    topic: Topic, start: Start, written: Callable[[], list[int]]
) -> None:
    """While it runs, and when it starts again from its checkpoint after a change."""
    fill(topic, 100)
    query = start(startingOffsets="earliest")
    topic.split(1, at=30_000, wait=30)
    fill(topic, 100, first=100)
    await_rows(query, 200)
    query.stop()
    topic.merge([3, 4], wait=30)
    fill(topic, 100, first=200)
    start(available_now=True, startingOffsets="earliest").awaitTermination(PATIENCE_S)

    assert list(range(300)) == written()
