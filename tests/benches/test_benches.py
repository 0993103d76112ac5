"""Each bench runs, at sizes that measure nothing: so none can rot, and their figures keep their names."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benches.common import bare_tls, floors, usage
from benches.common.targets import TARGETS, Target, last_line
from benches.consensus import bench_raft
from benches.consensus.raft_groups import Loaded, together
from benches.http import bench_http, bench_secure, bench_turns
from benches.log import bench_batch, log_targets
from benches.log.laminarmq_format import read_all, write_all
from benches.log.log_rig import Rig, batch_values, fill
from benches.log.log_sizes import HollowDisk
from benches.log.log_targets import LOG_TARGETS, Found, LogTarget
from laminar.batch import Batch
from laminar.log import RealDisk, Storage
from tests.certificates import Authority

# Real nodes on whatever cores there are: a busy machine takes its time.
LIMIT_S = 450
pytestmark = pytest.mark.timeout(LIMIT_S + 30)
ROOT = Path(__file__).parents[2]
LAST_LINE = re.compile(
    r"bench: produce=[\d.]+ inflight=[\d.]+ post64=[\d.]+ single=[\d.]+ fetch=[\d.]+"
    r" kill_p50_s=[\d.]+ start_s=[\d.]+ rss_mib=\d+ cpu_us=[\d.]+"
)


def run_quickly(bench: str, real_disk: Path) -> tuple[list[str], dict[str, float]]:
    """Run a bench with tiny sizes; return its lines, and the figures of the last one. It leaves no file."""
    command = [sys.executable, "-m", bench, "--quick", "--directory", str(real_disk)]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert (0, "") == (ran.returncode, ran.stderr), ran.stdout
    *lines, last = ran.stdout.splitlines()
    name = bench.rpartition(".")[2].replace("_", "-")
    assert last.startswith(f"{name}: "), last
    assert [] == list(real_disk.iterdir())
    return lines, {name: float(figure) for name, figure in (each.split("=") for each in last.split()[1:])}


@pytest.mark.long
def test_the_whole_run_prints_every_target_and_ends_in_the_line_for_programs(real_disk: Path) -> None:
    """`python -m benches` against real nodes: a line for each target, then the summary; nothing stays."""
    command = [sys.executable, "-m", "benches", "--quick", "--directory", str(real_disk)]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

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


def test_a_flood_here_is_compared_with_one_elsewhere() -> None:
    """All are measured by a process of its own, for both kinds of requests; and with a limit of the flood."""
    found = bench_turns.run(rounds=1, requests=3)

    floods = ("calm", "elsewhere", "here", "limited elsewhere", "limited here")
    kinds = [f"{kind} {where}" for where in floods for kind in ("append", "whoami")]
    assert {f"{kind} p{share}" for kind in kinds for share in (50, 99)} == found.keys()
    assert all(took_ms > 0 for took_ms in found.values())


def test_tls_and_tokens_are_judged_by_the_median_ratio() -> None:
    """Of rounds that ran side by side, not of all rates of a side: the machine may be slower in one round."""
    load, both = bench_secure.POST_1, bench_secure.BOTH
    plain = [bench_secure.Measured(per_s, 40) for per_s in (100, 1000, 10)]
    secure = [bench_secure.Measured(*each) for each in ((91, 50), (800, 50), (9.5, 80))]
    said = bench_secure.line(load, both, plain, secure, added_us=10)

    assert "91 and 100 with TLS and tokens and with neither: 0.91 (0.80 to 0.95), target 0.9: met" in said
    assert "CPU 50.0 and 40.0 us: 0.80, floor 0.80" in said
    slow = [bench_secure.Measured(89, 50)]
    assert "MISSED" in bench_secure.line(load, both, plain[:1], slow, added_us=10)


async def test_what_tls_adds_is_found_by_two_bare_ends(tmp_path: Path) -> None:
    """Both sides exchange all that was asked for, on each connection."""
    authority = Authority(tmp_path / "ca")
    server = authority.node("bare", "127.0.0.1").server_context()

    found = await bare_tls.exchange(
        server, authority.context(), request=bytes(300_000), answer=b"done", connections=3, count=30, rounds=1
    )

    assert found.tls_us > 0 < found.plain_us


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


def test_a_process_that_is_not_watched_is_a_bystander(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CPU time counts as others' until its pid is given."""
    machine_cpu_s = usage.machine_cpu_s
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            # Both have the machine's CPU time of one moment, as others use some between two looks. The one
            # that should find more is made last and asked first, so its time is the shorter one.
            before = machine_cpu_s()
            monkeypatch.setattr(usage, "machine_cpu_s", lambda: before)
            aware, unaware = usage.Bystanders([busy.pid]), usage.Bystanders([])
            while usage.cpu_s([busy.pid]) < 0.3:
                pass
            after = machine_cpu_s()
            monkeypatch.setattr(usage, "machine_cpu_s", lambda: after)
            shares = unaware.share(), aware.share()
        finally:
            busy.kill()

    assert after > before
    assert shares[0] > shares[1]


def test_the_log_bench_prints_every_row_and_ends_in_the_line_for_programs(real_disk: Path) -> None:
    """`bench_log`: a line for each row, then every name with a number; nothing stays."""
    lines, figures = run_quickly("benches.log.bench_log", real_disk)
    for target in LOG_TARGETS.values():
        assert sum(line.startswith(f"{target.title} ") for line in lines) == 1, target.title
    assert list(LOG_TARGETS) == list(figures)
    assert all(figure > 0 for figure in figures.values()), figures


@pytest.mark.long
def test_the_raft_bench_prints_every_row_and_ends_in_the_line_for_programs(real_disk: Path) -> None:
    """`bench_raft`, both sides: a line for each row, then every name with a number."""
    lines, figures = run_quickly("benches.consensus.bench_raft", real_disk)
    for row in bench_raft.ROWS.values():
        assert sum(line.startswith(f"{row.title} ") for line in lines) == 1, row.title
    assert list(bench_raft.ROWS) == [name for name in figures if name in bench_raft.ROWS]
    for name in ("one_1", "one_64", "many_64", "many_1024"):
        assert {f"{name}_pysyncobj", f"{name}_ratio", f"{name}_p99_ms_ratio"} <= figures.keys(), name
    assert all(figure >= 0 for figure in figures.values()), figures


@pytest.mark.long
def test_the_state_bench_measures_transactions_and_cursors_beside_appends(real_disk: Path) -> None:
    """`bench_state`: both sides of every ratio, then every name with a number above 0."""
    _, figures = run_quickly("benches.queues.bench_state", real_disk)
    assert {"small_ratio", "large_ratio", "large_tx_written", "cursor_ratio"} <= figures.keys()
    assert all(figure > 0 for figure in figures.values()), figures


@pytest.mark.long
def test_the_flush_bench_measures_both_policies(real_disk: Path) -> None:
    """`bench_flush`: every figure of either policy, and what `interval` gains."""
    _, gains = run_quickly("benches.log.bench_flush", real_disk)
    assert ["produce", "in_flight", "p50", "p99", "post1", "post64"] == list(gains)
    assert all(gain > 0 for gain in gains.values()), gains


@pytest.mark.long
def test_the_search_bench_compares_an_index_with_a_scan(real_disk: Path) -> None:
    """`bench_find`: each search finds its record, and no other."""
    _, figures = run_quickly("benches.log.bench_find", real_disk)
    assert ["records", "warm_ms", "scan_by_index"] == list(figures)
    assert all(figure > 0 for figure in figures.values()), figures


@pytest.mark.long
def test_the_streams_bench_measures_appends_beside_a_large_record(real_disk: Path) -> None:
    """`bench_streams`: both ways, the other client's p99 alone and beside, and memory."""
    _, figures = run_quickly("benches.log.bench_streams", real_disk)
    assert {"in_ratio", "out_ratio", "in_mb_per_s", "out_mb_per_s", "grown_mib"} <= figures.keys()
    assert all(figure >= 0 for figure in figures.values()), figures


@pytest.mark.long
def test_the_recovery_bench_kills_a_node_and_finds_everything_again(real_disk: Path) -> None:
    """`bench_recovery`: its instants in their order, and every record read back."""
    command = [
        sys.executable,
        "-m",
        "benches.consensus.bench_recovery",
        "--quick",
        "--directory",
        str(real_disk),
    ]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert (0, "") == (ran.returncode, ran.stderr), ran.stdout
    *_, told, last = ran.stdout.splitlines()
    assert "lost 0, doubled 0, not as written 0; replicas of each partition [3]" in told
    assert last.startswith("bench-recovery: ")
    figures = {name: float(value) for name, value in (each.split("=") for each in last.split()[1:])}
    assert 0 < figures["dead_s"] <= figures["replaced_s"] < figures["full_s"]
    assert 0 < figures["served_s"] and 0 < figures["before_p99_ms"] and 0 < figures["moved_mb"]
    assert [] == list(real_disk.iterdir())


@pytest.mark.long
def test_the_catalog_bench_makes_topics_in_a_process_and_on_a_node(real_disk: Path) -> None:
    """`bench_catalog`: the catalog alone, a pass of the placement, and a node restarted."""
    sizes = ["--topics", "200", "--nodes", "1", "--partitions", "5", "--rest", "0.1"]
    command = [sys.executable, "-m", "benches.consensus.bench_catalog", *sizes, "--directory", str(real_disk)]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert (0, "") == (ran.returncode, ran.stderr), ran.stdout
    for told in (
        "    100:",
        "    200:",
        "replay at a start: 402 commands",
        "all partitions:",
        "at rest",
        "serves after",
    ):
        assert told in ran.stdout, told
    assert [] == list(real_disk.iterdir())


def test_what_three_processes_did_at_once_is_one_figure() -> None:
    """Rates add up, each over its own seconds; latencies are looked at together."""
    rate, p50, p99 = together([Loaded(2.0, (1.0, 9.0)), Loaded(1.0, (3.0,)), Loaded(1.0, ())])

    assert (2.0, 3.0, 9.0) == (rate, p50, p99)


def test_a_row_of_the_log_is_judged_by_its_ratio_where_it_has_a_floor() -> None:
    """The ratio is the median over the pairs that were measured right after each other."""
    ratio = LogTarget("r", "MB/s", 0.8, of_ratio=True)
    time = LogTarget("t", "s", 0.5, more_is_better=False)
    found = Found([8, 30, 10], [10, 10, 20])

    assert (0.8, 10, 10) == (found.ratio, found.value, found.beside)
    assert ["MISSED", "met"] == [ratio.verdict(figure) for figure in (0.79, 0.8)]
    assert ["met", "MISSED"] == [time.verdict(figure) for figure in (0.5, 0.51)]
    assert "" == LogTarget("u", "s").verdict(1e9)
    assert 0.8 == log_targets.figure(LOG_TARGETS["append"], found)


def test_no_figure_of_the_log_is_rounded_to_nothing() -> None:
    """A side that waited seconds for the disk makes a ratio of ten thousandths."""
    line = log_targets.last_line({"append": 0.000312345, "group_commit": 1234.5678})

    assert "bench-log: append=0.000312 group_commit=1234.568" == line


def test_laminarmqs_format_is_written_as_it_is_on_disk(tmp_path: Path) -> None:
    """Store: length of the metadata, the metadata, the value; index: a marker, then 16 bytes a record."""
    segment = write_all(tmp_path, [b"one", b"", b"three"])

    assert 8 == read_all(segment, 3)
    assert b"three" == segment.read(2)
    store, index = (tmp_path / "0.store").read_bytes(), (tmp_path / "0.index").read_bytes()
    assert (3 * 13 + 8, 16 + 3 * 16) == (len(store), len(index))
    assert bytes([5, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]) + b"one" == store[:16]
    (tmp_path / "0.store").write_bytes(store[:-1] + b"!")
    with pytest.raises(ValueError, match="record 2 is damaged"):
        segment.read(2)
    segment.close()


def test_the_large_log_of_zeros_is_made_of_valid_batches(real_disk: Path) -> None:
    """What the hollow disk leaves out reads back as the zeros that were written, checksums and all."""
    rig = Rig(real_disk)
    with rig.directory() as path:
        with rig.storage(path, HollowDisk()) as storage:
            log = storage.create_log("zeros")
            zeros = [bytes(len(value)) for value in batch_values(1024)]
            written = rig.run(fill(storage, log, total_bytes=1 << 20, values=zeros))
        storage = Storage.open(RealDisk(), f"{path}/home", f"{path}/logs")
        (log,) = storage.logs.values()
        found = rig.run(log.read(log.first_index, log.last_index, max_bytes=1 << 21))
        assert written == sum(map(len, found))
        assert all(Batch(frame).values == zeros for frame in found)
        (file,) = path.glob("logs/*/*.log")
        assert file.stat().st_blocks * 512 < written / 4
        rig.run(storage.close())
    rig.close()


@pytest.mark.long
def test_the_steering_bench_measures_four_ways() -> None:
    """`bench_steer`: a line for each way; where it can't run, one that says why."""
    command = [sys.executable, "-m", "benches.http.bench_steer", "--quick"]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert (0, "") == (ran.returncode, ran.stderr)
    last = ran.stdout.splitlines()[-1]
    assert last.startswith("bench-steer: ")
    if last.startswith("bench-steer: skipped: "):
        pytest.skip(last)
    figures = {name: float(value) for name, value in (each.split("=") for each in last.split()[1:])}
    assert ["reuseport", "sockets", "xdp", "ports", "passed_on"] == list(figures)
    assert all(figures[way] > 0 for way in ("reuseport", "sockets", "xdp", "ports"))


@pytest.mark.long
def test_a_scrape_is_measured_with_its_observations() -> None:
    """`bench_metrics`: an observation, the text alone, and a node that is scraped."""
    command = [sys.executable, "-m", "benches.http.bench_metrics", "--quick"]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert (0, "") == (ran.returncode, ran.stderr)
    kinds = [line.partition(":")[0] for line in ran.stdout.splitlines()]
    assert ["observe", "request", "text of 10 topics, 5 consumers", "scrape of 10 partitions"] == kinds


@pytest.mark.long
def test_the_trace_is_measured_beside_none() -> None:
    """`bench_trace`: a topic that is traced, and one that is not."""
    command = [sys.executable, "-m", "benches.http.bench_trace", "--quick", "--batch", "2"]

    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)

    assert (0, "") == (ran.returncode, ran.stderr)
    assert ran.stdout.startswith("trace, 2 in a request: off ") and "0 events dropped" in ran.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("bench", "figure"),
    [("benches.log.bench_beside", "uploads_p50_ratio"), ("benches.http.bench_loops", "catch_up")],
)
def test_small_appends_beside_bulk_and_long_turns_are_measured(
    bench: str, figure: str, real_disk: Path
) -> None:
    """Each runs to its end and has a figure of its last load; nothing stays."""
    _, figures = run_quickly(bench, real_disk)

    assert figure in figures
