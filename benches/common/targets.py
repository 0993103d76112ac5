"""What Laminar wants to reach, as a table, and how a figure is printed beside it.

The figures are this project's floor ("must") and its aim; where they come from, and what the best peers do
on the same kind of machine, is told in `docs/benchmarks.md`. Knows no measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Target:
    """One row: `must` and `aim` in `unit`; which direction is good."""

    title: str
    unit: str
    must: float
    aim: float
    more_is_better: bool = True
    digits: int = 0

    def verdict(self, value: float) -> str:
        """`aim met`, `must met`, or `must MISSED`."""
        if self._reaches(value, self.aim):
            return "aim met"
        return "must met" if self._reaches(value, self.must) else "must MISSED"

    def _reaches(self, value: float, wanted: float) -> bool:
        return value >= wanted if self.more_is_better else value <= wanted

    def show(self, value: float) -> str:
        """The figure with its unit."""
        return f"{value:,.{self.digits}f} {self.unit}"

    def line(self, value: float, beside: str) -> str:
        """The whole row: figure, must and aim, verdict, and what stands beside it."""
        wanted = f"must {self.must:,.{self.digits}f}, aim {self.aim:,.{self.digits}f}"
        figure = f"{self.title:<38} {self.show(value):>16}"
        return f"{figure}  {wanted:<29} {self.verdict(value):<11}  {beside}".rstrip()


TARGETS: Mapping[str, Target] = {
    "produce": Target("batched produce", "rec/s", 150_000, 300_000),
    "inflight": Target("256 in flight, one client", "rec/s", 35_000, 150_000),
    "post64": Target("single-record POST, 64 connections", "POST/s", 12_000, 25_000),
    "single_p50": Target("one at a time, p50", "ms", 1.2, 0.6, more_is_better=False, digits=2),
    "single_p99": Target("one at a time, p99", "ms", 4.0, 1.1, more_is_better=False, digits=2),
    "fetch": Target("fetch into Arrow", "rec/s", 1_000_000, 3_000_000),
    "kill_p50": Target(
        "kill -9 of a leader to next write, p50", "s", 1.0, 0.3, more_is_better=False, digits=2
    ),
    "kill_max": Target(
        "kill -9 of a leader to next write, max", "s", 2.0, 1.0, more_is_better=False, digits=2
    ),
    "start": Target("start to first acknowledged write", "s", 3.0, 1.5, more_is_better=False, digits=2),
    "memory": Target("memory of a node after load (PSS)", "MiB", 170, 100, more_is_better=False),
    "cpu": Target("CPU of servers and client a record", "µs", 10, 4, more_is_better=False, digits=1),
}


def last_line(figures: Mapping[str, float]) -> str:
    """The line a program reads: ratios to the floors of the same run, and four absolute figures.

    `figures`: produce, inflight, post64, single, fetch as ratios; kill_p50_s, start_s, rss_mib, cpu_us.
    """
    return (
        f"bench: produce={figures['produce']:.3f} inflight={figures['inflight']:.2f}"
        f" post64={figures['post64']:.3f} single={figures['single']:.2f} fetch={figures['fetch']:.3f}"
        f" kill_p50_s={figures['kill_p50_s']:.2f} start_s={figures['start_s']:.2f}"
        f" rss_mib={figures['rss_mib']:.0f} cpu_us={figures['cpu_us']:.1f}"
    )
