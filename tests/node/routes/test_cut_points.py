"""Where a partition is cut into parts of about the same weight."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import build
from laminar.node.routes.cut_points import cuts_of, weights_of
from laminar.wire.key_route import logical_of_key


@given(
    weights=st.dictionaries(st.integers(0, 65_535), st.integers(1, 1000), max_size=50),
    first=st.integers(0, 65_000),
    size=st.integers(1, 536),
    data=st.data(),
)
def test_each_part_has_a_logical_partition_at_least(
    weights: dict[int, int], first: int, size: int, data: st.DataObject
) -> None:
    into = data.draw(st.integers(1, min(size, 64)))
    cuts = cuts_of(weights, first=first, size=size, into=into)
    bounds = [first, *cuts, first + size]
    assert len(cuts) == into - 1
    assert all(before < after for before, after in pairwise(bounds))


@given(weights=st.dictionaries(st.integers(0, 65_535), st.integers(1, 1000), min_size=200, max_size=400))
def test_no_part_is_heavier_than_its_share_and_one_logical_partition(weights: dict[int, int]) -> None:
    cuts = cuts_of(weights, first=0, size=65_536, into=4)
    for first, end in pairwise([0, *cuts, 65_536]):
        weight = sum(each for logical, each in weights.items() if first <= logical < end)
        assert weight <= sum(weights.values()) / 4 + max(weights.values())


def test_without_keys_the_parts_have_the_same_range() -> None:
    assert cuts_of({}, first=100, size=300, into=3) == [200, 300]


def test_a_hot_key_is_cut_off() -> None:
    assert cuts_of({10: 2, 50: 1000, 90: 1}, first=0, size=100, into=2) == [50]


def test_the_weight_of_a_key_is_that_of_its_records() -> None:
    frame = build([b"12345", b"", b"123"], keys=[b"a", b"b", None])
    assert weights_of([frame]) == {logical_of_key(b"a"): 6, logical_of_key(b"b"): 1}
    assert weights_of([build([b"no key"])]) == {}
