"""Spark's pipelines on real and on many records, each checked: ``python -m benches.spark.bench_pipelines``.

Three nodes and a Spark of two cores on this machine. The 20,000 flights, and then `--records` generated ones
(10 million), go through all pipelines: archived, replayed, compared with what they came from by key, and
their replicas with each other, audited, and counted by *stats*, with a picture. Beside each topic stands one
with a record that is lost, one that is doubled and one that stands behind its next: *audit* and *compare*
must find these three and nothing else. Ends 0 only if every check held.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import laminar
from benches.common import on_disk
from benches.spark.spark_rig import CORES, session
from examples.demo.flights import load
from laminar.spark.pipelines.archive import archive, check
from laminar.spark.pipelines.audit import Audited, audit
from laminar.spark.pipelines.compare import Compared, Side, compare, compare_replicas
from laminar.spark.pipelines.replay import replay
from laminar.spark.pipelines.session import cluster_options
from laminar.spark.pipelines.stats import stats
from laminar.spark.pipelines.stats_picture import draw
from laminar.testing.cluster import LocalCluster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NODES, PARTITIONS, REPLICAS = 3, 4, 3
RECORDS, QUICK_RECORDS = 10_000_000, 4_000
# Generated records: so many keys, of which the first few have most of the records.
KEYS = 100_000


@dataclass(frozen=True, slots=True)
class Planted:
    """The ids of records of one key: not written, written twice, and written after its next."""

    lost: str
    doubled: str
    late: str


@dataclass(frozen=True, slots=True)
class Given:
    """What is written: rows of key, value, time, id and ordinal, and the faults of the topic beside it."""

    name: str
    rows: DataFrame
    count: int
    planted: Planted


def main() -> int:
    """Both sets through all pipelines; 0 only if all checks held."""
    arguments = on_disk.parser("python -m benches.spark.bench_pipelines", __doc__)
    arguments.add_argument("--records", type=int, default=RECORDS, help="generated records [10 million]")
    arguments.add_argument("--pictures", type=Path, default=Path("bench-out"), help="where pictures go")
    given = arguments.parse_args()
    records = QUICK_RECORDS if given.quick else given.records
    kind = on_disk.filesystem(given.directory)
    given.pictures.mkdir(parents=True, exist_ok=True)
    print(
        f"{os.cpu_count()} CPUs, {platform.system()} {platform.release()},"
        f" Python {platform.python_version()}, Spark {version('pyspark')} local[{CORES}], {kind};"
        f" {NODES} nodes, {PARTITIONS} partitions",
        flush=True,
    )
    with (
        on_disk.folder(given.directory, "pipelines-") as folder,
        LocalCluster(folder / "cluster", nodes=NODES, shards=1) as cluster,
        laminar.connect(cluster.urls) as client,
        session(folder) as spark,
    ):
        for make in (flights, lambda spark: generated(spark, records)):
            Pipelines(folder, given.pictures, spark, client, list(cluster.urls)).run(make(spark))
    print("every check held", flush=True)
    return 0


def flights(spark: SparkSession) -> Given:
    """The 20,000 flights by their airport of departure; a line's number is its id and its ordinal."""
    found = load(None)
    rows = [
        (flight.origin.encode(), line, flight.date, str(number), number)
        for number, (line, flight) in enumerate(zip(found.lines, found.flights, strict=True), start=1)
    ]
    # Two flights from one airport, the later of which is to come first.
    busiest = [row[-1] for row in rows if row[0] == b"ORD"]
    lost, late, doubled = busiest[10], busiest[20], busiest[30]
    frame = spark.createDataFrame(rows, "key binary, value binary, date string, id string, ordinal bigint")
    frame = frame.selectExpr("*", "to_timestamp(date, 'yyyy/MM/dd HH:mm') as timestamp").drop("date")
    planted = Planted(lost=str(lost), doubled=str(doubled), late=str(late))
    return Given("flights", frame.persist(), len(rows), planted)


def generated(spark: SparkSession, records: int) -> Given:
    """Records of about 100 bytes, of a week with its days and nights, whose keys are as skewed as people's
    are: key k has about 1/k of them.
    """
    week_ms, since_ms = 7 * 86_400_000, 1_767_225_600_000
    week = f"(id / {records} + 0.02 * sin(14 * pi() * id / {records}))"
    frame = spark.range(0, records, 1, 2 * PARTITIONS).selectExpr(
        # The logarithm of a uniform number is uniform: so its power has a density of 1/x.
        f"cast(concat('key ', cast(pow({KEYS}, rand(7)) as int)) as binary) as key",
        "cast(concat(id, ' ', substring(sha2(cast(id as string), 512), 1, 40 + cast(id % 80 as int)))"
        " as binary) as value",
        f"timestamp_millis({since_ms} + cast({week_ms} * {week} as bigint)) as timestamp",
        "cast(id as string) as id",
        "id as ordinal",
    )
    # Of the commonest key, early ones: there are later ones for sure.
    first = [row["id"] for row in frame.where("key = cast('key 1' as binary)").limit(40).collect()]
    planted = Planted(lost=first[10], doubled=first[30], late=first[20])
    return Given("generated", frame, records, planted)


class Pipelines:
    """All pipelines over one set of records."""

    def __init__(
        self, folder: Path, pictures: Path, spark: SparkSession, client: laminar.Client, urls: list[str]
    ) -> None:
        self._folder = folder
        self._pictures = pictures
        self._spark = spark
        self._client = client
        self._cluster = cluster_options(urls)

    def run(self, given: Given) -> None:
        """Every pipeline once, each result checked."""
        spark, cluster, name, count = self._spark, self._cluster, given.name, given.count
        again, odd, folder = f"{name}-again", f"{name}-odd", str(self._folder / f"{name}-archive")
        for topic in (name, again, odd):
            self._client.create_topic(topic, partitions=PARTITIONS, replicas=REPLICAS)
        with timed(f"{name}: written", count):
            self._write(given.rows, name)
        with timed(f"{name}: written with faults", count):
            self._write(with_faults(given), odd)
        with timed(f"{name}: archived", count):
            must_be(archive(spark, cluster, name, folder), count)
        with timed(f"{name}: archive checked", count):
            held = check(spark, folder)
            must_be(sum(each.records for each in held), count)
            must_be([(each.missing, each.doubled) for each in held], [(0, 0)] * PARTITIONS)
        with timed(f"{name}: archive replayed", count):
            must_be(
                replay(spark, cluster, again, archive=folder, checkpoint=f"{folder}-replay").records, count
            )
        claims = given.rows.select("id", "ordinal")
        with timed(f"{name}: audited", count):
            sound = audit(spark, cluster, again, claims, id="header:id")
            must_be((sound.sound, sound.claims, sound.records), (True, count, count))
        with timed(f"{name}: audited with faults", count):
            faulty = audit(spark, cluster, odd, claims, id="header:id")
            must_be(audited(faulty), {"lost": 1, "doubled": 1, "reordered": 1, "unclaimed": 0})
            must_be(
                [each.examples[0]["id"] for each in faulty.findings[:3]],
                [given.planted.lost, given.planted.doubled, given.planted.late],
            )
        one = Side(cluster=cluster, topic=name)
        with timed(f"{name}: compared by key", count):
            same = compare(spark, one, Side(cluster=cluster, topic=again), by="key")
            must_be((same.equal, same.records, same.others), (True, count, count))
        with timed(f"{name}: compared by key with faults", count):
            other = compare(spark, one, Side(cluster=cluster, topic=odd), by="key")
            must_be(compared(other), {"missing": 1, "extra": 1, "different": 0, "reordered": 1})
        with timed(f"{name}: replicas compared", count * (REPLICAS - 1)):
            replicas = compare_replicas(spark, cluster, name)
            must_be([(each.equal, each.records) for each in replicas], [(True, count)] * (REPLICAS - 1))
        with timed(f"{name}: counted by stats", count):
            told = stats(spark, cluster, name)
            draw(told, self._pictures / f"{name}.png")
        [expected] = given.rows.selectExpr(
            "count(*) as records", "sum(length(value)) as bytes", "count(distinct key) as keys"
        ).collect()
        must_be((told.records, told.values.total, told.keys.distinct), tuple(expected))
        must_be(sum(each.records for each in told.partitions), count)
        given.rows.unpersist()

    def _write(self, rows: DataFrame, topic: str) -> None:
        headers = "array(struct('id' as key, cast(id as binary) as value)) as headers"
        write = rows.selectExpr("key", "value", "timestamp", headers).write.format("laminar").mode("append")
        write.options(**self._cluster, topic=topic).save()


def with_faults(given: Given) -> DataFrame:
    """The rows without the lost and the late one; behind them the late one, and the doubled once more."""
    planted = given.planted
    rows = given.rows.where(~given.rows["id"].isin(planted.lost, planted.late))
    return rows.union(given.rows.where(given.rows["id"].isin(planted.late, planted.doubled)).coalesce(1))


def audited(told: Audited) -> dict[str, int]:
    return {each.kind: each.count for each in told.findings}


def compared(told: Compared) -> dict[str, int]:
    return {each.kind: each.count for each in told.differences}


def must_be(found: object, wanted: object) -> None:
    """SystemExit with both if they differ: no benchmark goes on with a wrong result."""
    if found != wanted:
        raise SystemExit(f"a check failed: {found}, and not {wanted}")


@contextmanager
def timed(what: str, records: int) -> Iterator[None]:
    """Prints how long it took, unless it failed."""
    began = time.perf_counter()
    yield
    took = time.perf_counter() - began
    print(f"{what:<40} {took:8.1f} s {records / took:12,.0f} records/s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
