"""The sink's options and columns: what is wrong is named, before anything is written."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

import laminar
from laminar.spark.write.options import check_sink_schema, parse_sink

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

types = pytest.importorskip("pyspark.sql.types")

BINARY, TEXT, INT, LONG = types.BinaryType(), types.StringType(), types.IntegerType(), types.LongType()


def schema(**columns: DataType) -> StructType:
    made: StructType = types.StructType()
    for name, kind in columns.items():
        made.add(name, kind)
    return made


def test_options_are_those_of_kafkas_sink_and_a_transactions() -> None:
    """Names are compared without case; what Spark adds to a stream's is left alone."""
    found = parse_sink(
        {"TOPIC": "t", "laminar.endpoints": "h:1", "txnappid": "nightly", "txnversion": "7"}, streaming=False
    )

    assert ("t", ("http://h:1",), ("nightly", 7)) == (found.topic, found.endpoints, found.transaction)
    assert parse_sink({"checkpointLocation": "c", "queryName": "q", "path": ""}, streaming=True).topic is None


@pytest.mark.parametrize(
    ("given", "streaming", "said"),
    [
        ({"topics": "a"}, True, "there is no option topics; did you mean topic?"),
        ({"kafka.bootstrap.servers": "a"}, True, "use laminar.endpoints here"),
        ({"txnAppId": "a"}, False, "option txnVersion is missing"),
        ({"txnVersion": "1"}, False, "option txnAppId is missing"),
        ({"txnAppId": " ", "txnVersion": "1"}, False, "option txnAppId: ' ' is not a valid name"),
        ({"txnAppId": "a", "txnVersion": "-1"}, False, "option txnVersion must be a number of at least 0"),
        ({"txnAppId": "a", "txnVersion": "1"}, True, "txnAppId is not supported in a stream"),
        ({"checkpointLocation": "a"}, False, "there is no option checkpointLocation"),
        ({"topic": ""}, True, "option topic is empty"),
        ({"laminar.timeoutMs": "soon"}, True, "option laminar.timeoutMs must be a number"),
    ],
)
def test_a_wrong_option_is_named(given: dict[str, str], streaming: bool, said: str) -> None:
    """Also what belongs to the other kind of write."""
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_sink(given, streaming=streaming)


def test_a_token_is_in_no_text() -> None:
    """Options are printed by those who look for a fault."""
    assert "secret" not in repr(parse_sink({"laminar.token": "secret"}, streaming=True))


@pytest.mark.parametrize(
    ("columns", "topic", "said"),
    [
        ({"key": BINARY}, "t", "column value is missing"),
        ({"value": LONG}, "t", "column value must be binary or string, not bigint"),
        ({"value": BINARY, "key": INT}, "t", "column key must be binary or string, not int"),
        ({"value": BINARY, "partition": LONG}, "t", "column partition must be int, not bigint"),
        ({"value": BINARY, "offset": LONG}, "t", "column offset cannot be written"),
        ({"value": BINARY, "VALUE": TEXT}, "t", "column value is given twice"),
        ({"value": BINARY}, None, "there is neither a column topic nor an option topic"),
    ],
)
def test_a_wrong_column_is_named(columns: dict[str, DataType], topic: str | None, said: str) -> None:
    """Missing, of another type, unknown, doubled."""
    with pytest.raises(ValueError, match=said):
        check_sink_schema(schema(**columns), topic=topic)


def test_columns_are_found_by_name() -> None:
    """In any order, without case."""
    found = check_sink_schema(schema(Topic=TEXT, VALUE=TEXT, key=BINARY), topic=None)

    assert {"topic": 0, "value": 1, "key": 2} == found


@pytest.mark.usefixtures("no_connection_is_left")
def test_a_write_without_a_name_leaves_none(url: str, client: laminar.Client) -> None:
    """Its sink is one that the cluster may forget; that of a named write is kept."""
    from laminar.spark.write.writers import BatchWriter

    named = {"txnAppId": "nightly", "txnVersion": "7"}
    begun = []
    for given in ({}, named):
        options = parse_sink({"topic": "t", "laminar.endpoints": url, **given}, streaming=False)
        writer = BatchWriter(options, schema(key=BINARY, value=BINARY))
        begun.append((writer._name, writer._epoch))
    (made_up, epoch), kept = begun
    assert ("nightly", 1) == kept
    assert made_up.startswith("spark-write-") and epoch > 1 << 31
    assert epoch == client.sink(made_up).describe().epoch
