"""Each bench runs, at sizes that measure nothing: so none can rot, and their figures keep their names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benches import bench_batch, bench_http, floors, usage
from benches.targets import TARGETS, Target, last_line

ROOT = Path(__file__).parents[2]
LAST_LINE = re.compile(
    r"bench: produce=[\d.]+ inflight=[\d.]+ post64=[\d.]+ single=[\d.]+ fetch=[\d.]+"
    r" kill_p50_s=[\d.]+ start_s=[\d.]+ rss_mib=\d+ cpu_us=[\d.]+"
)


def test_the_whole_run_prints_every_target_and_ends_in_the_line_for_programs(real_disk: Path) -> None:
    """`python -m benches` against real nodes: a line for each target, then the summary; nothing stays."""
    command = [sys.executable, "-m", "benches", "--quick", "--directory", str(real_disk)]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=55)

    assert (0, "") == (ran.returncode, ran.stderr)
    lines = ran.stdout.splitlines()
    for target in TARGETS.values():
        assert sum(line.startswith(f"{target.title} ") for line in lines) == 1, target.title
    assert LAST_LINE.fullmatch(lines[-1]), lines[-1]
    assert [] == list(real_disk.iterdir())


def test_the_batch_is_measured_against_rows() -> None:
    """Every figure is there and positive; the two sides gave the same values or it would have raised."""
    found = bench_batch.run(rounds=1, calls=1)

    assert {"encode_ratio_1024", "decode_ratio_1024", "arrow_ratio_1024"} <= found.keys()
    assert all(value > 0 for value in found.values())


def test_the_http_server_is_measured_against_a_bare_echo() -> None:
    """Both answer, and the ratio is there."""
    found = bench_http.run(rounds=1, seconds=0.1)

    assert found["echo"] > 0
    assert found["ratio"] == pytest.approx(found["server"] / found["echo"])


def test_the_disk_floor_leaves_no_file(real_disk: Path) -> None:
    """Both floors are measured, and their files are gone."""
    found = floors.disk_floor(real_disk, syncs=4, blocks=3)

    assert min(found.syncs_per_s, found.sync_p50_ms, found.mib_mb_per_s) > 0
    assert [] == list(real_disk.iterdir())


def test_a_floor_with_slow_syncs_is_not_quiet() -> None:
    """Over 1 ms at the 99th percentile somebody else uses the disk."""
    quiet = floors.DiskFloor(syncs_per_s=8000, sync_p50_ms=0.1, sync_p99_ms=1.0, mib_mb_per_s=1600)
    loud = floors.DiskFloor(syncs_per_s=8000, sync_p50_ms=0.1, sync_p99_ms=1.01, mib_mb_per_s=1600)

    assert (True, False) == (quiet.quiet, loud.quiet)


def test_a_percentile_is_a_value_that_was_seen() -> None:
    """Nearest rank, whatever the order; the last value for the whole."""
    values = [5.0, 1.0, 4.0, 2.0, 3.0]

    assert (3.0, 5.0, 1.0) == tuple(floors.percentile(values, share) for share in (0.5, 1.0, 0.0))


def test_a_target_is_met_on_its_own_side() -> None:
    """More is better for rates, less for times; reaching the figure is enough."""
    rate = Target("rate", "rec/s", must=10, aim=20)
    time = Target("time", "s", must=2, aim=1, more_is_better=False)

    assert ["must MISSED", "must met", "aim met"] == [rate.verdict(value) for value in (9, 10, 20)]
    assert ["must MISSED", "must met", "aim met"] == [time.verdict(value) for value in (3, 2, 1)]


def test_the_last_line_is_the_documented_one() -> None:
    """Names and their order are what programs read."""
    names = "produce inflight post64 single fetch kill_p50_s start_s rss_mib cpu_us".split()

    line = last_line(dict.fromkeys(names, 1.5))

    assert LAST_LINE.fullmatch(line)
    assert names == re.findall(r"(\w+)=", line)


def test_what_the_kernel_says_of_us_is_read() -> None:
    """CPU seconds and memory of a living process; the file system of a path."""
    here = [int(Path("/proc/self").resolve().name)]

    assert usage.cpu_s(here) > 0
    assert usage.pss_mib(here) > 1
    assert usage.filesystem(Path("/proc")) == "proc"


def test_a_process_that_is_not_watched_is_a_bystander() -> None:
    """Its CPU time counts as others' until its pid is given."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            before = usage.machine_cpu_s()
            unaware, aware = usage.Bystanders([]), usage.Bystanders([busy.pid])
            while usage.cpu_s([busy.pid]) < 0.3:
                pass
            shares = unaware.share(), aware.share()
        finally:
            busy.kill()

    assert usage.machine_cpu_s() > before
    assert shares[0] > shares[1]
