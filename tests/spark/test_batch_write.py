"""``df.write.format("laminar")``: all rows or none, and with a name of its own each write once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

import laminar

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Topic = laminar.Topic[bytes]
Write = Callable[..., None]


@pytest.fixture
def write(url: str, topic: Topic) -> Write:
    """``write(frame, mode="append", option=value)``: into the topic."""

    def save(frame: DataFrame, *, mode: str = "append", **options: str) -> None:
        given = {"laminar.endpoints": url, "topic": topic.name, **options}
        frame.write.format("laminar").options(**given).mode(mode).save()

    return save


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 3).selectExpr(
        "cast(id % 17 as string) as key", "cast(id as string) as value", "concat('tag ', id % 3) as tag"
    )


def values(topic: Topic) -> list[int]:
    return sorted(int(record.raw) for record in topic.read())


def test_a_write_is_read_back_whole(spark: SparkSession, topic: Topic, write: Write) -> None:
    """Text is written as its UTF-8; a key lies where a producer puts it."""
    write(numbers(spark, 10_000))

    assert list(range(10_000)) == values(topic)
    places = {record.key: record.partition for record in topic.read()}
    assert all(
        (record.key, record.tag) == (b"%d" % (int(record.raw) % 17), f"tag {int(record.raw) % 3}")
        for record in topic.read()
    )
    assert places == {key: topic.append(b"0", key=key).partition for key in places}


def test_rows_stand_in_sparks_order(spark: SparkSession, topic: Topic, write: Write) -> None:
    """Task after task, in each partition, however fast each of them was."""
    write(
        spark.range(0, 40_000, 1, 8).selectExpr(
            "cast(id % 5 as string) as key", "cast(id as string) as value"
        )
    )

    by_key: dict[bytes | None, list[int]] = {}
    for record in topic.read():
        by_key.setdefault(record.key, []).append(int(record.raw))
    assert {b"%d" % key: list(range(key, 40_000, 5)) for key in range(5)} == by_key


def test_a_named_write_counts_once(spark: SparkSession, topic: Topic, write: Write) -> None:
    """The same txnAppId and txnVersion again change nothing; the next is written. What can't be the same, as
    its number or its records show, is an error: it would be lost.
    """
    name = {"txnAppId": f"job-{topic.name}"}
    for version in ("3", "3", "4"):
        write(numbers(spark, 50), **name, txnVersion=version)

    with pytest.raises(Exception, match=r"batch 3 is below the last that sink .* has committed, 4"):
        write(numbers(spark, 50), **name, txnVersion="3")
    with pytest.raises(Exception, match=r"another batch 4, with 50 records; .* with 51, is not written"):
        write(numbers(spark, 51), **name, txnVersion="4")
    assert sorted(2 * list(range(50))) == values(topic)


def test_a_write_that_fails_leaves_nothing(spark: SparkSession, topic: Topic, write: Write) -> None:
    """Though most of its rows were staged."""
    failing = numbers(spark, 10_000).selectExpr(
        "key", "if(value = '9999', raise_error('no such number'), value) as value"
    )

    with pytest.raises(Exception, match="no such number"):
        write(failing)
    assert [] == values(topic)


@pytest.mark.parametrize(
    ("select", "mode", "options", "said"),
    [
        ("key", "append", {}, "column value is missing"),
        ("value, 1L as partition", "append", {}, "column partition must be int, not bigint"),
        ("value", "overwrite", {}, "mode overwrite is not supported: topics are append-only"),
        ("value", "append", {"topic": "absent"}, "there is no topic 'absent'"),
        ("value", "append", {"txnVersion": "1", "txnAppId": "a b"}, "option txnAppId: .*'a b'"),
        ("cast(null as string) as value", "append", {}, "column value: every record needs a value"),
    ],
)
def test_a_wrong_write_says_what_is_wrong(
    spark: SparkSession,
    topic: Topic,
    write: Write,
    select: str,
    mode: str,
    options: dict[str, str],
    said: str,
) -> None:
    """The exception names the column, the option or the mode."""
    with pytest.raises(Exception, match=said):
        write(numbers(spark, 10).selectExpr(*select.split(", ")), mode=mode, **options)
    assert [] == values(topic)
