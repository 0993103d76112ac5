"""The demo from beginning to end: start, stream and kill, read back, compare, query, draw, stop, check.

Each step is printed as it happens, then the result of each check. The last line names the parts that could
not run here (Spark without Java). With ``REQUIRE=spark`` in the environment that is a failure.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from examples.demo import checks, spark_stage
from examples.demo.checks import Finding
from examples.demo.flights import Delays, Flights, load
from examples.demo.load import Outcome, stream
from laminar.client.client import connect
from laminar.client.errors import Error
from laminar.testing.cluster import LocalCluster
from laminar.testing.history import Read
from laminar.testing.nodes import ServerFailed
from laminar.testing.replicas import committed_digests

TOPIC = "flights"
NODES, SHARDS, PARTITIONS, REPLICAS = 3, 2, 12, 3
# Small, so that reading a partition takes several fetches, and each can go to another replica.
FETCH_BYTES = 16 << 10
READ_AHEAD_BYTES = 32 << 10
# How long a process may take to end after the cluster was stopped.
LEFTOVER_GRACE_S = 10.0


@dataclass(slots=True)
class Report:
    """The findings so far, and the parts that were skipped."""

    findings: list[Finding] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """Print `text` with the seconds since the demo began."""
        print(f"{time.monotonic() - self.began:6.1f} s  {text}", flush=True)


def run(*, file: Path | None, out: Path, keep: bool) -> int:
    """Run the demo; return its exit code: 0 if all checks held and nothing required was skipped, else 1.

    `file`: see `examples.demo.flights.load`. Data and logs are in a folder of `out`, and are deleted after a
    run without faults unless `keep`.
    """
    flights = load(file)
    report = Report()
    folder = out.absolute() / "nodes"
    shutil.rmtree(folder, ignore_errors=True)
    cluster = LocalCluster(folder, nodes=NODES, shards=SHARDS)
    try:
        with _ended_by_sigterm():
            report.say(f"starting {NODES} nodes of {SHARDS} shards: {', '.join(cluster.urls)}")
            try:
                cluster.start()
                _act(cluster, flights, report, out)
            finally:
                cluster.stop()
    except (Error, ServerFailed, spark_stage.QueryFailed) as failure:
        report.findings.append(Finding("the demo ran to its end", [str(failure)]))
    report.findings.append(checks.check_leftovers(_leftovers(cluster)))
    held = _conclude(report, required=os.environ.get("REQUIRE", ""))
    if held and not keep:
        shutil.rmtree(folder)
    else:
        print(f"data and logs are in {folder}")
    return 0 if held else 1


def _act(cluster: LocalCluster, flights: Flights, report: Report, out: Path) -> None:
    """Do all steps that need the running cluster, and add their findings to `report`."""
    report.say("all nodes serve, and see each other")
    outcome, read, served_by = asyncio.run(_stream_and_read(cluster, flights, report))
    report.findings += checks.check_flights(outcome.sent, read, flights=len(flights))
    report.findings.append(checks.check_retries(outcome.retried, kills=outcome.kills))
    report.findings.append(checks.check_balance(served_by))
    digests = committed_digests(cluster.urls, TOPIC)
    report.say("every replica has committed the same entries; their digests are here")
    report.findings.append(checks.check_digests(digests, replicas=REPLICAS))
    delays, how = _query(cluster, flights, report)
    _draw(delays, out / "delays.png", how, report)


async def _stream_and_read(
    cluster: LocalCluster, flights: Flights, report: Report
) -> tuple[Outcome, list[Read], dict[int, dict[str, int]]]:
    """Send the flights with one client, with the kill; read them back with another that knows nothing yet.

    Return what was sent, the records read, and partition -> node -> number of batches that it served.
    """
    async with connect(cluster.urls) as client:
        topic = await client.create_topic(TOPIC, partitions=PARTITIONS, replicas=REPLICAS)
        report.say(
            f"topic {TOPIC}: {PARTITIONS} partitions of {REPLICAS} replicas, appends synced by a majority"
        )
        try:
            outcome = await stream(client, topic, flights, cluster, say=report.say)
        except BaseExceptionGroup as group:
            # An error of one task cancels the other task. The first exception is the cause.
            raise group.exceptions[0] from None
    report.say(
        f"{len(outcome.sent):,} flights acknowledged in {outcome.seconds:.1f} s, "
        f"{outcome.retried:,} appends sent again"
    )
    read, served_by = await _read_back(cluster, flights)
    report.say(f"{len(read):,} flights read back, spread over the replicas")
    return outcome, read, served_by


async def _read_back(cluster: LocalCluster, flights: Flights) -> tuple[list[Read], dict[int, dict[str, int]]]:
    """Return every record in the order of reading, and partition -> node -> number of batches it served."""
    numbers = flights.numbers()
    read: list[Read] = []
    served_by: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    async with connect(cluster.urls) as client:
        reader = client.topic(TOPIC).read(
            "earliest", fetch_bytes=FETCH_BYTES, read_ahead_bytes=READ_AHEAD_BYTES
        )
        async for batch in reader.batches():
            served_by[batch.partition][batch.node] += 1
            for offset, key, value in zip(batch.offsets, batch.keys, batch.values, strict=True):
                # A value that is not a line of the file gets the number 0, which was never sent.
                name = key.decode("utf-8", "replace") if key is not None else None
                read.append(Read(batch.partition, offset, name, numbers.get(bytes(value), 0)))
    return read, {partition: dict(by_node) for partition, by_node in sorted(served_by.items())}


def _query(cluster: LocalCluster, flights: Flights, report: Report) -> tuple[Delays, str]:
    """Return Spark's delays, after checking them, and a sentence that says how they were computed.

    Where Spark cannot run, they are computed from the file.
    """
    absent = spark_stage.why_not()
    if absent is not None:
        report.skipped.append(f"Spark: {absent}")
        return flights.delays(), "Computed from the file: Spark could not run here."
    report.say("Spark starts, and takes the topic in micro-batches")
    result = spark_stage.run_query(cluster, TOPIC, folder=cluster.directory / "spark")
    delays = spark_stage.delays_of(result)
    sizes = ", ".join(f"{size:,}" for size in result.batches)
    report.say(f"Spark {result.spark}: {len(result.batches)} micro-batches of {sizes} flights")
    report.findings.append(checks.check_delays(delays, flights.delays(), batches=len(result.batches)))
    how = f"Computed by a Spark streaming query over a Laminar topic, in {len(result.batches)} micro-batches."
    return delays, how


def _draw(delays: Delays, path: Path, how: str, report: Report) -> None:
    try:
        from examples.demo.chart import draw

        draw(delays, path, how=how)
    except ImportError as missing:
        report.skipped.append(f"the picture: {missing} (pip install 'laminar-mq[demo]')")
        return
    report.say(f"drawn: {path}")


def _leftovers(cluster: LocalCluster) -> Sequence[int]:
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while (pids := cluster.leftovers()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return pids


def _conclude(report: Report, *, required: str) -> bool:
    """Print all findings; return whether all held and nothing in `required` was skipped.

    `required` is a list of parts, separated by commas.
    """
    print()
    for finding in report.findings:
        print("\n".join(finding.lines()))
    broken = sum(not finding.held for finding in report.findings)
    wanted = {word.strip().lower() for word in required.split(",") if word.strip()}
    lacking = [each for each in report.skipped if each.partition(":")[0].lower() in wanted]
    seconds = time.monotonic() - report.began
    if broken:
        last = f"demo: {broken} of {len(report.findings)} checks did not hold, {seconds:.0f} s"
    else:
        last = f"demo: all {len(report.findings)} checks held, {seconds:.0f} s"
    if lacking:
        last += "; failed, because REQUIRE asks for what was skipped"
    if report.skipped:
        last += f"; skipped {'; '.join(report.skipped)}"
    print(f"\n{last}", flush=True)
    return not broken and not lacking


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block on SIGTERM, so that it ends in order, as by Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
