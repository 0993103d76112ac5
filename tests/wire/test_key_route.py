"""Key to logical partition to partition: client and node agree to the bit, for ever."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import mmh3
import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar.batch import tag_bit, tag_hash
from laminar.wire.key_route import (
    LOGICAL_PARTITIONS,
    Route,
    logical_of_block,
    logical_of_group,
    logical_of_key,
)

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
    sizes = [len(one) for one in route.ranges().values()]

    assert sum(sizes) == LOGICAL_PARTITIONS
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert len(route) == len(sizes) == partitions
    assert (0, tuple(range(partitions))) == (route.version, route.numbers)


@st.composite
def routes(draw: st.DrawFn) -> Route:
    """Routes of any version, with ranges anywhere and numbers in any order."""
    cuts = draw(st.sets(st.integers(1, LOGICAL_PARTITIONS - 1), max_size=20))
    numbers = draw(st.permutations(range(0, 3 * len(cuts) + 3, 3)))[: len(cuts) + 1]
    return Route(draw(st.integers(1, 99)), [0, *sorted(cuts), LOGICAL_PARTITIONS], numbers)


@given(routes(), st.integers(0, LOGICAL_PARTITIONS - 1))
def test_a_logical_partition_lies_in_the_range_that_holds_it(route: Route, logical: int) -> None:
    slow = [number for number, one in route.ranges().items() if logical in one]

    assert slow == [route.partition_of(logical)]


@given(routes(), st.randoms())
def test_a_route_is_the_same_after_its_answer_was_read(route: Route, rng: random.Random) -> None:
    """In whatever order the ranges stand; one that leaves a gap, or overlaps, is refused."""
    answer = json.loads(json.dumps(route.answer()))
    rng.shuffle(answer["ranges"])

    assert route == Route.from_answer(answer)
    wrongs: list[dict[str, Any]] = [{"logical_partitions": 4096}, {"ranges": answer["ranges"][1:]}]
    for wrong in (*wrongs, {"ranges": []}):
        with pytest.raises(ValueError, match=r"bounds|logical"):
            Route.from_answer(answer | wrong)
    one = answer["ranges"][0]
    with pytest.raises(ValueError, match=r"bounds|numbers"):
        Route.from_answer(answer | {"ranges": [*answer["ranges"], one | {"partition": 1000}]})


@given(routes())
def test_the_partition_after_the_last_is_the_first(route: Route) -> None:
    turn = [route.numbers[0]]
    while len(turn) <= len(route):
        turn.append(route.after(turn[-1]))

    assert [*route.numbers, route.numbers[0]] == turn
    assert all(number in route for number in route.numbers) and -1 not in route


@given(st.integers(1, 300), st.integers(0, 2**40), st.text(max_size=10))
def test_groups_and_blocks_lie_where_they_did_before_routes_changed(
    partitions: int, block: int, group: str
) -> None:
    """With route 0: block modulo partitions, and the group's hash modulo partitions."""
    route = Route.even(partitions)

    assert block % partitions == route.partition_of(logical_of_block(block, partitions))
    hashed = mmh3.hash(group.encode(), 0, signed=False)
    assert hashed % partitions == route.partition_of(logical_of_group(group, partitions))


def test_keys_spread_evenly() -> None:
    """10,000 keys over 8 partitions: each within a tenth of its share."""
    route = Route.even(8)
    found = Counter(route.partition_of_key(f"key-{i}") for i in range(10_000))

    assert all(abs(count - 1250) < 125 for count in found.values()), found


def test_wrong_routes_and_places_are_refused() -> None:
    for bounds in ([], [0], [0, 5], [1, LOGICAL_PARTITIONS], [0, 5, 5, LOGICAL_PARTITIONS]):
        with pytest.raises(ValueError, match="bounds"):
            Route(1, bounds, range(len(bounds) - 1))
    for numbers in ([], [1], [1, 1], [1, 2, 2], [1, 2, 3], [-1, 2]):
        with pytest.raises(ValueError, match="numbers"):
            Route(1, [0, 5, LOGICAL_PARTITIONS], numbers)
    for partitions in (0, -1, LOGICAL_PARTITIONS + 1):
        with pytest.raises(ValueError, match="partitions"):
            Route.even(partitions)
    for logical in (-1, LOGICAL_PARTITIONS):
        with pytest.raises(ValueError, match="logical"):
            Route.even(2).partition_of(logical)


def test_routes_are_values() -> None:
    assert Route.even(3) == Route(0, Route.even(3).bounds, range(3))
    assert Route.even(3) != Route(1, Route.even(3).bounds, range(3))
    assert Route.even(3) != Route(0, Route.even(3).bounds, [0, 2, 1])
    assert Route.even(3) != "a route"
    assert len({Route.even(3), Route.even(3)}) == 1
    assert repr(Route.even(3)) == "<Route version=0 partitions=3>"
