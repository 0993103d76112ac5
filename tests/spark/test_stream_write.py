"""``writeStream.format("laminar")``: every record once, wherever a task or the driver dies."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import laminar
from tests.long_examples import long

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

Topic = laminar.Topic[bytes]
Start = Callable[..., "StreamingQuery"]
PATIENCE_S = 240
RECORDS = 600
COLUMNS = "key, value, headers, tag, timestamp"


def fill(topic: Topic, count: int, *, first: int = 0) -> None:
    with topic.producer() as producer:
        for number in range(first, first + count):
            producer.send(
                b"%d" % number,
                b"key %d" % (number % 17),
                tag=f"tag {number % 3}",
                headers={"n": b"%d" % number},
            )


def by_key(topic: Topic) -> dict[bytes | None, list[int]]:
    """The numbers of each key, in the order in which its partition has them."""
    found: dict[bytes | None, list[int]] = {}
    for record in topic.read():
        found.setdefault(record.key, []).append(int(record.raw))
    return found


def expected(count: int) -> dict[bytes | None, list[int]]:
    return {b"key %d" % key: list(range(key, count, 17)) for key in range(17)}


@pytest.fixture
def out(client: laminar.Client, topic: Topic) -> Topic:
    """Where the queries write: another number of partitions than they read from."""
    return client.create_topic(f"{topic.name}-out", partitions=4, replicas=1)


@pytest.fixture
def faults(spark: SparkSession, tmp_path: Path) -> Path:
    """A folder for faults: see `tests.spark.faulty`."""
    from tests.spark.faulty import FaultySource

    spark.dataSource.register(FaultySource)
    folder = tmp_path / "faults"
    folder.mkdir()
    return folder


@pytest.fixture
def start(spark: SparkSession, url: str, tmp_path: Path, topic: Topic, faults: Path) -> Iterator[Start]:
    """``start(out, select=..., option=value)``: the query from the topic to `out`, until it has read all."""
    queries = []

    def begin(
        out: Topic | str, *, kind: str = "laminar-faulty", select: str = COLUMNS, **options: str
    ) -> StreamingQuery:
        rows = (
            spark.readStream.format("laminar")
            .options(
                **{
                    "laminar.endpoints": url,
                    "subscribe": topic.name,
                    "startingOffsets": "earliest",
                    "maxOffsetsPerTrigger": "250",
                    "columns": "key,value,partition,headers,tag,timestamp",
                }
            )
            .load()
        )
        given = {"laminar.endpoints": url, "checkpointLocation": str(tmp_path / "checkpoint"), **options}
        if kind == "laminar-faulty":
            given["faults"] = str(faults)
        writer = rows.selectExpr(*select.split(", ")).writeStream.format(kind).options(**given)
        if not isinstance(out, str):
            writer = writer.option("topic", out.name)
        queries.append(writer.trigger(availableNow=True).start())
        return queries[-1]

    yield begin
    for query in queries:
        query.stop()


def finish(query: StreamingQuery) -> None:
    assert query.awaitTermination(PATIENCE_S), "the query did not end"


@pytest.mark.usefixtures("compiled")
def test_a_stream_writes_what_it_reads(topic: Topic, out: Topic, start: Start) -> None:
    """Keys, values, headers, tags and times; each key in order, in the partition where a producer puts it."""
    fill(topic, RECORDS)
    finish(start(out, kind="laminar"))

    def rows(from_topic: Topic) -> dict[bytes, tuple[object, ...]]:
        return {
            record.raw: (record.key, record.tag, dict(record.headers), record.timestamp)
            for record in from_topic.read()
        }

    assert rows(topic) == rows(out)
    assert expected(RECORDS) == by_key(out)
    places = {record.key: record.partition for record in out.read()}
    assert places == {key: out.append(b"0", key=key).partition for key in places}


@pytest.mark.parametrize(
    ("fault", "survives"),
    [("task", True), ("after", False), ("taken", False), *long(("twice", True), ("before", False))],
)
def test_whatever_fails_once_each_record_is_there_once(
    topic: Topic, out: Topic, start: Start, faults: Path, fault: str, survives: bool
) -> None:
    """A task after its stages, one that ran twice, the driver around its commit, a second driver."""
    fill(topic, RECORDS)
    (faults / fault).touch()
    first = start(out)
    if survives:
        finish(first)
    else:
        with pytest.raises(Exception, match="another driver uses" if fault == "taken" else None):
            finish(first)
        seen = sum(map(len, by_key(out).values()))
        assert (0 < seen <= 253) if fault == "after" else 0 == seen
        finish(start(out))

    assert not (faults / fault).exists()
    assert expected(RECORDS) == by_key(out)


def test_a_batch_that_spark_does_not_know_to_be_committed_is_not_written_again(
    topic: Topic, out: Topic, start: Start, tmp_path: Path
) -> None:
    """A crash after the sink's commit and before Spark's own: the batch is run again, and changes nothing."""
    fill(topic, RECORDS)
    finish(start(out))
    commits = tmp_path / "checkpoint" / "commits"
    last = max(int(path.name) for path in commits.iterdir() if path.name.isdecimal())
    for name in (f"{last}", f".{last}.crc"):
        (commits / name).unlink()
    fill(topic, 100, first=RECORDS)
    finish(start(out))

    assert expected(RECORDS + 100) == by_key(out)


def test_a_wiped_checkpoint_is_another_sink(topic: Topic, out: Topic, start: Start, tmp_path: Path) -> None:
    """Its batches begin at 0 again: none is taken for one that the old query committed."""
    fill(topic, RECORDS)
    finish(start(out))
    shutil.rmtree(tmp_path / "checkpoint")
    finish(start(out))

    assert {key: sorted(2 * numbers) for key, numbers in expected(RECORDS).items()} == {
        key: sorted(numbers) for key, numbers in by_key(out).items()
    }


@pytest.mark.parametrize(
    ("committed", "said"),
    [(700, "batch 1 is below the last"), *long((250, "has committed another batch 1, with 250 records"))],
)
def test_a_checkpoint_that_was_put_back_ends_the_query_and_writes_nothing(
    topic: Topic, out: Topic, start: Start, tmp_path: Path, committed: int, said: str
) -> None:
    """Its next batch has a number that the sink has committed, and other records: none is dropped unsaid."""
    fill(topic, 250)
    finish(start(out, kind="laminar"))
    shutil.copytree(tmp_path / "checkpoint", tmp_path / "backup")
    fill(topic, committed, first=250)
    finish(start(out, kind="laminar"))
    written = by_key(out)
    shutil.rmtree(tmp_path / "checkpoint")
    (tmp_path / "backup").rename(tmp_path / "checkpoint")
    fill(topic, 100, first=250 + committed)

    for _ in range(2):
        with pytest.raises(Exception, match=said):
            finish(start(out, kind="laminar"))
    assert expected(250 + committed) == written == by_key(out)


@pytest.mark.parametrize(
    ("select", "to", "options", "said"),
    [
        ("key", "out", {}, "column value is missing"),
        *long(("value", "nowhere", {"topic": "absent"}, "there is no topic 'absent'")),
        ("value, 7 as partition", "out", {}, "column partition: there is no partition 7; the topic has 4"),
    ],
)
def test_a_wrong_query_ends_with_what_is_wrong(
    topic: Topic, out: Topic, start: Start, select: str, to: str, options: dict[str, str], said: str
) -> None:
    """The exception names the column or option."""
    fill(topic, 10)

    with pytest.raises(Exception, match=said):
        finish(start(out if to == "out" else to, kind="laminar", select=select, **options))
    assert {} == by_key(out)
