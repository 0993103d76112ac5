"""Compare: it finds what was planted between two topics, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import pytest

import laminar
from laminar.cli import run
from laminar.spark.pipelines.compare import Compared, Side, common_count, compare, replicas_of
from laminar.spark.pipelines.session import cluster_options

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Topic = laminar.Topic[bytes]
RECORDS = 600
KEYS = 17


def fill(topic: Topic, numbers: Iterable[int], *, changed: int | None = None, placed: bool = True) -> None:
    """Each with a key, but for some; `placed` in a partition that the number says, else the key."""
    with topic.producer() as producer:
        for number in numbers:
            producer.send(
                b"%d" % number,
                b"key %d" % (number % KEYS) if number % 50 else None,
                tag="another" if number == changed else f"tag {number % 3}",
                headers={"id": b"%d" % number},
                timestamp_ms=1_700_000_000_000 + number,
                partition=number % 3 if placed else None,
            )


@pytest.fixture
def make(client: laminar.Client, topic: Topic) -> Callable[..., Topic]:
    """``make("out")``: another topic of this test's own."""
    return lambda name, partitions=3: client.create_topic(
        f"{topic.name}-{name}", partitions=partitions, replicas=1
    )


def found(told: Compared) -> dict[str, set[tuple[int, int]]]:
    """Where the records of each kind stand; the examples are all of them here."""
    assert all(each.count == len(each.examples) for each in told.differences), told
    rows = {
        each.kind: {(row["partition"], row["offset"]) for row in each.examples} for each in told.differences
    }
    return {kind: places for kind, places in rows.items() if places}


def place(topic: Topic, number: int, *, last: bool = False) -> tuple[int, int]:
    """Where the record stands, the last of them if it stands there twice."""
    places = [(each.partition, each.offset) for each in topic.read() if each.raw == b"%d" % number]
    assert 1 + last == len(places)
    return max(places)


def test_by_place_what_differs_is_found(
    spark: SparkSession, url: str, topic: Topic, make: Callable[..., Topic]
) -> None:
    """One with another tag, if tags are compared, one that is missing, and two that are more."""
    cluster, numbers = cluster_options(url), range(RECORDS)
    fill(topic, numbers)
    copy, odd = make("copy"), make("odd")
    fill(copy, numbers, changed=301)
    fill(odd, [*numbers[:-1], RECORDS, RECORDS + 3], changed=300)
    one, same, other = (Side(cluster=cluster, topic=each.name) for each in (topic, copy, odd))
    equal = compare(spark, one, same, columns=("key", "value", "headers", "timestamp"))
    told = compare(spark, one, other)

    assert equal.equal and (RECORDS, RECORDS) == (equal.records, equal.others)
    assert (RECORDS, RECORDS + 1) == (told.records, told.others) and not told.equal
    different, last = place(topic, 300), place(topic, RECORDS - 1)
    more = {place(odd, RECORDS), place(odd, RECORDS + 3)}
    assert {"different": {different}, "missing": {last}, "extra": more} == found(told)


def test_by_key_what_was_planted_is_found(
    spark: SparkSession, url: str, topic: Topic, make: Callable[..., Topic]
) -> None:
    """A copy in other partitions is equal; one lost, one doubled, one late, one with another tag."""
    cluster, numbers = cluster_options(url), list(range(RECORDS))
    fill(topic, numbers, placed=False)
    copy, odd = make("copy", 4), make("odd", 4)
    fill(copy, numbers, placed=False)
    planted = [number for number in numbers if number not in (103, 34)]
    planted.insert(planted.index(51) + 1, 34)
    fill(odd, [*planted, 400], changed=300 + 7, placed=False)
    one, same, other = (Side(cluster=cluster, topic=each.name) for each in (topic, copy, odd))
    equal = compare(spark, one, same, by="key")
    told = compare(spark, one, other, by="key")

    assert equal.equal and (RECORDS, RECORDS) == (equal.records, equal.others)
    assert {
        "missing": {place(topic, 103), place(topic, 307)},
        "extra": {place(odd, 400, last=True), place(odd, 307)},
        "reordered": {place(topic, 34)},
    } == found(told)


@pytest.mark.parametrize(
    ("columns", "by", "said"),
    [(("offset",), "place", "not 'offset'"), ((), "place", "not ''"), (("key",), "hash", "not by 'hash'")],
)
def test_what_cannot_be_compared_is_refused(
    spark: SparkSession, columns: tuple[str, ...], by: Any, said: str
) -> None:
    side = Side(cluster={}, topic="any")
    with pytest.raises(ValueError, match=said):
        compare(spark, side, side, by=by, columns=columns)


def test_a_topic_without_replicas_has_nothing_to_compare(url: str, topic: Topic) -> None:
    with pytest.raises(ValueError, match=f"{topic.name} has partitions with 1 replica"):
        replicas_of(cluster_options(url), topic.name)


@pytest.mark.parametrize(
    ("counts", "why"), [([2, 3, 2], "2 to 3 replicas now"), ([1, 1], "nothing to compare")]
)
def test_replicas_are_compared_only_if_all_can_be(counts: list[int], why: str) -> None:
    """While one is replaced its partition has more: `equal` would say nothing of it."""
    assert 3 == common_count([3, 3], "t")
    with pytest.raises(ValueError, match=why):
        common_count(counts, "t")


def test_as_a_command(
    spark: SparkSession,
    url: str,
    topic: Topic,
    make: Callable[..., Topic],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What is not equal ends it with 1; a session that is there is used, and left."""
    fill(topic, range(5))
    odd = make("odd")
    fill(odd, range(4))
    code = run(["pipeline", "compare", topic.name, odd.name, "--url", url, "--json"])

    told = capsys.readouterr()
    assert 1 == code
    assert "5 records, 4 in the other" in told.err
    counts = {row["kind"]: row["count"] for row in json.loads(told.out)}
    assert {"missing": 1, "extra": 0, "different": 0, "reordered": 0} == counts
    assert spark.range(3).count() == 3
