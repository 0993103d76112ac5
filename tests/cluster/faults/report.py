"""What a run amounts to: its operations and faults counted, its violations, the time that failovers took."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from tests.checkers import Fault, History, Violation, check_linear, check_operations
from tests.checkers.timeline import write_timeline

LOST = ("lost", "moved", "unseen")
DUPLICATED = ("duplicate", "conflict")
REORDERED = ("reordered", "scattered", "real_time", "offsets", "skipped")
STALE = ("stale_read", "future_read")


def violations_of(history: History, *, followers: Collection[str]) -> list[Violation]:
    """All that the checkers find."""
    return [*check_operations(history.operations, followers=followers), *check_linear(history.operations)]


def failovers_ms(history: History) -> list[float]:
    """Of each partition whose leader was killed: the time until the first append begun after that ended.

    An append counts only if it was begun after the kill: what was under way may have been answered by the
    dead; one is begun for each such partition as soon as the leader is gone. Kills within 5 s of which
    another fault was there are left out, for that may have taken the majority.
    """
    appends: dict[str, list[tuple[int, int]]] = {}
    for each in history.operations:
        if each.kind == "append" and each.outcome == "ok" and each.end_us is not None:
            appends.setdefault(f"{each.topic}/{each.partition}", []).append((each.start_us, each.end_us))
    took = []
    for fault in history.faults:
        if fault.what != "kill leader" or any(map(_Near(fault), history.faults)):
            continue
        for place in fault.note.split():
            later = [end for start, end in appends.get(place, ()) if start >= fault.start_us]
            if later:
                took.append((min(later) - fault.start_us) / 1000)
    return sorted(took)


class _Near:
    """Whether another fault was there when this one began, or 5 s before or behind."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault

    def __call__(self, other: Fault) -> bool:
        end_us = other.end_us or other.start_us
        begun_us = self._fault.start_us
        return (
            other is not self._fault
            and other.what not in ("kill leader", "clock step")
            and other.start_us < begun_us + 5_000_000
            and end_us > begun_us - 5_000_000
        )


def percentile(values: Sequence[float], percent: float) -> float:
    """Of sorted values: the one below or at which so many percent lie."""
    return values[min(len(values) - 1, int(len(values) * percent / 100))]


def summary(history: History, violations: Sequence[Violation], happened: Counter[str]) -> list[str]:
    """The lines that are printed."""
    kinds: Counter[str] = Counter(each.kind for each in history.operations)
    outcomes = Counter(each.outcome for each in history.operations if each.kind == "append")
    found = Counter(str(each.kind) for each in violations)
    records_read = sum(len(each.values) for each in history.operations if each.kind == "poll")
    named = {*LOST, *DUPLICATED, *REORDERED, *STALE}
    lines = [
        f"operations {len(history.operations):,}: appends {kinds['append']:,} (acknowledged "
        f"{outcomes['ok']:,}, refused {outcomes['fail']:,}, unknown {outcomes['unknown']:,}), polls "
        f"{kinds['poll']:,} ({records_read:,} records), leader reads {kinds['read']:,}",
        f"faults {sum(happened.values())}: "
        + (", ".join(f"{name} {count}" for name, count in sorted(happened.items())) or "none"),
        f"lost {sum(found[kind] for kind in LOST)}, duplicated {sum(found[kind] for kind in DUPLICATED)}, "
        f"reordered {sum(found[kind] for kind in REORDERED)}, stale leader reads "
        f"{sum(found[kind] for kind in STALE)}, other anomalies "
        f"{sum(count for kind, count in found.items() if kind not in named)}",
    ]
    took = failovers_ms(history)
    if took:
        lines.append(
            f"from kill -9 of a leader to the next acknowledged write: {len(took)} partitions over "
            f"{happened['kill leader']} kills, p50 {percentile(took, 50):.0f} ms, "
            f"p99 {percentile(took, 99):.0f} ms, most {took[-1]:.0f} ms"
        )
    return lines


def tell(
    folder: Path, history: History, wrong: Sequence[Violation], happened: Counter[str], failure: str
) -> bool:
    """Print the report; with anything wrong, write the timeline too. Whether nothing is."""
    for line in summary(history, wrong, happened):
        print(line, flush=True)
    for violation in wrong[:20]:
        print(f"  {violation}", flush=True)
    if failure:
        print(failure, flush=True)
    if wrong or failure:
        write_timeline(folder / "timeline.html", history, wrong)
    return not wrong and not failure
