"""What the log engine wants to reach, as a table, and how its figures are printed.

A row is judged by its ratio to the floor of the same run where there is one, else by its own value. Where
a row has no target it is there to be known. Knows no measurement.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The record sizes of laminarmq's own benches, in bytes.
SIZES = (12, 140, 560, 1120, 2940, 11760)
# Partitions that wait for a checkpoint's syncs.
DIRTY = (16, 1_000, 10_000)


@dataclass(frozen=True, slots=True)
class LogTarget:
    """One row: `wanted` of the ratio or of the value in `unit` (None: no target)."""

    title: str
    unit: str
    wanted: float | None = None
    of_ratio: bool = False
    more_is_better: bool = True
    digits: int = 1

    def verdict(self, figure: float) -> str:
        """`met`, `MISSED`, or nothing where there is no target."""
        if self.wanted is None:
            return ""
        met = figure >= self.wanted if self.more_is_better else figure <= self.wanted
        return "met" if met else "MISSED"

    def target(self) -> str:
        """The target as it stands in the table."""
        if self.wanted is None:
            return "-"
        sign = ">=" if self.more_is_better else "<="
        return f"{sign} {self.wanted:.2f}" if self.of_ratio else f"{sign} {self.wanted:g} {self.unit}"


def _less(title: str, unit: str, wanted: float | None = None, digits: int = 1) -> LogTarget:
    return LogTarget(title, unit, wanted, more_is_better=False, digits=digits)


LOG_TARGETS: Mapping[str, LogTarget] = {
    "append": LogTarget("append, 1 KiB records, unsynced", "MB/s", 0.80, of_ratio=True, digits=0),
    "append_frames": LogTarget("append of ready batches, unsynced", "MB/s", digits=0),
    "group_commit": LogTarget("group commit, 16 partitions", "turns/s", 0.70, of_ratio=True, digits=0),
    "group_commit_lockstep": LogTarget("the same, one turn at a time", "turns/s", digits=0),
    "group_commit_written": LogTarget("the same, floor with segments", "turns/s", digits=0),
    **{
        f"checkpoint_p99_{dirty}": LogTarget(
            f"commit p99, checkpoint of {dirty:,}", "ms", 10, of_ratio=True, more_is_better=False, digits=2
        )
        for dirty in DIRTY
    },
    **{f"checkpoint_max_{dirty}": _less(f"longest commit, checkpoint of {dirty:,}", "ms") for dirty in DIRTY},
    "scan": LogTarget("scan into Arrow, verified", "MB/s", 0.80, of_ratio=True, digits=0),
    "point_read_us": _less("point read, 4 KiB batches", "µs", 5, digits=2),
    "point_read_256k_us": _less("point read, 256 KiB batches", "µs", digits=2),
    **{f"append_{size}_us": _less(f"append {size:,} B", "µs", digits=2) for size in SIZES},
    **{f"read_{size}_us": _less(f"read {size:,} B, verified", "µs", digits=2) for size in SIZES},
    "open_s": _less("open a large log", "s", 0.5, digits=3),
    "rebuild_mb_per_s": LogTarget("index rebuilt, log bytes", "MB/s", digits=0),
    "rss_1000_mib": _less("memory, 1,000 partitions read from", "MiB"),
    "rss_large_mib": _less("memory, a large log read from", "MiB"),
    "cold_reader": LogTarget(
        "append p99 beside a cold replay", "ms", 1.5, of_ratio=True, more_is_better=False, digits=3
    ),
}


@dataclass(frozen=True, slots=True)
class Found:
    """Repetitions of one figure: Laminar's, and the floor's where there is one."""

    laminar: Sequence[float]
    floor: Sequence[float] = ()

    @property
    def value(self) -> float:
        return statistics.median(self.laminar)

    @property
    def beside(self) -> float | None:
        return statistics.median(self.floor) if self.floor else None

    @property
    def ratio(self) -> float | None:
        """Laminar's to the floor's, the median over the pairs: what came right after each other."""
        if not self.floor:
            return None
        return statistics.median(ours / floor for ours, floor in zip(self.laminar, self.floor, strict=True))


def head(beside: str = "floor") -> str:
    """The line over the rows; `beside` names the other side."""
    return (
        f"{'':<36} {'Laminar':>16} {'(spread)':>19} {beside:>12} {'(spread)':>19} {'ratio':>6}"
        f" {'target':>12}  verdict"
    )


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{min(values):,.{digits}f}-{max(values):,.{digits}f}" if len(values) > 1 else ""


def line(target: LogTarget, found: Found) -> str:
    """One row of the table. The spread is lowest and highest."""
    digits = target.digits
    floor, ratio = found.beside, found.ratio
    cells = [
        f"{target.title:<36} {found.value:>8,.{digits}f} {target.unit:<7}",
        f"{_spread(found.laminar, digits):>19}",
        f"{'' if floor is None else f'{floor:,.{digits}f}':>12}",
        f"{_spread(found.floor, digits):>19}",
        f"{'' if ratio is None else f'{ratio:.2f}':>6}",
        f"{target.target():>12} ",
        target.verdict(figure(target, found)),
    ]
    return " ".join(cells).rstrip()


def figure(target: LogTarget, found: Found) -> float:
    """What the row is judged by and the last line shows: the ratio, or the value."""
    if not target.of_ratio:
        return found.value
    ratio = found.ratio
    assert ratio is not None, f"{target.title} was measured without its floor"
    return ratio


def last_line(figures: Mapping[str, float]) -> str:
    """The line a program reads: every name of the table that was measured, in its order.

    None is rounded to 0, as a ratio may be small where the machine stood still on one side.
    """
    shown = {name: f"{each:.3f}" if each >= 0.1 else f"{each:.3g}" for name, each in figures.items()}
    return "bench-log: " + " ".join(f"{name}={shown[name]}" for name in LOG_TARGETS if name in shown)
