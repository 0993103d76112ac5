"""What consensus costs: proposals beside PySyncObj's own Raft, idle groups, and leaders after a kill.

    python -m benches.consensus.bench_raft

Three processes on loopback, each with the product's storage, transport and driver, and nothing above them. A
proposal is one record of 1 KiB and one entry, done when a majority has it synced. PySyncObj does the same
proposals in the same run, with its journal, which it does not sync: by turns with Laminar, at each level in
the better of its two modes. ``--quick`` shows that everything runs and measures nothing.
"""

from __future__ import annotations

import os
import platform
import random
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benches.common import floors, on_disk, usage
from benches.consensus.raft_groups import NODES, VALUE_BYTES, run_node, together
from benches.consensus.raft_pysyncobj import run_objects
from benches.consensus.raft_trio import Trio
from benches.log.log_targets import Found, LogTarget, figure, head, line

MANY = 64
# PySyncObj's ports begin here: below are those of well-known services.
_FIRST_PORT = 10_000
# Proposals without a commit at any time, in all groups together.
ONE_IN_FLIGHT = (1, 64, 256)
MANY_IN_FLIGHT = (64, 256, 1024)

# Rate, p50 and p99 by (groups, in flight).
Levels = dict[tuple[int, int], tuple[float, float, float]]


def _proposals(name: str, title: str, levels: Iterable[int]) -> Iterable[tuple[str, LogTarget]]:
    for level in levels:
        yield f"{name}_{level}", LogTarget(f"{title}, {level:,} in flight", "/s", digits=0)
        for share in ("p50", "p99"):
            row = LogTarget(f"{title}, {level:,}, {share}", "ms", more_is_better=False, digits=2)
            yield f"{name}_{level}_{share}_ms", row


ROWS: Mapping[str, LogTarget] = {
    **dict(_proposals("one", "one group", ONE_IN_FLIGHT)),
    **dict(_proposals("many", f"{MANY} groups", MANY_IN_FLIGHT)),
    "idle_none_percent": LogTarget("CPU of no groups, of a core", "%", more_is_better=False, digits=2),
    "idle_1000_percent": LogTarget(
        "CPU of 1,000 idle groups, of a core", "%", 1.0, more_is_better=False, digits=2
    ),
    "made_10000_s": LogTarget("10,000 groups made", "s", more_is_better=False),
    "led_10000_s": LogTarget("first leaders of 10,000 groups", "s", more_is_better=False),
    "memory_10000_mib": LogTarget(
        "memory of 10,000 groups, three nodes", "MiB", more_is_better=False, digits=0
    ),
    "kill_10000_s": LogTarget("kill of a node until all are led", "s", more_is_better=False, digits=2),
    "served_10000": LogTarget("groups led by then", "", digits=0),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    rounds: int = 3
    seconds: float = 1.25
    many: int = MANY
    idle_groups: int = 1_000
    idle_s: float = 10.0
    # How long groups are let be before their idleness is measured.
    settle_s: float = 5.0
    most_groups: int = 10_000
    patience_s: float = 60.0


QUICK = Sizes(
    rounds=1, seconds=0.1, many=3, idle_groups=20, idle_s=0.2, settle_s=0.1, most_groups=30, patience_s=10.0
)


class Bench:
    """One run: prints each row as it is found, and keeps what the last line needs."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.sizes = sizes
        # By name; where there is another side, its value and the ratio too.
        self.figures: dict[str, float] = {}
        self.missed: list[str] = []
        self.regrets = 0
        self._folder = folder
        self._trios = 0

    def row(self, name: str, found: Found) -> None:
        """Print a row and remember it."""
        target = ROWS[name]
        self.figures[name] = figure(target, found)
        if found.beside is not None and found.ratio is not None:
            self.figures[f"{name}_pysyncobj"] = found.beside
            self.figures[f"{name}_ratio"] = found.ratio
        if target.verdict(self.figures[name]) == "MISSED":
            self.missed.append(name)
        print(line(target, found), flush=True)

    def _new_folder(self) -> Path:
        self._trios += 1
        return self._folder / str(self._trios)

    # -- proposals -------------------------------------------------------------------------

    def proposals(self) -> None:
        """One group and many, each level of both sides in every round."""
        many = self.sizes.many
        for groups, name, levels in ((1, "one", ONE_IN_FLIGHT), (many, "many", MANY_IN_FLIGHT)):
            ours: list[Levels] = []
            theirs: list[Levels] = []
            for _ in range(self.sizes.rounds):
                ours.append(self._laminar(groups, levels))
                single = self._pysyncobj(groups, levels, batched=False)
                batched = self._pysyncobj(groups, levels, batched=True)
                theirs.append({level: max(single[level], batched[level]) for level in single})
            for level in levels:
                key = (groups, level)
                for place, suffix in enumerate(("", "_p50_ms", "_p99_ms")):
                    found = Found([each[key][place] for each in ours], [each[key][place] for each in theirs])
                    self.row(f"{name}_{level}{suffix}", found)

    def _laminar(self, groups: int, levels: Iterable[int]) -> Levels:
        with Trio(run_node, self._new_folder()) as trio:
            trio.all("open", groups)
            trio.all("lead")
            _all_served(trio, groups)
            return self._loads(trio, groups, levels)

    def _pysyncobj(self, groups: int, levels: Iterable[int], *, batched: bool) -> Levels:
        with Trio(run_objects, self._new_folder()) as trio:
            trio.all("make", _free_ports(groups), batched)
            _all_served(trio, groups)
            found = self._loads(trio, groups, levels)
            self.regrets += sum(trio.all("regrets"))
            return found

    def _loads(self, trio: Trio, groups: int, levels: Iterable[int]) -> Levels:
        seconds = self.sizes.seconds
        return {(groups, level): together(trio.all("load", groups, level, seconds)) for level in levels}

    # -- groups that do nothing ------------------------------------------------------------

    def idle(self) -> None:
        """CPU of the three processes without groups, then with many of which nobody wants anything."""
        sizes = self.sizes
        with Trio(run_node, self._new_folder()) as trio:
            self.row("idle_none_percent", Found([_cpu_percent(trio, sizes.idle_s / 2)]))
            trio.all("open", sizes.idle_groups)
            trio.all("lead")
            _all_served(trio, sizes.idle_groups)
            time.sleep(sizes.settle_s)
            self.row("idle_1000_percent", Found([_cpu_percent(trio, sizes.idle_s)]))

    # -- the loss of a node ----------------------------------------------------------------

    def kill(self) -> None:
        """Many groups on three nodes; one node is killed with a third of the leaders."""
        sizes = self.sizes
        groups = sizes.most_groups
        with Trio(run_node, self._new_folder()) as trio:
            self.row("made_10000_s", Found([max(trio.all("open", groups))]))
            began_s = time.monotonic()
            trio.all("lead")
            count, since_s = trio.until_served(groups, within_s=sizes.patience_s)
            if count < groups:
                print(
                    f"only {count:,} of {groups:,} groups had a leader {sizes.patience_s:g} s after the start"
                )
            self.row("led_10000_s", Found([since_s - began_s]))
            time.sleep(sizes.settle_s)
            self.row("memory_10000_mib", Found([usage.pss_mib(trio.pids)]))
            killed_s = trio.kill(NODES[0])
            count, since_s = trio.until_served(groups, within_s=sizes.patience_s)
            took_s = since_s - killed_s if count >= groups else time.monotonic() - killed_s
            if count < groups:
                print(f"only {count:,} of {groups:,} groups were led again by then")
            self.row("kill_10000_s", Found([took_s]))
            self.row("served_10000", Found([count]))


def _all_served(trio: Trio, groups: int) -> None:
    count, _ = trio.until_served(groups, within_s=60)
    assert count >= groups, f"{count} of {groups} groups have a leader"


def _cpu_percent(trio: Trio, seconds: float) -> float:
    before_s, began_s = sum(trio.all("cpu")), time.monotonic()
    time.sleep(seconds)
    used_s: float = sum(trio.all("cpu")) - before_s
    return used_s / (time.monotonic() - began_s) * 100


def _free_ports(groups: int) -> list[tuple[int, ...]]:
    """Ports for an object of each group on each node: free just now, all at the same time.

    None that the kernel gives to those who connect: the first objects' connections would take the last ones'.
    """
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    sockets: list[socket.socket] = []
    # From anywhere, so that two runs at the same time seldom meet.
    for port in random.sample(range(_FIRST_PORT, end), end - _FIRST_PORT):
        if len(sockets) == groups * len(NODES):
            break
        sock = socket.socket()
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            sock.close()
        else:
            sockets.append(sock)
    assert len(sockets) == groups * len(NODES), f"{len(sockets)} ports of {_FIRST_PORT} to {end} are free"
    ports = [sock.getsockname()[1] for sock in sockets]
    for sock in sockets:
        sock.close()
    return [tuple(ports[first : first + len(NODES)]) for first in range(0, len(ports), len(NODES))]


def main() -> int:
    """Run everything, print, and end 0; a missed target is said, not punished."""
    given = on_disk.parser("python -m benches.consensus.bench_raft", __doc__).parse_args()
    kind = on_disk.filesystem(given.directory)
    with on_disk.folder(given.directory, "raft-") as folder:
        run(folder, kind, QUICK if given.quick else Sizes(), quick=given.quick)
    return 0


def run(folder: Path, filesystem: str, sizes: Sizes, *, quick: bool) -> None:
    """All measurements, in order; the last line printed is the summary."""
    began = time.monotonic()
    print(_machine(filesystem, sizes), flush=True)
    if quick:
        print("--quick: these sizes measure nothing")
    syncs = 20 if quick else 500
    print(f"floor before: {floors.disk_floor(folder, syncs=syncs, blocks=3)}")
    bystanders = usage.Bystanders([])
    others_s = _children_s()
    print(head("PySyncObj"), flush=True)
    bench = Bench(folder, sizes)
    bench.proposals()
    bench.idle()
    bench.kill()
    share = bystanders.share() - (_children_s() - others_s) / (time.monotonic() - began) / (
        os.cpu_count() or 1
    )
    print(f"floor after:  {floors.disk_floor(folder, syncs=syncs, blocks=3)}")
    print(f"others, and the kernel's own threads, used {max(0.0, share):.0%} of the CPUs during the run")
    if bench.regrets:
        print(f"PySyncObj said {bench.regrets} times that it cut entries it had applied already")
    if bench.missed:
        print(f"missed: {', '.join(bench.missed)}")
    print(f"took {time.monotonic() - began:.0f} s")
    print("bench-raft: " + " ".join(f"{name}={value:.3f}" for name, value in bench.figures.items()))


def _children_s() -> float:
    """CPU seconds of the processes that this one started and that have ended."""
    found = os.times()
    return found.children_user + found.children_system


def _machine(filesystem: str, sizes: Sizes) -> str:
    uname = os.uname()
    return (
        f"{' '.join(['bench_raft', *sys.argv[1:]])}: {os.cpu_count()} CPUs, {uname.sysname}"
        f" {uname.release}, Python {platform.python_version()}, uvloop {version('uvloop')}, {filesystem};"
        f" three processes; {VALUE_BYTES} B a proposal, synced on a majority before it counts;"
        f" pysyncobj {version('pysyncobj')}, journal not synced; medians of {sizes.rounds}, by turns"
    )


if __name__ == "__main__":
    sys.exit(main())
