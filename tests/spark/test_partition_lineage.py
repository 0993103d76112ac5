"""What replaced a partition is read after it, however often a route changed."""

from __future__ import annotations

from typing import Any

from laminar.spark.read.offsets import Partition
from laminar.spark.read.partition_lineage import admitted, predecessors


def route(version: int, *held: tuple[int, int]) -> dict[str, Any]:
    """By (partition, first logical one after it), in order."""
    ranges = []
    start = 0
    for partition, beyond in held:
        ranges.append({"from": start, "to": beyond, "partition": partition})
        start = beyond
    return {"version": version, "ranges": ranges}


ONE = route(0, (0, 100), (1, 200))
SPLIT = route(1, (2, 30), (3, 100), (1, 200))
MERGED = route(2, (2, 30), (4, 200))
MOVED = route(3, (2, 30), (5, 200))


def at(**positions: int) -> dict[Partition, int]:
    return {("t", int(name[1:])): offset for name, offset in positions.items()}


def test_who_replaced_whom_follows_from_ranges() -> None:
    """Splits, merges and moves; in whatever order routes are listed. A partition that stays replaced none."""
    assert {} == predecessors([ONE])
    assert {2: {0}, 3: {0}} == predecessors([SPLIT, ONE])
    assert {2: {0}, 3: {0}, 4: {1, 3}, 5: {4}} == predecessors([MOVED, ONE, MERGED, SPLIT])


def test_a_successor_waits_for_all_that_it_replaces() -> None:
    """A merge of two waits for both; others are not held up."""
    ends = at(p1=5, p2=7, p3=6, p4=9)
    replaced = {("t", 4): at(p1=5, p3=6)}

    assert at(p1=5, p2=7, p3=6) == admitted(at(p1=5, p3=5), ends, replaced)
    assert ends == admitted(at(p1=5, p3=6), ends, replaced)


def test_an_empty_partition_between_two_does_not_let_the_third_pass() -> None:
    """It is at its end before anything was read, but its own time has not come."""
    ends = at(p0=5, p1=0, p2=3)
    replaced = {("t", 1): at(p0=5), ("t", 2): at(p1=0)}

    assert at(p0=5) == admitted(at(p0=4), ends, replaced)
    assert ends == admitted(at(p0=5), ends, replaced)


def test_a_query_that_starts_after_the_change_reads_at_once() -> None:
    """Its start is the old partition's end."""
    assert at(p0=5, p1=9) == admitted(at(p0=5, p1=9), at(p0=5, p1=9), {("t", 1): at(p0=5)})
