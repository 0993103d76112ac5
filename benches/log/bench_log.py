"""The log engine's figures beside their floors, both sides by turns in one run.

    python -m benches.log.bench_log

One process and one disk, no cluster: what a shard's log costs. The floor of a row is a bare Python loop that
does the same writes, syncs and checksums and nothing else, or laminarmq's file format written and read by a
Python loop; `docs/benchmarks.md` says which. This module only runs them and prints. ``--quick`` is the same
with tiny sizes: it shows that everything runs and measures nothing.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

from benches.common import floors, on_disk, usage
from benches.log import log_reads, log_sizes, log_targets, log_writes
from benches.log.log_rig import BATCH_BYTES, KIB, MIB, Rig
from benches.log.log_targets import Found

GB = 10**9
# What `--only` may name.
PARTS = ("append", "group-commit", "checkpoints", "scan")
# Room that is left free on the disk beside what the run writes.
SPARE_BYTES = 4 * GB
# Two for each of 10,000 partitions, and some.
MOST_FILES = 24_000
# glibc's mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
# laminarmq's own figures, of its Rust code on such a machine; quoted, not measured here.
QUOTED = (
    "quoted, laminarmq's Rust code on such a machine: 4.5 to 6.8 µs to append 1 KiB (1.5 in one chunk),"
    " 7.6 to 51 to read"
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything."""

    rounds: int = 5
    floor_syncs: int = 500
    append_batches: int = 512
    turns: int = 500
    dirty: tuple[int, ...] = log_targets.DIRTY
    checkpoint_rounds: int = 3
    scan_bytes: int = 256 * MIB
    point_reads: int = 20_000
    records: int = 10_000
    large_bytes: int = 10 * GB
    logs: int = 1_000
    cold_bytes: int = 512 * MIB
    commits: int = 1_500


QUICK = Sizes(
    rounds=1,
    floor_syncs=20,
    append_batches=8,
    turns=10,
    dirty=(2, 4, 8),
    checkpoint_rounds=1,
    scan_bytes=4 * MIB,
    point_reads=200,
    records=100,
    large_bytes=32 * MIB,
    logs=8,
    cold_bytes=4 * MIB,
    commits=30,
)


class Table:
    """Prints each row as it is found, and keeps what the last line needs."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}
        self.missed: list[str] = []

    def rows(self, found: Mapping[str, Found]) -> None:
        for name, each in found.items():
            target = log_targets.LOG_TARGETS[name]
            self.figures[name] = log_targets.figure(target, each)
            if target.verdict(self.figures[name]) == "MISSED":
                self.missed.append(name)
            print(log_targets.line(target, each), flush=True)


def main() -> int:
    """Run everything, print, and end 0; a missed target is said, not punished."""
    parser = on_disk.parser("python -m benches.log.bench_log", __doc__)
    parser.add_argument(
        "--large-gb", type=float, default=None, help="size of the log that is opened, 10 by default"
    )
    parser.add_argument("--only", choices=PARTS, default=None, help="one part, without the others")
    given = parser.parse_args()
    kind = on_disk.filesystem(given.directory)
    sizes = QUICK if given.quick else Sizes()
    if given.large_gb is not None:
        sizes = replace(sizes, large_bytes=int(given.large_gb * GB))
    free = shutil.disk_usage(given.directory).free
    if not given.quick and free < SPARE_BYTES + sizes.large_bytes // 20:
        sys.exit(f"{given.directory} has {free / GB:.1f} GB free, too little")
    with on_disk.folder(given.directory, "log-") as folder:
        run(folder, kind, sizes, quick=given.quick, only=given.only)
    return 0


def run(folder: Path, filesystem: str, sizes: Sizes, *, quick: bool, only: str | None = None) -> None:
    """All measurements, in order, or those of one part; the last line printed is the summary."""
    began = time.monotonic()
    table = Table()
    _allow_files()
    _keep_memory()
    print(_machine(filesystem, sizes), flush=True)
    if quick:
        print("--quick: these sizes measure nothing")
    print(f"floor before: {floors.disk_floor(folder, syncs=sizes.floor_syncs, blocks=3)}")
    bystanders = usage.Bystanders([])
    print(log_targets.head(), flush=True)
    rig = Rig(folder)
    gc.freeze()
    try:
        _measure(rig, table, sizes, only)
    finally:
        rig.close()
    print(f"floor after:  {floors.disk_floor(folder, syncs=sizes.floor_syncs, blocks=3)}")
    print(f"others, and the kernel's own threads, used {bystanders.share():.0%} of the CPUs during the run")
    if table.missed:
        print(f"missed: {', '.join(table.missed)}")
    print(f"took {time.monotonic() - began:.0f} s")
    print(log_targets.last_line(table.figures))


def _measure(rig: Rig, table: Table, sizes: Sizes, only: str | None) -> None:
    rounds = sizes.rounds
    if only in (None, "append"):
        table.rows(log_writes.append(rig, batches=sizes.append_batches, rounds=rounds))
    if only in (None, "group-commit"):
        table.rows(log_writes.group_commit(rig, turns=sizes.turns, rounds=rounds))
    if only in (None, "checkpoints"):
        table.rows(log_writes.checkpoints(rig, dirty=sizes.dirty, rounds=sizes.checkpoint_rounds))
    if only in (None, "scan"):
        table.rows({"scan": log_reads.scan(rig, total_bytes=sizes.scan_bytes, rounds=rounds)})
    if only is not None:
        return
    table.rows(log_reads.point_reads(rig, reads=sizes.point_reads, rounds=rounds))
    table.rows(log_writes.sizes_appended(rig, records=sizes.records, rounds=rounds))
    table.rows(log_reads.sizes_read(rig, records=sizes.records, rounds=rounds))
    print(QUOTED)
    table.rows(log_sizes.large_log(rig, total_bytes=sizes.large_bytes, rounds=rounds))
    table.rows({"rss_1000_mib": log_sizes.many_logs(rig, logs=sizes.logs, rounds=rounds)})
    table.rows(
        {
            "cold_reader": log_reads.cold_reader(
                rig, total_bytes=sizes.cold_bytes, commits=sizes.commits, rounds=rounds
            )
        }
    )


def _keep_memory() -> None:
    """Let the C library keep memory that was used once (up to 32 MiB apiece), for both sides alike.

    Else it depends on what happens to lie behind it whether a scan gets its memory from the kernel, which
    takes several times as long as filling it.
    """
    libc = ctypes.CDLL(None)
    for setting, value in ((_M_TRIM_THRESHOLD, 2**31 - 1), (_M_MMAP_THRESHOLD, 32 * MIB)):
        libc.mallopt(setting, value)


def _allow_files() -> None:
    """As many open files as 10,000 partitions have, or as many as we may have."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (MOST_FILES, max(hard, MOST_FILES)))
    except ValueError:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _machine(filesystem: str, sizes: Sizes) -> str:
    uname = os.uname()
    return (
        f"{' '.join(['bench_log', *sys.argv[1:]])}: {os.cpu_count()} CPUs, {uname.sysname}"
        f" {uname.release}, Python {platform.python_version()}, uvloop {version('uvloop')}, {filesystem};"
        f" one process; batches of {BATCH_BYTES // KIB} KiB; medians of {sizes.rounds}, each side by turns"
    )


if __name__ == "__main__":
    sys.exit(main())
