"""Key to logical partition to partition: client and node agree to the bit, for ever."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import tag_bit, tag_hash
from laminar.wire.key_route import LOGICAL_PARTITIONS, Route, logical_of_key

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "golden" / "route.json").read_text())


def test_hashes_are_frozen() -> None:
    """Records lie where these numbers put them: another hash would lose every key's order."""
    for key, logical in GOLDEN["logical_of_key"].items():
        assert logical == logical_of_key(bytes.fromhex(key)), key
    for tag, value in GOLDEN["tag_hash"].items():
        assert value == tag_hash(tag), tag
        assert 1 << value % 64 == tag_bit(tag), tag


def test_the_hash_is_the_published_one() -> None:
    """MurmurHash3 x86 32 of "hello" with seed 0 is 0x248bfa47, in every implementation."""
    assert logical_of_key(b"hello") == 0xFA47


def test_even_routes_are_frozen() -> None:
    for partitions, bounds in GOLDEN["even_bounds"].items():
        assert tuple(bounds) == Route.even(int(partitions)).bounds


@given(st.text(max_size=30))
def test_text_is_its_utf8(key: str) -> None:
    assert logical_of_key(key.encode()) == logical_of_key(key)
    assert 0 <= logical_of_key(key) < LOGICAL_PARTITIONS


@given(st.integers(1, LOGICAL_PARTITIONS))
def test_even_ranges_differ_by_one_and_the_larger_come_first(partitions: int) -> None:
    """Equal ranges, the remainder spread from the first; together all logical partitions, each once."""
    route = Route.even(partitions)
    sizes = [len(one) for one in route.ranges()]

    assert sum(sizes) == LOGICAL_PARTITIONS
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert route.partitions == len(sizes) == partitions


@given(st.sets(st.integers(1, LOGICAL_PARTITIONS - 1), max_size=20), st.integers(0, LOGICAL_PARTITIONS - 1))
def test_a_logical_partition_lies_in_the_range_that_holds_it(cuts: set[int], logical: int) -> None:
    route = Route([0, *sorted(cuts), LOGICAL_PARTITIONS], version=3)
    slow = [partition for partition, one in enumerate(route.ranges()) if logical in one]

    assert slow == [route.partition_of(logical)]


def test_keys_spread_evenly() -> None:
    """10,000 keys over 8 partitions: each within a tenth of its share."""
    route = Route.even(8)
    found = Counter(route.partition_of_key(f"key-{i}") for i in range(10_000))

    assert all(abs(count - 1250) < 125 for count in found.values()), found


def test_wrong_routes_and_places_are_refused() -> None:
    for bounds in ([], [0], [0, 5], [1, LOGICAL_PARTITIONS], [0, 5, 5, LOGICAL_PARTITIONS]):
        with pytest.raises(ValueError, match="bounds"):
            Route(bounds)
    for partitions in (0, -1, LOGICAL_PARTITIONS + 1):
        with pytest.raises(ValueError, match="partitions"):
            Route.even(partitions)
    for logical in (-1, LOGICAL_PARTITIONS):
        with pytest.raises(ValueError, match="logical"):
            Route.even(2).partition_of(logical)


def test_routes_are_values() -> None:
    assert Route.even(3, 1) == Route(Route.even(3).bounds, 1)
    assert Route.even(3, 1) != Route.even(3, 2)
    assert Route.even(3) != "a route"
    assert len({Route.even(3), Route.even(3)}) == 1
    assert repr(Route.even(3, 1)) == "<Route version=1 partitions=3>"
