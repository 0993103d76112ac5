"""A narrow batch is a batch like any other, of the same records, with less of them."""

from __future__ import annotations

import pytest

from laminar.batch import Batch, BatchError, Codec, Column, build, build_control, stamp, verify
from laminar.batch.header import Kind
from laminar.batch.projection import project


def batch(codec: Codec) -> Batch:
    """Three records with every column, some cells of each missing."""
    frame = build(
        [b"v" * 500, b"", b"w" * 500],
        keys=[b"k" * 100, None, b""],
        timestamps=[5, None, 7],
        tags=[None, "red", "blue"],
        headers=[{"h": b"1"}, None, None],
        delivery_times=[None, 9, None],
        trace_ids=[b"t" * 16, None, None],
        codec=codec,
        checkpoint=4,
    )
    stamp(
        frame,
        index=7,
        term=3,
        prev_term=2,
        base_offset=40,
        append_time_ms=1_700_000_000_000,
        committed_index=6,
    )
    return Batch(bytes(frame))


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.ZSTD])
@pytest.mark.parametrize("column", list(Column))
def test_what_is_kept_is_unchanged_and_the_rest_is_gone(codec: Codec, column: Column) -> None:
    """Its checksums are right, its place in the log is the same, and values that are gone are empty."""
    whole = batch(codec)

    found = Batch(bytes(project(whole.frame, {column})))  # checks both checksums and the directory

    assert {Column.VALUE, column} == set(found.columns)
    assert whole.plain(column) == found.plain(column) if whole.plain(column) else True
    assert (whole.values if column is Column.VALUE else [b""] * 3) == found.values
    for name in ("keys", "given_timestamps", "tags", "headers", "delivery_times", "trace_ids"):
        kept = name == {
            Column.KEY: "keys",
            Column.TIMESTAMP: "given_timestamps",
            Column.TAG: "tags",
            Column.HEADERS: "headers",
            Column.DELIVERY_TIME: "delivery_times",
            Column.TRACE_ID: "trace_ids",
        }.get(column)
        assert (getattr(whole, name) if kept else None) == getattr(found, name), name
    for same in (
        "kind",
        "index",
        "term",
        "prev_term",
        "base_offset",
        "count",
        "append_time_ms",
        "checkpoint",
    ):
        assert getattr(whole.header, same) == getattr(found.header, same)


def test_it_is_small() -> None:
    """Offsets and times of a batch need none of its values."""
    assert len(project(batch(Codec.NONE).frame, {Column.TIMESTAMP})) < 400


def test_all_columns_are_the_same_frame() -> None:
    """Byte for byte: nothing else is decided here."""
    whole = batch(Codec.NONE)

    assert bytes(whole.frame) == project(whole.frame, set(Column))


def test_what_holds_no_records_is_refused() -> None:
    """Only batches of records have columns."""
    frame = build_control(Kind.NOOP)
    verify(frame)

    with pytest.raises(BatchError, match="kind"):
        project(frame, set(Column))
