"""Crash recorded runs of the product at many instants: `python -m tests.crash` (make log-crash)."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.crash import runs, trace
from tests.crash.mutants import MUTANTS

# What can be wrong, as the checks name it; anything else is "other".
KINDS = ("lost", "silent", "marked", "damaged", "wrong", "invented")


def main() -> int:
    """Crash the three loads, then each mutant; 0 if nothing was lost and every mutant was caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash", description=__doc__)
    parser.add_argument("--states", type=int, default=1000, help="crashes to check, over all loads")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each recorded run")
    parser.add_argument("--mutant", choices=[*MUTANTS, "all", "none"], default="all")
    parser.add_argument("--only-mutants", action="store_true")
    given = parser.parse_args()
    failed = False
    if not given.only_mutants:
        failed |= _crash(given, None) > 0
    for mutant in MUTANTS if given.mutant == "all" else [given.mutant]:
        if mutant != "none":
            caught = _crash(given, mutant) > 0
            print(f"mutant {mutant!r}: {'caught' if caught else 'SURVIVED'}", flush=True)
            failed |= not caught
    return int(failed)


def _crash(given: argparse.Namespace, mutant: str | None) -> int:
    """The number of problems found; of a mutant one is enough."""
    began = time.monotonic()
    kinds: Counter[str] = Counter()
    states = 0
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with (
        tempfile.TemporaryDirectory(prefix="crash-", dir=Path.cwd()) as disk,
        tempfile.TemporaryDirectory(prefix="crash-", dir=memory) as name,
    ):
        library = trace.build(Path(disk))
        for found in _all(given, mutant, Path(disk), Path(name), library):
            states += 1
            for problem in found.problems:
                kinds[next((kind for kind in KINDS if kind in problem), "other")] += 1
                if mutant is None and sum(kinds.values()) <= 40:
                    print(f"{found.state}\n    {problem}", flush=True)
            if mutant is not None and kinds:
                break
    count = ", ".join(f"{kinds[kind]} {kind}" for kind in (*KINDS, "other"))
    print(f"{states} states: {count}; {time.monotonic() - began:.0f} s", flush=True)
    return sum(kinds.values())


def _all(
    given: argparse.Namespace, mutant: str | None, disk: Path, memory: Path, library: Path
) -> Iterator[runs.Found]:
    """The three loads, recorded on a disk and crashed in memory: what holds there is what the model says."""
    each = given.states // (2 if mutant else 3)
    for number, mixed in enumerate((False, True)):
        where = disk / f"library-{number}"
        recorded = runs.record_library(
            where, library, seed=given.seed + number, seconds=given.seconds, mixed=mixed, mutant=mutant
        )
        _introduce(recorded, where)
        yield from runs.crash_library(
            recorded,
            memory,
            library,
            states=each,
            seed=given.seed,
            mutant=mutant,
            recoveries=50 if mutant else runs.RECOVERIES,
        )
    if not mutant:
        recorded = runs.record_node(disk / "node", library, seed=given.seed, seconds=given.seconds)
        _introduce(recorded, disk / "node")
        yield from runs.crash_node(recorded, memory, states=each, seed=given.seed)


def _introduce(recorded: runs.Load, where: Path) -> None:
    acks = sum(act.doing == "append" and act.ended is not None for act in recorded.acts)
    print(f"{recorded.name}: {len(recorded.calls)} calls, {acks} acknowledged appends", flush=True)
    missed = runs.whole(recorded, where / "root")
    assert not missed, f"the recorder missed something: {missed[:5]}"


if __name__ == "__main__":
    sys.exit(main())
