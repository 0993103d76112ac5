"""Spark and a live cluster, beside what it could do at best: ``python -m benches.spark.bench_spark``.

Three nodes, Spark with two cores and everything else share this machine. A topic of 1 KiB values is read into
Spark's `noop`, by value alone and with all columns of the Kafka source; beside it, in turns, the least that a
source with a connection can be (a bare socket), the same batches from memory, the same records as tuples, and
an uncompressed Parquet file of them. Then the fixed cost of a
micro-batch beside Spark's own rate source, and what a query that waits costs the nodes. In the end the sink,
which is `spark_sink`'s. `--quick` is the same with tiny sizes: it shows that everything runs and measures
nothing.
"""

from __future__ import annotations

import asyncio
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import laminar
from benches.common import on_disk, usage
from benches.spark import spark_sink
from benches.spark.spark_rig import CORES, Timed, interleaved, largest_worker_mib, session
from benches.spark.spark_socket import SocketSource, server
from benches.spark.spark_sources import BATCH_ROWS, VALUE_BYTES, LeastSource, MemorySource, TupleSource
from laminar.aio import connect
from laminar.testing.cluster import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NODES, PARTITIONS = 3, 4
# As in `make bench`.
MOST_ELSEWHERE = 0.15
# What is to be reached, both sides measured in one run.
OF_SOCKET, OVER_TUPLES_VALUE, OVER_TUPLES_ALL, FIXED_MS, IDLE_SHARE, WORKER_MIB = 0.9, 2, 5, 15, 0.02, 300


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything; `rows` are whole batches in each partition."""

    rows: int = 256 * BATCH_ROWS * PARTITIONS
    rounds: int = 4
    warm_rounds: int = 1
    micro_batches: int = 40
    warm_batches: int = 5  # the first of a query start workers
    micro_rounds: int = 2
    idle_s: float = 10.0


QUICK = Sizes(
    rows=BATCH_ROWS * PARTITIONS,
    rounds=1,
    warm_rounds=0,
    micro_batches=3,
    warm_batches=1,
    micro_rounds=1,
    idle_s=0.2,
)


def main() -> int:
    """Run everything, print, and end 0; a missed aim is said, not punished."""
    given = on_disk.parser("python -m benches.spark.bench_spark", __doc__).parse_args()
    kind = on_disk.filesystem(given.directory)
    with on_disk.folder(given.directory, "spark-") as folder:
        run(folder, kind, QUICK if given.quick else Sizes(), quick=given.quick)
    return 0


def run(folder: Path, filesystem: str, sizes: Sizes, *, quick: bool) -> None:
    """All measurements, in order."""
    uname = os.uname()
    say(
        f"{os.cpu_count()} CPUs, {uname.sysname} {uname.release}, Python {platform.python_version()},"
        f" Spark {version('pyspark')} local[{CORES}], Arrow {version('pyarrow')}, {filesystem};"
        f" {NODES} nodes; {sizes.rows:,} records of {VALUE_BYTES} bytes in {PARTITIONS} partitions"
    )
    if quick:
        say("--quick: these sizes measure nothing")
    with (
        LocalCluster(folder / "cluster", nodes=NODES, shards=1) as cluster,
        laminar.connect(cluster.urls) as client,
        session(folder) as spark,
    ):
        pids = [pid for member in cluster.members for pid in cluster.pids(member.number)]
        rig = Rig(folder, spark, ",".join(cluster.urls), client, pids)
        measure(rig, sizes)
        spark_sink.measure(rig, spark_sink.QUICK if quick else spark_sink.Sizes())


def measure(rig: Rig, sizes: Sizes) -> None:
    """Everything that a cluster and a session are needed for."""
    _reads(rig, sizes)
    _fixed_cost(rig, sizes)
    _idle(rig, sizes)
    most = largest_worker_mib(rig.spark)
    gb = sizes.rows * VALUE_BYTES * (sizes.rounds + sizes.warm_rounds) * 2 / 1e9
    say(f"largest Python process of Spark: {most:.0f} MiB, {gb:.1f} GB ({aim(most, WORKER_MIB, '<')})")


@dataclass(frozen=True, slots=True)
class Rig:
    """What is measured, and where it is."""

    folder: Path
    spark: SparkSession
    endpoints: str
    client: laminar.Client
    pids: list[int]
    replicas: int = NODES

    def nodes_cpu_s(self) -> float:
        return usage.cpu_s(self.pids)

    def read(self, form: str, topic: str, **options: str) -> DataFrame:
        reader = self.spark.read.format(form).option("laminar.endpoints", self.endpoints)
        return reader.option("subscribe", topic).options(**options).load()

    def topic(self, name: str, *, rows: int, value: bytes) -> laminar.Topic[bytes]:
        """A topic with `rows` records, about as many in each partition."""
        made = self.client.create_topic(name, partitions=PARTITIONS, replicas=self.replicas)
        asyncio.run(_fill(self.endpoints.split(","), name, rows, value))
        return made


async def _fill(urls: list[str], topic: str, rows: int, value: bytes) -> None:
    async with connect(urls) as client, client.topic(topic).producer() as producer:
        await producer.send_all((b"%08d" % number, value) for number in range(rows))


def _reads(rig: Rig, sizes: Sizes) -> None:
    topic = rig.topic("bench", rows=sizes.rows, value=os.urandom(VALUE_BYTES)).name
    parquet = str(rig.folder / "parquet")
    rig.read("laminar", topic).write.option("compression", "none").parquet(parquet)
    for source in (MemorySource, TupleSource, SocketSource):
        rig.spark.dataSource.register(source)
    with server() as (port, pid):
        found = _by_turns(rig, sizes, topic, parquet, port, pid)
    gb = sizes.rows * VALUE_BYTES / 1e9
    for name, timed in found.items():
        say(_line(name, timed, sizes.rows, gb))
    for columns, wanted in (("value", OVER_TUPLES_VALUE), ("all columns", OVER_TUPLES_ALL)):
        took = found[f"laminar, {columns}"].median_s
        of_socket = found[f"socket, {columns}"].median_s / took
        of_memory = found[f"memory, {columns}"].median_s / took
        over_tuples = found[f"tuples, {columns}"].median_s / took
        of_parquet = found[f"Parquet, {columns}"].median_s / took
        say(
            f"{columns}: {of_socket:.2f} of a bare socket ({aim(of_socket, OF_SOCKET, '>')}),"
            f" {of_memory:.2f} of the same from memory,"
            f" {over_tuples:.1f} x tuples ({aim(over_tuples, wanted, '>')}), {of_parquet:.2f} of Parquet"
        )

    capacity_s = sum(sum(timed.seconds) for timed in found.values()) * (os.cpu_count() or 1)
    others = sum(timed.others_cpu_s for timed in found.values()) / capacity_s
    say(f"others, and the kernel's own threads, used {others:.0%} of the CPUs meanwhile")
    if others > MOST_ELSEWHERE:
        say(f"NOT QUIET: more than {MOST_ELSEWHERE:.0%}; every rate above is too low: run it again")


def _by_turns(rig: Rig, sizes: Sizes, topic: str, parquet: str, port: int, pid: int) -> dict[str, Timed]:
    """Read the topic, and what it is held against; the bare socket is served at `port` by process `pid`."""
    stored = rig.spark.read.parquet(parquet)
    rows = {"rows": str(sizes.rows), "partitions": str(PARTITIONS), "port": str(port)}
    values = {"columns": "value"}

    def made(form: str, **options: str) -> DataFrame:
        return rig.spark.read.format(form).options(**rows, **options).load()

    cases = {
        "laminar, value": rig.read("laminar", topic, **values),
        "socket, value": made("bench-socket", **values),
        "memory, value": made("bench-memory", **values),
        "tuples, value": rig.read("bench-tuples", topic, **values),
        "Parquet, value": stored.select("value"),
        "laminar, all columns": rig.read("laminar", topic),
        "socket, all columns": made("bench-socket"),
        "memory, all columns": made("bench-memory"),
        "tuples, all columns": rig.read("bench-tuples", topic),
        "Parquet, all columns": stored,
        "laminar, all but value": rig.read(
            "laminar", topic, columns="key,topic,partition,offset,timestamp,timestampType"
        ),
    }
    counted = cases["laminar, all columns"].count()
    assert counted == sizes.rows, f"{counted} of {sizes.rows} records were read"
    return interleaved(
        cases,
        rounds=sizes.rounds,
        warm=sizes.warm_rounds,
        spark=rig.spark,
        nodes=lambda: rig.nodes_cpu_s() + usage.cpu_s([pid]),
    )


def _line(name: str, timed: Timed, rows: int, gb: float) -> str:
    took = timed.median_s
    per_gb = gb * len(timed.seconds)
    return (
        f"{name:<24} {took:6.2f} s {rows / took:12,.0f} rows/s {gb * 1000 / took:8,.0f} MB/s;"
        f" CPU s a GB: nodes {timed.nodes_cpu_s / per_gb:.2f}, Spark {timed.spark_cpu_s / per_gb:.2f}"
    )


def _fixed_cost(rig: Rig, sizes: Sizes) -> None:
    """Micro-batches of a record a partition, into `noop`, beside a source of Spark's own, in its JVM, and the
    least that a source in Python costs.
    """
    count = sizes.micro_batches
    topic = rig.topic("tiny", rows=count * PARTITIONS, value=b"x").name
    rig.spark.dataSource.register(LeastSource)
    rows = {"rowsPerBatch": str(PARTITIONS), "numPartitions": str(PARTITIONS)}
    found: dict[str, list[float]] = {"laminar": [], "rate": [], "least": []}
    for number in range(sizes.micro_rounds):
        stream = rig.spark.readStream
        tiny = (
            stream.format("laminar")
            .options(**{"laminar.endpoints": rig.endpoints, "subscribe": topic})
            .options(startingOffsets="earliest", maxOffsetsPerTrigger=str(PARTITIONS))
            .load()
        )
        ours = _triggers(rig, tiny, f"laminar-{number}", available_now=True)
        found["laminar"] += ours[sizes.warm_batches :]
        for name, frame in (
            ("rate", stream.format("rate-micro-batch").options(**rows).load()),
            ("least", stream.format("bench-least").option("partitions", str(PARTITIONS)).load()),
        ):
            took = _triggers(rig, frame, f"{name}-{number}", least=count)
            found[name] += took[sizes.warm_batches :]
    median_ms = {name: statistics.median(each) for name, each in found.items()}
    over_ms = median_ms["laminar"] - median_ms["rate"]
    say(
        f"a micro-batch: {median_ms['laminar']:.0f} ms against the rate source's {median_ms['rate']:.0f} ms,"
        f" {over_ms:+.0f} ms ({aim(over_ms, FIXED_MS, '<')}); the least source in Python:"
        f" {median_ms['least']:.0f} ms"
    )


def _triggers(
    rig: Rig, frame: DataFrame, name: str, *, available_now: bool = False, least: int = 0
) -> list[float]:
    """Milliseconds of each trigger with rows; an endless query ends after `least`."""
    trigger: dict[str, Any] = {"availableNow": True} if available_now else {"processingTime": "0 seconds"}
    checkpoint = str(rig.folder / f"checkpoint-{name}")
    query = (
        frame.writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(**trigger).start()
    )
    try:
        if available_now:
            query.awaitTermination()
        while not available_now and (query.lastProgress or {"batchId": 0})["batchId"] < least:
            if not query.isActive:
                raise RuntimeError(f"{name} ended after batch {query.lastProgress}: {query.exception()}")
            time.sleep(0.05)
        recent = [each for each in query.recentProgress if each["numInputRows"]]
    finally:
        query.stop()
    return [float(each["durationMs"]["triggerExecution"]) for each in recent]


def _idle(rig: Rig, sizes: Sizes) -> None:
    """What nodes do for a query that has nothing to read, beside what they do without it."""

    def used() -> float:
        before_s = rig.nodes_cpu_s()
        time.sleep(sizes.idle_s)
        return (rig.nodes_cpu_s() - before_s) / sizes.idle_s

    frame = (
        rig.spark.readStream.format("laminar")
        .options(**{"laminar.endpoints": rig.endpoints, "subscribe": "tiny"})
        .load()
    )
    alone = used()
    checkpoint = str(rig.folder / "checkpoint-idle")
    query = frame.writeStream.format("noop").option("checkpointLocation", checkpoint).start()
    try:
        query.processAllAvailable()
        share = used() - alone
    finally:
        query.stop()
    say(f"an idle query costs the nodes {share:.1%} of a core ({aim(share, IDLE_SHARE, '<')})")


def aim(value: float, wanted: float, better: str) -> str:
    """Whether `value` is as good as `wanted`: at least so much with ``>``, at most with ``<``."""
    met = value >= wanted if better == ">" else value <= wanted
    return f"aim {wanted:g}: {'met' if met else 'MISSED'}"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
