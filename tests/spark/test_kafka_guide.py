"""docs/spark-kafka.md is all of the Kafka guide's options, and what it says of each holds."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import laminar
from laminar.spark.read.options import OPTIONS, parse
from laminar.spark.read.plan import Range

types = pytest.importorskip("pyspark.sql.types")
pytest.importorskip("pyarrow")

from laminar.spark.read.batch_reader import BatchReader  # noqa: E402  # only with pyspark

ROOT = Path(__file__).parents[2]
Topic = laminar.Topic[bytes]

# Of Spark's guide, "Creating a Kafka Source".
GUIDE = """assign subscribe subscribePattern kafka.bootstrap.servers
startingTimestamp startingOffsetsByTimestamp startingOffsets
endingTimestamp endingOffsetsByTimestamp endingOffsets failOnDataLoss
kafkaConsumer.pollTimeoutMs fetchOffset.numRetries fetchOffset.retryIntervalMs maxOffsetsPerTrigger
minOffsetsPerTrigger maxTriggerDelay minPartitions groupIdPrefix kafka.group.id includeHeaders
startingOffsetsByTimestampStrategy""".split()


def rows(*, writing: bool = False) -> dict[str, tuple[str, str]]:
    """By what stands in the first column, the mark and what stands beside it."""
    text = (ROOT / "docs/spark-kafka.md").read_text().partition("\n## Writing\n")[2 if writing else 0]
    found = re.findall(r"^\| (`.*?`) \| (\w+) \| (.*) \|$", text, re.MULTILINE)
    return {name.strip("`"): (mark, beside) for name, mark, beside in found}


def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def test_all_of_the_guide_is_marked_and_what_is_same_is_tested() -> None:
    """A test that was renamed is renamed in the table too."""
    read, written = rows(), rows(writing=True)

    assert set(GUIDE) <= read.keys()
    assert {"key", "value", "headers", "topic", "partition", "includeHeaders"} <= written.keys()
    assert {"same", "different", "absent"} == {mark for mark, _ in read.values()}
    for name, (mark, beside) in [*read.items(), *written.items()]:
        named = re.findall(r"`(tests/[^`:]+)::([^`]+)`", beside)
        assert bool(named) == (mark == "same"), name
        for path, test in named:
            assert test in functions(ROOT / path), f"{name}: {path} has no {test}"


@pytest.mark.parametrize("name", GUIDE)
def test_what_is_absent_is_refused_by_name(name: str) -> None:
    """And what is not is an option."""
    if rows()[name][0] != "absent":
        assert name in OPTIONS
        return
    with pytest.raises(ValueError, match=f"option {re.escape(name)} belongs to the Kafka source"):
        parse({"subscribe": "a", name: "1"})


@pytest.fixture
def ranges(topic: Topic, url: str, no_connection_is_left: None) -> Callable[..., list[Range]]:
    """``ranges(option=value, ...)``: what the tasks of a batch of the test's topic would read."""

    def plan(**options: str) -> list[Range]:
        named = {"subscribe": topic.name} if "assign" not in options else {}
        given = {"laminar.endpoints": url, **named, **options}
        schema = types.StructType().add("value", types.BinaryType())
        partitions = BatchReader(parse(given, streaming=False), schema).partitions()
        return [Range(*each.value[0][:4]) for each in partitions]

    return plan


def fill(topic: Topic, *counts: int) -> None:
    for partition, count in enumerate(counts):
        with topic.producer() as producer:
            for number in range(count):
                producer.send(b"%d" % number, partition=partition)


def test_assign_names_partitions(topic: Topic, ranges: Callable[..., list[Range]]) -> None:
    """Of each topic those in its list, and no other."""
    fill(topic, 2, 3, 4)

    assert [Range(topic.name, 0, 0, 2), Range(topic.name, 2, 0, 4)] == ranges(
        assign=f'{{"{topic.name}": [2, 0]}}'
    )
    with pytest.raises(Exception, match=f"no partition {topic.name}:3"):
        ranges(assign=f'{{"{topic.name}": [3]}}')


def test_min_partitions_cuts_the_large_ones(topic: Topic, ranges: Callable[..., list[Range]]) -> None:
    """Below the number of partitions it changes nothing; above, the large ones make more tasks."""
    fill(topic, 2, 0, 98)

    assert 2 == len(ranges(minPartitions="2"))
    cut = ranges(minPartitions="10")
    assert 10 <= len(cut) <= 12
    assert [(0, 2)] == [(each.start, each.end) for each in cut if each.partition == 0]
    assert 98 == sum(len(each) for each in cut if each.partition == 2)


def test_a_start_after_all_records_is_an_error_or_the_end(
    topic: Topic, ranges: Callable[..., list[Range]]
) -> None:
    """By the option `startingOffsetsByTimestampStrategy`; an end after all records is the end."""
    fill(topic, 2, 3, 4)
    far = "99999999999999"

    with pytest.raises(ValueError, match="startingOffsetsByTimestampStrategy=latest"):
        ranges(startingTimestamp=far)
    assert [] == ranges(startingTimestamp=far, startingOffsetsByTimestampStrategy="latest")
    assert [2, 3, 4] == [each.end for each in ranges(startingTimestamp="0", endingTimestamp=far)]
    assert [] == ranges(endingTimestamp="0")
