"""Options mean what the Kafka source's of the same name mean, and a misspelt one is no silent nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from laminar.spark import SETTINGS
from laminar.spark.read.offsets import OffsetSpec
from laminar.spark.read.options import COLUMNS, OPTIONS, parse
from laminar.spark.write.options import SINK_COLUMNS, SINK_OPTIONS

DOCS = Path(__file__).parents[2] / "docs" / "spark.md"


def test_spark_hands_over_lower_case() -> None:
    """Names are compared without case, as Spark lowers those it hands over."""
    found = parse({"subscribe": "a, b,a", "maxoffsetspertrigger": "10", "FAILONDATALOSS": "False"})

    assert ("a", "b") == found.topics
    assert 10 == found.max_offsets_per_trigger
    assert found.fail_on_data_loss is False


def test_a_stream_starts_at_the_end_and_a_batch_at_the_begin() -> None:
    """As the Kafka source's defaults."""
    assert OffsetSpec("latest") == parse({"subscribe": "a"}, streaming=True).start
    assert OffsetSpec("earliest") == parse({"subscribe": "a"}, streaming=False).start
    assert OffsetSpec("latest") == parse({"subscribe": "a"}, streaming=False).end


def test_a_time_goes_before_times_and_those_before_offsets() -> None:
    """startingTimestamp > startingOffsetsByTimestamp > startingOffsets."""
    given = {"subscribe": "a", "startingOffsets": "earliest"}
    by_time = {"startingOffsetsByTimestamp": '{"a": {"0": 5}}'}

    assert OffsetSpec("earliest") == parse(given).start
    assert OffsetSpec("timestamps", values={("a", 0): 5}) == parse(given | by_time).start
    assert OffsetSpec("timestamp", time_ms=9) == parse(given | by_time | {"startingTimestamp": "9"}).start


def test_partitions_can_be_assigned() -> None:
    """`assign` names partitions, sorted whatever their order was."""
    assert (("a", 0), ("a", 2), ("b", 1)) == parse({"assign": '{"b": [1], "a": [2, 0]}'}).assigned


@pytest.mark.parametrize(
    ("text", "expected_ms"), [("15m", 900_000), ("30s", 30_000), ("250", 250), ("1h", 3_600_000)]
)
def test_a_delay_has_a_unit(text: str, expected_ms: int) -> None:
    """A bare number is milliseconds."""
    assert expected_ms == parse({"subscribe": "a", "maxTriggerDelay": text}).max_trigger_delay_ms


@pytest.mark.parametrize(("text", "expected"), [("500", 500), ("64m", 64 << 20), ("2 GB", 2 << 30)])
def test_a_size_may_have_a_unit(text: str, expected: int) -> None:
    """Powers of 1024, as Spark's sizes."""
    assert expected == parse({"subscribe": "a", "maxBytesPerTrigger": text}).max_bytes_per_trigger


def test_endpoints_may_lack_their_scheme() -> None:
    """`host:port` is HTTP; what has a scheme keeps it."""
    found = parse({"subscribe": "a", "laminar.endpoints": "h1:7070, https://h2:1,unix:@x"})

    assert ("http://h1:7070", "https://h2:1", "unix:@x") == found.endpoints


def test_a_token_is_in_no_repr() -> None:
    """Plans and logs print options."""
    assert "s3cret" not in repr(parse({"subscribe": "a", "laminar.token": "s3cret"}))


def test_columns_are_chosen_by_name() -> None:
    """In the order given; headers only when asked for."""
    assert "value binary, offset bigint" == parse({"subscribe": "a", "columns": "VALUE, offset"}).schema
    assert "headers" not in parse({"subscribe": "a"}).columns
    assert "headers" == parse({"subscribe": "a", "includeHeaders": "true"}).columns[-1]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "give exactly one of the options subscribe"),
        ({"subscribe": "a", "assign": "{}"}, "exactly one"),
        ({"subscribe": " , "}, "names no topic"),
        ({"subscribePattern": "("}, "subscribePattern"),
        ({"assign": "[1]"}, "assign must be JSON"),
        ({"assign": "{}"}, "names no partition"),
        ({"subscribe": "a", "maxOffsetsPerTriger": "1"}, "did you mean maxOffsetsPerTrigger"),
        ({"subscribe": "a", "kafka.bootstrap.servers": "h"}, "use laminar.endpoints here"),
        (
            {"subscribe": "a", "maxOffsetsPerTrigger": "0"},
            "maxOffsetsPerTrigger must be a number of at",
        ),
        ({"subscribe": "a", "failOnDataLoss": "maybe"}, "failOnDataLoss must be one of true, false"),
        ({"subscribe": "a", "maxTriggerDelay": "soon"}, "maxTriggerDelay must be a duration"),
        ({"subscribe": "a", "maxBytesPerPartition": "much"}, "maxBytesPerPartition must be a size"),
        ({"subscribe": "a", "maxBytesPerPartition": "0"}, "maxBytesPerPartition must be a size"),
        ({"subscribe": "a", "tag": ""}, "tag is empty"),
        ({"subscribe": "a", "columns": "value,colour"}, "no column 'colour'"),
        (
            {"subscribe": "a", "startingOffsets": "now"},
            "startingOffsets must be 'latest', 'earliest'",
        ),
        ({"subscribe": "a", "startingOffsetsByTimestampStrategy": "x"}, "one of error, latest"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str], said: str) -> None:
    """The message names the option and what it may be."""
    with pytest.raises(ValueError, match=re.escape(said)):
        parse(given)


@pytest.mark.parametrize(
    ("given", "streaming", "said"),
    [
        ({"endingOffsets": "latest"}, True, "endingOffsets is not supported in a stream"),
        ({"maxOffsetsPerTrigger": "5"}, False, "maxOffsetsPerTrigger is not supported in a batch"),
        ({"startingOffsets": "latest"}, False, "cannot be latest"),
        ({"endingOffsets": "earliest"}, False, "cannot be earliest"),
        ({"endingOffsets": '{"a": {"0": -2}}'}, False, r"cannot be earliest \(-2\)"),
    ],
)
def test_an_option_of_the_other_kind_of_query_is_refused(
    given: dict[str, str], streaming: bool, said: str
) -> None:
    """A batch has no triggers and a stream has no end."""
    with pytest.raises(ValueError, match=said):
        parse({"subscribe": "a", **given}, streaming=streaming)


def test_every_option_column_and_setting_is_documented() -> None:
    """docs/spark.md has a row for each, and no row for what is not there."""
    reading, _, writing = DOCS.read_text("utf-8").partition("\n## Writing")
    rows, written = (re.findall(r"^\| `([A-Za-z.]+)` \|", part, re.M) for part in (reading, writing))

    assert sorted([*OPTIONS, *COLUMNS, *SETTINGS]) == sorted(rows)
    assert sorted([*SINK_OPTIONS, *SINK_COLUMNS]) == sorted(written)


def test_a_table_of_spark_s_catalog_is_refused_by_name() -> None:
    """Spark gives its own keys when a table is made, and nothing at all when it is read."""
    made = {"provider": "laminar", "owner": "me", "option.subscribe": "t", "subscribe": "t"}

    with pytest.raises(ValueError, match=r"options of a catalog table .* use CREATE TEMPORARY VIEW"):
        parse(made)
    with pytest.raises(ValueError, match=r"give exactly one of the options .* use CREATE TEMPORARY VIEW"):
        parse({}, streaming=False)
    with pytest.raises(ValueError, match=r"exactly one of the options subscribe, .*, assign$"):
        parse({"tag": "t"}, streaming=False)
