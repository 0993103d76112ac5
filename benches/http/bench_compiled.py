"""The compiled build beside the pure one: CPU a record at three loads, and the events of a simulated world.

    python -m benches.http.bench_compiled        (make bench-compiled, which builds both)

Both sides are the same sources. The pure one is this checkout, the compiled one `build/compiled`. Each has a
process with three members and twelve partitions, without HTTP (`compiled_load`), three nodes that get POSTs
of one record, and a process that simulates worlds. All live for the whole run, and each load is done by one
side and then by the other, so a slow moment hits both. The figure of a row is the least of its rounds: others
on the machine only add. `--quick` shows that everything runs, and measures nothing.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benches.common import on_disk

ROOT = Path(__file__).parents[2]
# Appends under way, in twelve partitions.
LOADS = {"one_by_one": 12, "in_flight_64": 64, "in_flight_256": 256}
POSTS = 64
SEEDS = (3, 6, 9)


class Side:
    """One build: its process of members, that of its nodes, and that of its worlds."""

    def __init__(self, tree: Path, folder: Path) -> None:
        self._tree = tree
        self._members = self._start(str(folder / "members"))
        self._nodes = self._start("http", str(folder / "nodes"))
        self._worlds = self._start("sim")
        self.answer(self._members)
        self.modules: str = self.answer(self._nodes)["modules"]

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        # Fixed hashes: what a set hands out first must not differ between the sides.
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(self._tree)}
        return subprocess.Popen(
            [sys.executable, "-m", "benches.http.compiled_load", *arguments],
            cwd=self._tree,
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def load(self, in_flight: int, seconds: float) -> dict[str, Any]:
        """Do a load; what it cost."""
        return self._ask(self._members, f"{in_flight} {seconds}")

    def post(self, connections: int, seconds: float) -> dict[str, Any]:
        """POST single records; what each cost the nodes."""
        return self._ask(self._nodes, f"{connections} {seconds}")

    def world(self, seed: int) -> dict[str, Any]:
        """Simulate a world; how fast, and the digest of its trace."""
        return self._ask(self._worlds, str(seed))

    def _ask(self, process: subprocess.Popen[str], line: str) -> dict[str, Any]:
        assert process.stdin is not None
        process.stdin.write(f"{line}\n")
        process.stdin.flush()
        return self.answer(process)

    @staticmethod
    def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
        """Read one answer."""
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"a process ended: {process.wait()}"
        found: dict[str, Any] = json.loads(line)
        return found

    def close(self) -> None:
        """End all processes in good order."""
        for process in (self._members, self._nodes, self._worlds):
            assert process.stdin is not None
            process.stdin.close()
            process.wait(30)


def main() -> int:
    """Run everything, print, and end 0 unless the two sides' worlds differ."""
    parser = on_disk.parser("python -m benches.http.bench_compiled", __doc__)
    parser.add_argument(
        "--compiled", type=Path, default=ROOT / "build" / "compiled", help="the compiled tree"
    )
    given = parser.parse_args()
    if not list((given.compiled / "raft").glob("core.*.so")):
        sys.exit(f"{given.compiled} is not compiled: make compiled")
    if list((ROOT / "raft").glob("core.*.so")):
        sys.exit(f"{ROOT} is compiled itself: its extension modules have to go")
    kind = on_disk.filesystem(given.directory)
    rounds, seconds, seeds = (1, 0.1, SEEDS[:1]) if given.quick else (5, 1.5, SEEDS)
    print(
        f"{os.cpu_count()} CPUs, {platform.release()}, Python {platform.python_version()}, {kind};"
        f" least of {rounds} rounds by turns; records of 1 KiB, 12 partitions, three members in one process,"
        " synced on a majority",
        flush=True,
    )
    if given.quick:
        print("--quick: these sizes measure nothing")
    with on_disk.folder(given.directory.resolve(), "compiled-") as folder:
        sides = Side(ROOT, folder / "pure"), Side(given.compiled.resolve(), folder / "compiled")
        assert [side.modules for side in sides] == ["pure", "compiled"], (
            "a node runs the other side's modules"
        )
        figures, same = _measure(sides, rounds, seconds, seeds)
        for side in sides:
            side.close()
    print("bench-compiled: " + " ".join(f"{name}={value:.3g}" for name, value in figures.items()))
    return 0 if same else 1


def _measure(
    sides: tuple[Side, Side], rounds: int, seconds: float, seeds: tuple[int, ...]
) -> tuple[dict[str, float], bool]:
    figures: dict[str, float] = {}
    print(f"{'':24}{'pure':>10}{'compiled':>10}{'ratio':>8}")
    for name, in_flight in LOADS.items():
        found = [[side.load(in_flight, seconds) for side in sides] for _ in range(rounds)]
        pure, compiled = (min(turn[place]["cpu_us"] for turn in found) for place in (0, 1))
        entry = found[-1][0]["records_an_entry"]
        print(
            f"{in_flight:3} under way, µs/record {pure:10.1f}{compiled:10.1f}{compiled / pure:8.2f}"
            f"   ({entry:.1f} records an entry)",
            flush=True,
        )
        figures |= {f"{name}_pure": pure, f"{name}_compiled": compiled, f"{name}_ratio": compiled / pure}
    posts = [[side.post(POSTS, seconds) for side in sides] for _ in range(rounds)]
    pure, compiled = (min(turn[place]["cpu_us"] for turn in posts) for place in (0, 1))
    print(f"{POSTS:3} POSTs under way, µs   {pure:10.1f}{compiled:10.1f}{compiled / pure:8.2f}", flush=True)
    figures |= {"post64_pure": pure, "post64_compiled": compiled, "post64_ratio": compiled / pure}
    same = True
    rates: tuple[list[float], list[float]] = ([], [])
    for seed in seeds:
        worlds = [side.world(seed) for side in sides]
        for rate, world in zip(rates, worlds, strict=True):
            rate.append(world["events_per_cpu_s"])
        if worlds[0]["digest"] != worlds[1]["digest"]:
            same = False
            print(f"DIFFERENT: the world of seed {seed}")
    pure, compiled = (sum(rate) / len(rate) for rate in rates)
    print(f"simulated events/CPU s  {pure:10.0f}{compiled:10.0f}{compiled / pure:8.2f}")
    figures |= {"sim_pure": pure, "sim_compiled": compiled, "sim_ratio": compiled / pure}
    return figures, same


if __name__ == "__main__":
    sys.exit(main())
