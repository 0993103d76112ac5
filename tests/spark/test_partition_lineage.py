"""What replaced a partition is read after it, however often a route changed."""

from __future__ import annotations

from laminar.client.policy.lineage import Change, Input, Lineage
from laminar.spark.read.offsets import Partition
from laminar.spark.read.partition_lineage import admitted, final_ends, replaced
from laminar.wire.key_route import Route


def change(
    version: int, *inputs: Input, outputs: dict[int, range] | None = None, strict: bool = True
) -> Change:
    return Change(version, strict, inputs, outputs or {})


def at(**positions: int) -> dict[Partition, int]:
    return {("t", int(name[1:])): offset for name, offset in positions.items()}


def test_who_replaced_whom_follows_from_the_changes() -> None:
    """Splits, merges and moves. What is reclaimed has no records; with weak order nobody waits."""
    first, second = range(32_768), range(32_768, 65_536)
    changes = (
        change(1, Input(0, first, 5, reclaimed=True), outputs={2: range(9), 3: range(9, 32_768)}),
        change(2, Input(3, range(9, 32_768), 6), Input(1, second, 7), outputs={4: range(9, 65_536)}),
        change(3, Input(4, range(9, 65_536), 8), outputs={5: range(9, 65_536)}, strict=False),
    )
    lineage = Lineage(Route(3, [0, 9, 65_536], [2, 5]), changes)

    assert {("t", 2): {}, ("t", 3): {}, ("t", 4): at(p3=6, p1=7)} == replaced("t", lineage)
    assert at(p0=5, p3=6, p1=7, p4=8) == final_ends("t", lineage)


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


def test_a_topic_that_was_split_and_merged_a_thousand_times_is_planned() -> None:
    """Each change doubles the ways from the newest partition to the oldest: none may be gone twice."""
    ends = at(p0=1)
    replaced: dict[Partition, dict[Partition, int]] = {}
    merged = 0
    for _ in range(1000):
        halves = (merged + 1, merged + 2)
        replaced |= {("t", half): {("t", merged): 1} for half in halves}
        merged += 3
        replaced["t", merged] = {("t", half): 1 for half in halves}
        ends |= {("t", number): 1 for number in (*halves, merged)}

    assert ends == admitted(ends, ends, replaced)
    assert at(p0=1) == admitted({}, ends, replaced)
    assert at(p0=1, p1=1, p2=1) == admitted(at(p0=1, p1=1), ends, replaced)
