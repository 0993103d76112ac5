"""Record batches are what the batches hold, in the sizes and the form that Spark takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from laminar.batch import Batch, Codec, build, stamp
from laminar.spark.read.options import COLUMNS

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

pyarrow = pytest.importorskip("pyarrow")
types = pytest.importorskip("pyspark.sql.types")

from pyspark.sql.pandas.types import to_arrow_schema  # noqa: E402  # only where pyspark is

from laminar.spark.read.columns import (  # noqa: E402  # only where pyarrow is
    LEAST_BYTES,
    MOST_BYTES,
    MOST_ROWS,
    RecordBatchBuilder,
    check_schema,
)
from laminar.spark.read.plan import RowFilter  # noqa: E402  # after what is skipped without pyspark

TYPES = {
    "binary": types.BinaryType(),
    "string": types.StringType(),
    "int": types.IntegerType(),
    "bigint": types.LongType(),
    "timestamp": types.TimestampType(),
}
TYPES["array<struct<key:string,value:binary>>"] = types.ArrayType(
    types.StructType().add("key", TYPES["string"]).add("value", TYPES["binary"])
)


def schema(**columns: str) -> StructType:
    """A schema by Spark's names of types; Spark's own parser of them needs a JVM."""
    made: StructType = types.StructType()
    for name, kind in columns.items():
        made.add(name, TYPES[kind])
    return made


ALL = schema(**COLUMNS)
VALUE = schema(value="binary")


def batch(base_offset: int, values: list[bytes], **columns: object) -> Batch:
    """A stamped batch as a server would send it."""
    frame = build(values, **columns)  # type: ignore[arg-type]  # the columns of `build`
    stamp(
        frame,
        index=base_offset + 1,
        term=1,
        prev_term=1,
        base_offset=base_offset,
        append_time_ms=1_700_000_000_123,
        committed_index=0,
    )
    return Batch(bytes(frame))


def whole(*batches: Batch) -> list[tuple[Batch, int, int]]:
    return [(each, 0, len(each)) for each in batches]


def rows(
    form: StructType,
    pieces: list[tuple[Batch, int, int]],
    *,
    tag: str | None = None,
    since_us: int | None = None,
) -> list[dict[str, object]]:
    found = []
    for made in RecordBatchBuilder(
        form, topic="t", partition=3, rows=RowFilter(tag, since_us)
    ).record_batches(pieces):
        made.validate(full=True)
        assert to_arrow_schema(form, timezone="UTC").equals(made.schema)
        found += made.to_pylist()
    return found


def test_every_column_of_a_record() -> None:
    """What the producer gave is there, what it did not give is null or the append's."""
    given = batch(
        40,
        [b"a", b"b"],
        keys=[b"k", None],
        timestamps=[1_600_000_000_001, None],
        tags=[None, "T"],
        headers=[{"h": b"1", "i": b""}, None],
        trace_ids=[b"0123456789abcdef", None],
    )

    first, second = rows(ALL, whole(given))

    assert (b"k", b"a", "t", 3, 40, 0, None) == tuple(
        first[name] for name in ("key", "value", "topic", "partition", "offset", "timestampType", "tag")
    )
    assert [{"key": "h", "value": b"1"}, {"key": "i", "value": b""}] == first["headers"]
    assert (b"0123456789abcdef", None) == (first["traceId"], second["traceId"])
    assert 1_600_000_000_001 == first["timestamp"].timestamp() * 1000  # type: ignore[attr-defined]
    assert (None, b"b", 41, 1, "T", None) == tuple(
        second[name] for name in ("key", "value", "offset", "timestampType", "tag", "headers")
    )
    assert 1_700_000_000_123 == second["timestamp"].timestamp() * 1000  # type: ignore[attr-defined]


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
def test_batches_with_and_without_columns_join(codec: Codec) -> None:
    """Small batches become one record batch, whatever each of them has."""
    given = [
        batch(0, [b"a"], codec=codec),
        batch(1, [b"b", b"c"], keys=[b"k", None], headers=[{"h": b"1"}, None], codec=codec),
        batch(3, [b"d"], tags=["T"], timestamps=[5], codec=codec),
    ]

    found = rows(ALL, whole(*given))

    assert [b"a", b"b", b"c", b"d"] == [row["value"] for row in found]
    assert [0, 1, 2, 3] == [row["offset"] for row in found]
    assert [None, [{"key": "h", "value": b"1"}], None, None] == [row["headers"] for row in found]
    assert [1, 1, 1, 0] == [row["timestampType"] for row in found]


def test_a_range_cuts_the_batches_at_its_ends() -> None:
    """Only the rows asked for, in every column."""
    given = batch(
        10, [b"0", b"1", b"2", b"3"], keys=[b"a", b"b", None, b"d"], headers=[None, {"x": b"y"}, None, None]
    )

    found = rows(ALL, [(given, 1, 3)])

    assert [(11, b"1", b"b", [{"key": "x", "value": b"y"}]), (12, b"2", None, None)] == [
        (row["offset"], row["value"], row["key"], row["headers"]) for row in found
    ]


def test_small_batches_are_joined_and_large_ones_cut() -> None:
    """Record batches of 1 to 4 MB, but for the last."""
    small = [batch(number * 10, [b"x" * 1000] * 10) for number in range(500)]
    large = batch(5000, [b"y" * 1000] * 10_000)

    made = list(RecordBatchBuilder(VALUE, topic="t", partition=0).record_batches(whole(*small, large)))

    assert 15_000 == sum(each.num_rows for each in made)
    assert all(each.nbytes <= MOST_BYTES * 1.01 for each in made)
    assert len([each for each in made if each.nbytes < LEAST_BYTES]) <= 2


def test_narrow_columns_are_bounded_by_rows() -> None:
    """Offsets alone never fill a megabyte's worth of frames before they are handed on."""
    many = [batch(number * 1000, [b""] * 1000) for number in range(200)]
    form = schema(offset="bigint")

    made = list(RecordBatchBuilder(form, topic="t", partition=0).record_batches(whole(*many)))

    assert list(range(200_000)) == pyarrow.concat_arrays([each.column(0) for each in made]).to_pylist()
    assert all(each.num_rows <= MOST_ROWS for each in made)


def test_values_stay_in_the_frame() -> None:
    """A batch of a megabyte reaches Spark's socket without a copy of its values."""
    given = batch(0, [b"z" * 1000] * 2000)
    frame = pyarrow.py_buffer(given.frame)

    (made,) = RecordBatchBuilder(VALUE, topic="t", partition=0).record_batches(whole(given))

    data = made.column(0).buffers()[2]
    assert frame.address <= data.address < frame.address + frame.size


@pytest.mark.parametrize(("first", "stop"), [(0, 4), (1, 4), (1, 3)])
def test_of_a_tag_only_its_records_come(first: int, stop: int) -> None:
    """A batch may hold others: each column loses their rows, whether the tag is shown or not."""
    tags = ["red", "blue", "red", None]
    given = batch(10, [b"0", b"1", b"2", b"3"], tags=tags, keys=[b"a", None, b"c", b"d"])
    others = batch(14, [b"4"])
    expected = [offset + 10 for offset in range(first, stop) if tags[offset] == "red"]
    pieces = [(given, first, stop), (others, 0, 1)]

    found = rows(ALL, pieces, tag="red")

    assert expected == [row["offset"] for row in found]
    assert {"red"} == {row["tag"] for row in found}
    assert {"t"} == {row["topic"] for row in found}
    assert expected == [int(row["value"]) + 10 for row in rows(VALUE, pieces, tag="red")]  # type: ignore[call-overload]
    assert len(expected) == len(rows(schema(partition="int"), pieces, tag="red"))
    assert [] == rows(ALL, pieces, tag="green")


def test_times_are_compared_before_spark_sees_the_record() -> None:
    """The producer's time where it gave one, else that of the append; together with a tag."""
    given = batch(10, [b"0", b"1", b"2"], timestamps=[5, None, 7], tags=["red", None, "red"])

    assert [11] == [row["offset"] for row in rows(ALL, whole(given), since_us=8_000)]
    assert [11, 12] == [row["offset"] for row in rows(ALL, whole(given), since_us=6_000)]
    assert [b"2"] == [row["value"] for row in rows(VALUE, whole(given), since_us=7_000, tag="red")]


def test_values_are_fetched_only_if_they_are_wanted() -> None:
    """A fetch names what it needs: what the frame's other columns are made of, not those."""

    def fields(tag: str | None = None, **columns: str) -> tuple[str, ...] | None:
        return RecordBatchBuilder(schema(**columns), topic="t", partition=0, rows=RowFilter(tag)).fields

    assert fields(value="binary", offset="bigint") is None
    assert ("offset",) == fields(topic="string", partition="int")
    assert ("key", "offset", "timestamp") == fields(key="binary", timestampType="int")
    assert ("offset", "tag", "trace_id") == fields("red", traceId="binary")


def test_columns_without_the_frame_need_none_of_it() -> None:
    """Topic and partition are known; a count over them unfolds nothing."""
    found = rows(schema(partition="int", topic="string"), whole(batch(0, [b"a", b"b"])))

    assert [{"partition": 3, "topic": "t"}] * 2 == found


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (("value", "string"), "column value must be binary, not string"),
        (("offset", "int"), "column offset must be bigint, not int"),
        (("colour", "string"), "there is no column colour; there are key, value"),
    ],
)
def test_a_schema_of_other_columns_is_refused(column: tuple[str, str], said: str) -> None:
    """By name and type, before anything is read."""
    with pytest.raises(ValueError, match=said):
        check_schema(schema(**dict([column])))
