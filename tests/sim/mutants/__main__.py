"""`python -m tests.sim.mutants`: each rule of the protocol switched off in turn; somebody must notice.

For each mutant a process of its own runs the tests that are named with it, then seeds of the simulator until
one fails; where no tests are named the simulator comes first, and then the tests of the protocol. What nobody
catches is a hole in the checkers. All times are of CPU, so that a busy machine changes no verdict; a process
that goes on beyond its share is ended by the system, and its mutant counts as one that nobody caught.
"""

from __future__ import annotations

import argparse
import os
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.sim.mutants import CASES
from tests.sim.mutants.case import Case
from tests.sim.simulation import options_of
from tests.sim.world import Options

RAFT = ("tests/raft",)

# CPU seconds: of simulation for each mutant, at least and at most; what the tests of one take, about; and
# beyond all of that, before the system ends its process.
LEAST_S = 3.0
MOST_S = 60.0
TESTS_S = 8.0
SPARE_S = 30.0


def _busy(seed: int) -> Options:
    """Seeds of more trouble than most: what is open for a moment only is met by some fault."""
    options = options_of(seed)
    return replace(
        options,
        clients=3,
        client_pause_s=0.05,
        fault_pause_s=2.0,
        trouble_s=60.0,
        disk_s=(0.001, 0.05, 0.3)[seed % 3],
    )


def _simulate(case: Case, seconds: float) -> str:
    """Which seed caught it, or an empty string."""
    from tests.sim import channels, routes
    from tests.sim.simulation import simulate

    began_s = time.process_time()
    seed = 0
    while not case.tests_only and time.process_time() - began_s < seconds:
        seed += 1
        try:
            if case.reclaims:
                routes.simulate(routes.busy(seed, reclaim_pause_s=0.5))
            elif case.routes:
                routes.simulate(routes.busy(seed))
            elif case.channels:
                channels.simulate(channels.busy(seed))
            else:
                simulate(_busy(seed))
        except Exception as error:  # noqa: BLE001  # that is what we are waiting for
            text = str(error).splitlines()[0] if str(error) else ""
            return f"seed {seed}: {type(error).__name__} {text}"[:150]
    return ""


def _test(tests: tuple[str, ...]) -> str:
    """The tests, if one of them failed; else an empty string."""
    import pytest

    quiet = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
    # A failing example need not be made small: that takes longer than to find it.
    fast = ("-x", "--hypothesis-profile=mutants")
    code = pytest.main(
        ["-q", *fast, "-p", "no:xdist", "-p", "no:cacheprovider", "--no-header", *quiet, *tests]
    )
    return f"tests: {' '.join(tests)}" if code == pytest.ExitCode.TESTS_FAILED else ""


def run_one(case: Case, seconds: float) -> str:
    """In a process of its own: what caught it, or an empty string."""
    most_s = int(seconds + TESTS_S + SPARE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (most_s, most_s))
    case.mutant.apply()
    if case.tests:
        return _test(case.tests) or _simulate(case, seconds)
    return _simulate(case, seconds) or _test(RAFT)


def main() -> int:
    """The number of mutants that nobody caught is the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=__doc__)
    parser.add_argument("--one", type=int, default=None, help="(inside) the number of one case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--seconds", type=float, default=None, help="of CPU to simulate each; else a fair part"
    )
    parser.add_argument("--minutes", type=float, default=14.0, help="that all together may take, about")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    given = parser.parse_args()
    if given.one is not None:
        found = run_one(CASES[given.one], given.seconds or 0.0)
        print(f"\ncaught: {found}" if found else "\nsurvived", flush=True)
        return 0
    numbers = [number for number, case in enumerate(CASES) if given.only in case.mutant.name]
    seconds = given.seconds
    if seconds is None:
        # The tests take their time, too.
        each_s = given.minutes * 60 * given.jobs / max(len(numbers), 1)
        seconds = min(max(each_s - TESTS_S, LEAST_S), MOST_S)

    by: Counter[str] = Counter()

    def judge(number: int) -> bool:
        command = [sys.executable, "-m", "tests.sim.mutants", "--one", str(number)]
        began_s = time.monotonic()
        done = subprocess.run(
            [*command, "--seconds", str(seconds)], capture_output=True, text=True, check=False
        )
        last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
        caught = last.startswith("caught: ")
        if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            verdict = "survived: it never came to an end"
        else:
            verdict = last if caught or last == "survived" else f"BROKEN {done.stderr[-400:]}"
        by["nobody" if not caught else "the tests" if "caught: tests:" in last else "the simulator"] += 1
        took_s = time.monotonic() - began_s
        print(f"{CASES[number].mutant.name:<75} {took_s:5.0f} s  {verdict}", flush=True)
        return caught

    with ThreadPoolExecutor(given.jobs) as pool:
        survived = list(pool.map(judge, numbers)).count(False)
    print(f"{len(numbers)} mutants, {survived} survived; caught by {dict(by)}")
    return survived


if __name__ == "__main__":
    sys.exit(main())
