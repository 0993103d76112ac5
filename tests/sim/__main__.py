"""`python -m tests.sim`: one seed with its trace, or many seeds for so many seconds.

python -m tests.sim --seed 17            one world; --trace FILE writes what happened
python -m tests.sim --seconds 600        many, on all cores; a failure prints how to see it again
python -m tests.sim --seed 17 --routes   one world of routes; of many seeds each third is one (`routes.py`)
python -m tests.sim --seed 17 --channels one world of channels; of many seeds each third, too (`channels.py`)
python -m tests.sim --cuts 100           rounds of network cuts during configuration changes (`cuts.py`)
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

from tests.sim import channels, routes, simulation
from tests.sim.cuts import ROUNDS, Counted, run_world
from tests.sim.simulation import Outcome
from tests.sim.world import Options


class _Kind(NamedTuple):
    """A kind of world: the option that asks for it, how it is drawn from a seed, and how it runs."""

    option: str
    options_of: Callable[[int], Options]
    simulate: Callable[..., Outcome]


_PLAIN = _Kind("", simulation.options_of, simulation.simulate)
_ROUTES = _Kind("--routes", routes.options_of, routes.simulate)
_CHANNELS = _Kind("--channels", channels.options_of, channels.simulate)


def _kind_of(seed: int) -> _Kind:
    """Return of which kind the world of a seed, of many, is."""
    return (_ROUTES, _CHANNELS, _PLAIN)[seed % 3]


def _one(seed: int) -> tuple[int, Outcome | str]:
    kind = _kind_of(seed)
    try:
        return seed, kind.simulate(kind.options_of(seed))
    except Exception:  # noqa: BLE001  # reported with its seed
        return seed, traceback.format_exc()
    finally:
        gc.collect()


def _settle() -> None:
    """Worlds are collected as a whole, and modules are no part of them."""
    gc.collect()
    gc.freeze()
    gc.disable()


def many(first: int, seconds: float) -> int:
    """Seeds from `first` on, until the time is over; the number that failed."""
    workers = os.cpu_count() or 1
    began_s = time.monotonic()
    seeds = simulated_s = cpu_s = 0.0
    totals: Counter[str] = Counter()
    exercised: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    failed: list[int] = []
    following = first
    with ProcessPoolExecutor(workers, initializer=_settle) as pool:
        running: set[Future[tuple[int, Outcome | str]]] = set()
        while running or time.monotonic() - began_s < seconds:
            while len(running) < workers and time.monotonic() - began_s < seconds:
                running.add(pool.submit(_one, following))
                following += 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for each in done:
                seed, outcome = each.result()
                seeds += 1
                if isinstance(outcome, str):
                    failed.append(seed)
                    kind = _kind_of(seed)
                    again = f"make sim SEED={seed}" + (f" OPTIONS={kind.option}" if kind.option else "")
                    print(f"\nseed {seed}: {kind.options_of(seed)}\n{outcome}{again}\n", flush=True)
                    continue
                simulated_s += outcome.simulated_s
                cpu_s += outcome.cpu_s
                totals["operations"] += outcome.operations
                totals["acknowledged"] += outcome.acknowledged
                totals["accepted"] += outcome.accepted
                totals["reads"] += outcome.reads
                totals["elections"] += outcome.elections
                exercised.update(outcome.exercised)
                faults.update(outcome.faults)
    hours = max(simulated_s / 3600, 1e-9)
    per_cpu = simulated_s / cpu_s if cpu_s else 0.0
    print(f"{int(seeds)} seeds, {hours:.1f} simulated hours, {cpu_s:.0f} s of CPU: {per_cpu:.0f} to 1")
    for name in ("operations", "acknowledged", "accepted", "reads", "elections"):
        print(f"  {name}: {totals[name]:,} ({totals[name] / hours:,.0f} an hour)")
    for name, count in exercised.items():
        print(f"  {name}: {count:,}")
    print(f"  faults: {faults.total():,} ({faults.total() / hours:,.0f} an hour)")
    for name, count in faults.most_common():
        print(f"    {name}: {count:,}")
    print(f"bugs: {len(failed)}" + (f", seeds {failed}" if failed else ""))
    return len(failed)


def _cuts(seed: int) -> tuple[int, Counted | str]:
    try:
        return seed, run_world(seed)
    except Exception:  # noqa: BLE001  # reported with its seed
        return seed, traceback.format_exc()
    finally:
        gc.collect()


def cuts(first: int, rounds: int) -> int:
    """So many rounds of cuts during configuration changes; the number of worlds that failed or lost."""
    total, failed = Counted(), 0
    seeds = range(first, first + -(-rounds // ROUNDS))
    with ProcessPoolExecutor(os.cpu_count() or 1, initializer=_settle) as pool:
        for seed, counted in pool.map(_cuts, seeds):
            if isinstance(counted, str):
                failed += 1
                print(f"\nseed {seed}:\n{counted}", flush=True)
                continue
            failed += bool(counted.lost or counted.doubled or counted.reordered)
            total.add(counted)
    deeds = ", ".join(f"{name} {count}" for name, count in total.deeds.most_common())
    print(f"{total.rounds} rounds of cuts during configuration changes ({deeds}), {total.idle} without one")
    print(f"  {total.simulated_s:,.0f} simulated s, {total.configurations:,} configurations committed,")
    print(f"  {total.elections:,} elections")
    print(f"  acknowledged: {total.acknowledged:,}, lost: {total.lost}, doubled: {total.doubled},")
    print(f"  out of order: {total.reordered}; worlds that failed: {failed} of {len(seeds)}")
    return failed


def _as_always() -> None:
    """Begin anew with fixed hashes: what a set of names hands out first must not differ from run to run."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        environment = {**os.environ, "PYTHONHASHSEED": "0"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.sim", *sys.argv[1:]], environment)


def main() -> int:
    """The exit code: 0 when every rule held."""
    _as_always()
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="run this seed alone")
    parser.add_argument("--seconds", type=float, default=60.0, help="run many seeds for so long")
    parser.add_argument("--first", type=int, default=1, help="the first of many seeds")
    parser.add_argument("--trace", type=Path, default=None, help="write what happened, line by line")
    parser.add_argument("--cuts", type=int, default=0, help="so many rounds of cuts during changes of groups")
    parser.add_argument("--routes", action="store_true", help="with --seed: a world of routes")
    parser.add_argument("--channels", action="store_true", help="with --seed: a world of channels")
    given = parser.parse_args()
    if given.cuts:
        return 1 if cuts(given.first, given.cuts) else 0
    if given.seed is None:
        return 1 if many(given.first, given.seconds) else 0
    kind = _ROUTES if given.routes else _CHANNELS if given.channels else _PLAIN
    options = kind.options_of(given.seed)
    print(options)
    trace: list[str] = []
    try:
        outcome = kind.simulate(options, trace=trace)
    finally:
        if given.trace is not None:
            given.trace.write_text("".join(trace))
            print(f"{len(trace)} lines of trace in {given.trace}")
        else:
            sys.stdout.writelines(trace[-30:])
    print(outcome)
    return 0


if __name__ == "__main__":
    sys.exit(main())
