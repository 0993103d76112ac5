"""When the catalog's leader balances by load: rounds, pauses, terms, and reports that are too old."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from laminar.node.catalog.balancing import (
    PARTITION_REST_MS,
    PAUSE_MS,
    REPORT_VALID_MS,
    ROUND_MS,
    ROUNDS,
    Balancer,
)
from laminar.node.host.clock import Clock
from laminar.node.host.settings import Settings
from laminar.node.placement.balance import OWNER
from laminar.node.placement.load import HOTTEST, Load, LoadReport
from membership.placement_rules import change_placement
from membership.records import CatalogState, Pin
from membership.requests import ChangePlacement, PinPartition, PlacementChange, Result
from tests.node.placement.test_balance import heavy, led_by, reports_of
from tests.node.placement.test_preferred_leaders import chosen, cluster


class Stepped(Clock):
    """A clock that a test moves; it begins at noon."""

    def __init__(self) -> None:
        self.now_ms = 12 * 3_600_000

    def monotonic_ms(self) -> int:
        return self.now_ms

    def wall_ms(self) -> int:
        return self.now_ms


class Bench:
    """A balancer beside a catalog that performs each change at once."""

    def __init__(self, state: CatalogState, **settings: Any) -> None:
        self.clock = Stepped()
        self.balancer = Balancer(
            Settings(balance_threshold=settings.pop("threshold", 1.25), **settings), self.clock
        )
        self.state = state
        self.moves: list[PlacementChange] = []
        core = SimpleNamespace(term=1)
        catalog = SimpleNamespace(state=lambda: self.state, code_version=1, change_placement=self._change)
        self.group: Any = SimpleNamespace(catalog=catalog, replica=SimpleNamespace(core=core))
        self.loads: dict[str, Load] = {}
        self.round()
        self.clock.now_ms += PAUSE_MS

    async def _change(self, change: PlacementChange) -> Result:
        self.moves.append(change)
        self.state, result = change_placement(self.state, ChangePlacement(change))
        return result

    def report(self) -> None:
        for report in reports_of(self.state, self.loads).values():
            self.balancer.take(report, self.group)

    def round(self, *, absent: set[str] = frozenset(), report: bool = True) -> int:  # type: ignore[assignment]
        """Take a round, after reports of all nodes; return how many moves there were so far."""
        self.clock.now_ms += ROUND_MS
        if report:
            self.report()
        asyncio.run(self.balancer.run_pass(self.group, absent=absent))
        return len(self.moves)

    def why(self) -> str:
        return asyncio.run(self.balancer.answer(self.group, act=False)).because


def hot_bench(**settings: Any) -> Bench:
    """Return a bench on which node a leads all that is hot."""
    state = chosen(cluster("abc", 12))
    bench = Bench(state, **settings)
    bench.loads = dict.fromkeys(led_by(state, "a"), heavy(200))
    return bench


def test_a_node_must_be_hot_for_several_rounds_without_a_break() -> None:
    bench = hot_bench()
    hot, bench.loads = bench.loads, {}
    bench.round()
    for _ in range(ROUNDS - 1):
        bench.loads = hot
        assert bench.round() == 0
    bench.loads = {}
    assert bench.round() == 0
    bench.loads = hot
    assert [bench.round() for _ in range(ROUNDS)] == [0] * (ROUNDS - 1) + [1]


def test_a_pause_follows_each_move_and_a_moved_partition_rests_longer() -> None:
    bench = hot_bench()
    while not bench.round():
        pass
    at_ms = bench.clock.now_ms
    (first,) = bench.moves
    bench.loads = dict.fromkeys(led_by(bench.state, "b"), heavy(200))
    while bench.round() == 1:
        assert "loads are measured first" in bench.why()
    assert PAUSE_MS <= bench.clock.now_ms - at_ms < PARTITION_REST_MS
    assert not first.nodes.keys() & bench.moves[1].nodes.keys()  # type: ignore[union-attr]


def test_a_new_term_begins_without_reports_and_with_a_pause() -> None:
    bench = hot_bench()
    bench.round()
    bench.group.replica.core.term = 2
    assert bench.round(report=False) == 0
    assert "no load is reported yet by a, b, c" == bench.why()
    bench.report()
    assert "loads are measured first" in bench.why()


def test_an_old_report_and_an_absent_node_hold_everything_up() -> None:
    bench = hot_bench()
    bench.round(absent={"b"})
    assert bench.why().startswith("nodes are absent: b;")
    for _ in range(ROUNDS + 1):
        assert bench.round(absent={"b"}) == 0
    bench.round(absent={"b"})
    bench.clock.now_ms += REPORT_VALID_MS + 1
    bench.round(report=False)
    assert bench.why() == "no load is reported yet by a, b, c"


def test_outside_of_its_hours_nothing_moves() -> None:
    bench = hot_bench(balance_hours="14-16")
    while bench.clock.now_ms < 14 * 3_600_000 - 2 * ROUND_MS:
        assert bench.round() == 0
    for _ in range(ROUNDS + 2):
        bench.round()
    assert len(bench.moves) == 1


def test_a_report_of_a_stranger_or_one_that_is_too_long_is_not_kept() -> None:
    bench = hot_bench()
    bench.report()
    bench.balancer.take(LoadReport("stranger", Load()), bench.group)
    one = reports_of(bench.state, {})["a"].partitions[0]
    bench.balancer.take(LoadReport("a", heavy(9), [one] * (HOTTEST + 1)), bench.group)
    assert bench.balancer._reports.keys() == {"a", "b", "c"}
    assert bench.balancer._reports["a"][1].total != heavy(9)


def test_a_stale_pin_is_lifted_though_nothing_is_measured() -> None:
    state = cluster("abcd", 1)
    partition = replace(state.partitions["t/0"], pin=Pin(["a", "b"], OWNER, "1.50, now 1.20"))
    bench = Bench(replace(state, partitions={"t/0": partition}), threshold=0.0)
    assert bench.moves == [PinPartition("t/0", partition.version, None)]
    assert bench.why().startswith("balance_threshold is 0")
