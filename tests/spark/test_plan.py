"""Batches: how far they go, and how they are cut into tasks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.spark.read.loss import DataLoss
from laminar.spark.read.offsets import Partition
from laminar.spark.read.plan import Range, forward, lag, limited, ranges, split

A, B, C = ("t", 0), ("t", 1), ("t", 2)
PARTITIONS = st.sampled_from([("t", number) for number in range(6)])
STARTS = st.dictionaries(PARTITIONS, st.integers(0, 1000))
MORE = st.dictionaries(PARTITIONS, st.integers(0, 1000))


def test_a_limit_is_shared_in_proportion_to_the_lag() -> None:
    """A partition with nine times the lag gets nine times the share."""
    assert {A: 190, B: 10} == limited({A: 100, B: 0}, {A: 1000, B: 100}, max_records=100)


def test_a_small_partition_does_not_starve() -> None:
    """Beside a large one its share rounds up to a record."""
    assert 1 == limited({A: 0, B: 0}, {A: 1_000_000, B: 3}, max_records=10)[B]


@given(STARTS, MORE, st.integers(1, 500))
def test_a_limited_batch_gets_on_and_stays_in_bounds(
    starts: dict[Partition, int], more: dict[Partition, int], most: int
) -> None:
    """Between start and end, every partition gets on, and the limit is passed by a record each at most."""
    ends = {partition: starts.get(partition, 0) + count for partition, count in more.items()}

    found = limited(starts, ends, max_records=most)

    assert all(starts.get(partition, 0) <= found[partition] <= ends[partition] for partition in ends)
    assert all(found[partition] > starts.get(partition, 0) for partition in ends if more[partition])
    assert lag(starts, found) <= most + len(ends)


def test_nothing_goes_backwards() -> None:
    """An older answer of the cluster does not move a query back; a partition that is gone stays put."""
    assert {A: 10, B: 7, C: 4} == forward({A: 10, B: 5, C: 4}, {A: 8, B: 7})


def test_a_new_partition_begins_at_its_first_record() -> None:
    """All of it is new to the query, even if much was appended before anybody looked."""
    assert {A: 3, B: 9} == forward({A: 3}, {A: 3, B: 9})
    assert [Range("t", 1, 0, 9)] == ranges({A: 3}, {A: 3, B: 9}, {}, fail_on_data_loss=True)


def test_empty_ranges_make_no_tasks() -> None:
    """A partition without news costs a batch nothing."""
    assert [Range("t", 1, 2, 4)] == ranges({A: 1, B: 2}, {A: 1, B: 4}, {}, fail_on_data_loss=True)


def test_loss_is_an_error_that_names_what_is_gone() -> None:
    """Partition and offsets, and what to do."""
    with pytest.raises(DataLoss, match=r"t/0: 5 to 7\. .*failOnDataLoss"):
        ranges({A: 5}, {A: 10}, {A: 8}, fail_on_data_loss=True)


def test_loss_can_be_lived_with() -> None:
    """Without failOnDataLoss what is left is read; a range that is gone whole makes no task."""
    earliest = {A: 8, B: 99}

    assert [Range("t", 0, 8, 10)] == ranges({A: 5, B: 1}, {A: 10, B: 4}, earliest, fail_on_data_loss=False)


def test_what_was_read_before_retention_took_it_is_no_loss() -> None:
    """A query at the partition's end does not care what is gone before it."""
    assert [] == ranges({A: 5}, {A: 5}, {A: 8}, fail_on_data_loss=True)


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=6),
    st.none() | st.integers(1, 40),
    st.none() | st.integers(1, 50),
)
def test_cutting_loses_nothing(sizes: list[int], least: int | None, most: int | None) -> None:
    """The pieces, joined, are the whole; none is empty or over the limit; there are as many as asked for."""
    whole = [Range("t", number, 7, 7 + size) for number, size in enumerate(sizes)]

    pieces = split(whole, min_partitions=least, max_records=most)

    assert [(each.partition, offset) for each in whole for offset in range(each.start, each.end)] == [
        (piece.partition, offset) for piece in pieces for offset in range(piece.start, piece.end)
    ]
    assert all(0 < len(piece) <= (most or len(piece)) for piece in pieces)
    assert len(pieces) >= min(least or 1, sum(sizes) if len(sizes) == 1 else len(sizes))


def test_a_limit_in_bytes_is_one_of_records_by_their_size() -> None:
    """With both the smaller holds; a partition of unknown size counts nothing."""
    sizes = {A: 100.0, B: 10.0}

    found = limited({}, {A: 90, B: 100}, max_bytes=1_000, record_bytes=sizes)

    assert {A: 9, B: 10} == found
    assert {A: 4, B: 5} == limited({}, {A: 90, B: 100}, max_records=10, max_bytes=1_000, record_bytes=sizes)
    assert {A: 90} == limited({}, {A: 90}, max_bytes=1, record_bytes={})


def test_a_long_range_is_cut_by_bytes() -> None:
    """As long as the records' size is known; a range of less stays whole."""
    long, short = Range("t", 0, 0, 1000), Range("t", 1, 0, 100)

    pieces = split([long, short], max_bytes=250_000, record_bytes={A: 1_000.0, B: 1_000.0})

    assert [250] * 4 == [len(piece) for piece in pieces[:-1]]
    assert short == pieces[-1]
    assert [long] == split([long], max_bytes=250_000, record_bytes={})


def test_one_task_a_partition_unless_asked_otherwise() -> None:
    """Without options a range is not cut; with `minPartitions` the larger one is cut into more."""
    whole = [Range("t", 0, 0, 90), Range("t", 1, 0, 10)]

    assert whole == split(whole, min_partitions=None, max_records=None)
    assert whole == split(whole, min_partitions=2, max_records=None)
    assert [9, 1] == [
        len(
            [
                piece
                for piece in split(whole, min_partitions=10, max_records=None)
                if piece.partition == number
            ]
        )
        for number in (0, 1)
    ]
