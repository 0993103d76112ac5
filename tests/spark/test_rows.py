"""Rows become frames by topic and partition: each row once, keys in order, whatever the columns are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from laminar.batch import Batch
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route

pyarrow = pytest.importorskip("pyarrow")

from laminar.spark.write import rows as rows_module  # noqa: E402  # only where pyarrow is
from laminar.spark.write.rows import STAGE_BYTES, Partitioner, Stage, StageBuffer  # noqa: E402  # only where pyarrow is

TYPES = {
    "key": pyarrow.binary(),
    "value": pyarrow.binary(),
    "topic": pyarrow.utf8(),
    "partition": pyarrow.int32(),
    "tag": pyarrow.utf8(),
    "timestamp": pyarrow.timestamp("us", tz="UTC"),
    "traceid": pyarrow.binary(),
    "headers": pyarrow.list_(pyarrow.struct([("key", pyarrow.utf8()), ("value", pyarrow.binary())])),
}
PARTITIONS = 3


def batch(**columns: list[Any]) -> Any:
    arrays = [pyarrow.array(cells, TYPES[name]) for name, cells in columns.items()]
    return pyarrow.RecordBatch.from_arrays(arrays, names=list(columns))


def staged(*batches: Any, topic: str | None = "t") -> list[Stage]:
    """All stages of these batches, in order."""

    def every() -> Iterator[Stage]:
        names = {name: at for at, name in enumerate(batches[0].schema.names)}
        rows = StageBuffer(
            names, topic=topic, partitioner_of=lambda _: Partitioner(Route.even(PARTITIONS), first=0)
        )
        for each in batches:
            yield from rows.put(each)
        yield from rows.finish()

    return list(every())


def written(stages: list[Stage]) -> dict[tuple[str, int], list[tuple[bytes | None, bytes]]]:
    """(key, value) of every record, by topic and partition."""
    found: dict[tuple[str, int], list[tuple[bytes | None, bytes]]] = {}
    for topic, partition, frame, count in stages:
        made = Batch(frame)
        assert count == len(made)
        keys = made.keys or [None] * count
        found.setdefault((topic, partition), []).extend(zip(keys, made.values, strict=True))
    return found


def test_a_key_lies_where_a_producer_puts_it_and_in_order() -> None:
    """Over many batches: the numbers of a key rise, and none is missing or doubled."""
    rng = random.Random(1)
    keys = [rng.choice([b"a", b"b", b"c", b"d", None]) for _ in range(5_000)]
    batches = [
        batch(key=keys[first : first + 700], value=[b"%d" % n for n in range(first, min(first + 700, 5_000))])
        for first in range(0, 5_000, 700)
    ]

    found = written(staged(*batches))

    route = Route.even(PARTITIONS)
    by_key: dict[bytes | None, list[int]] = {}
    for (topic, partition), records in found.items():
        assert "t" == topic
        for key, value in records:
            assert key is None or partition == route.partition_of_key(key)
            by_key.setdefault(key, []).append(int(value))
    for key in (b"a", b"b", b"c", b"d"):
        assert [n for n, own in enumerate(keys) if own == key] == by_key[key]
    assert list(range(5_000)) == sorted(n for numbers in by_key.values() for n in numbers)


def test_rows_without_a_key_are_spread_by_batch() -> None:
    """Each batch whole to one partition, the next to the next: nothing is copied row by row."""
    found = written(staged(*(batch(value=[b"%d" % n] * 5) for n in range(6))))

    assert {("t", p): [(None, b"%d" % n) for n in (p, p + 3) for _ in range(5)] for p in range(3)} == found


def test_rows_go_to_the_partitions_that_the_route_names() -> None:
    """By key, spread, or given; numbers have gaps, and one of a gap is refused."""
    route = Route(3, [0, 20_000, 50_000, LOGICAL_PARTITIONS], [8, 3, 5])
    partitioner = Partitioner(route, first=4)
    keys = [b"key %d" % number for number in range(50)]

    found: Any = partitioner.of(pyarrow.array(keys), None, 50)

    assert [route.partition_of_key(key) for key in keys] == found.to_pylist()
    assert [5, 8, 3, 5] == [partitioner.of(None, None, 1) for _ in range(4)]
    given = pyarrow.array([8, None, 3], pyarrow.int32())
    found = partitioner.of(None, given, 3)
    assert [8, 8, 3] == found.to_pylist()
    with pytest.raises(ValueError, match="there is no partition 4; the topic has 3"):
        partitioner.of(None, pyarrow.array([3, 4, 5], pyarrow.int32()), 3)


def test_a_column_names_topic_and_partition() -> None:
    """A given partition goes before the key's; null leaves it to the key. The option goes first."""
    rows = batch(
        key=[b"k", b"k", None, b"k"],
        value=[b"0", b"1", b"2", b"3"],
        topic=["a", "b", "a", "b"],
        partition=[2, None, 1, 0],
    )
    own = Route.even(PARTITIONS).partition_of_key(b"k")
    everything = [(b"k", b"0"), (b"k", b"1"), (None, b"2"), (b"k", b"3")]

    assert {("a", 2), ("a", 1), ("b", own), ("b", 0)} == set(written(staged(rows, topic=None)))
    named = written(staged(rows, topic="t"))
    assert {"t"} == {topic for topic, _ in named}
    assert sorted(everything, key=str) == sorted((r for each in named.values() for r in each), key=str)


def test_tags_times_headers_and_trace_ids_are_written() -> None:
    """Times to the millisecond below, also before 1970."""
    traces = [bytes(range(16)), None, b"t" * 16]
    headers = [[{"key": "h", "value": b"1"}], None, []]
    rows = batch(
        value=[b"0", b"1", b"2"],
        tag=["x", None, "y"],
        timestamp=[1_999, None, -1],
        headers=headers,
        traceid=traces,
    )

    [(_, _, frame, _)] = staged(rows)

    made = Batch(frame)
    assert ["x", None, "y"] == made.tags
    assert (1, None, -1) == tuple(made.given_timestamps or ())
    assert [{"h": b"1"}, {}, {}] == list(made.headers or ())
    assert traces == made.trace_ids


def test_a_stage_keeps_to_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches are cut, small ones joined; what is open is handed out when it is too much."""
    large = staged(batch(value=[bytes(10_000)] * 1_000))
    assert all(len(frame) <= STAGE_BYTES * 1.1 for _, _, frame, _ in large)
    assert len(large) < 20

    small = staged(*(batch(key=[b"k"] * 10, value=[bytes(1_000)] * 10) for _ in range(300)))
    assert 3 <= len(small) <= 4

    monkeypatch.setattr(rows_module, "OPEN_BYTES", 1_000)
    assert 5 == len(staged(*(batch(key=[b"k"], value=[bytes(2_000)]) for _ in range(5))))


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"value": [None]}, "column value"),
        ({"value": [b""], "topic": [None]}, "column topic: a row has null"),
        (
            {"value": [b""], "topic": ["t"], "partition": [3]},
            "there is no partition 3; the topic has 3",
        ),
        ({"value": [b""], "topic": ["t"], "partition": [-1]}, "column partition: there is no partition -1"),
        ({"value": [b""], "topic": ["t"], "headers": [[{"key": "a", "value": None}]]}, "column headers"),
        ({"value": [b""], "topic": ["t"], "traceid": [b"t" * 15]}, "column traceId: .* 16 bytes, not 15"),
        (
            {"value": [b""], "topic": ["t"], "headers": [[{"key": "a", "value": b""}] * 2]},
            "column headers: one record has 'a' twice",
        ),
    ],
)
def test_a_row_that_is_no_record_is_refused(columns: dict[str, list[Any]], said: str) -> None:
    """The message names the column."""
    with pytest.raises(ValueError, match=said):
        staged(batch(**columns), topic=None)
