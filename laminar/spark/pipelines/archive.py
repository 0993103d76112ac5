"""Archive: a topic into Parquet by day, each record once; run again, it goes on where it was.

A streaming query of Spark's that ends when all is read (``availableNow``). Its checkpoint lies in the folder
it writes to, so nothing else need be kept; Spark's file sink takes each micro-batch once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from laminar.spark.pipelines.session import PLACE, RECORD

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHECKPOINT = "_checkpoint"
POLL_S = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What an archive holds of one partition; `missing` and `doubled` are 0, or it is damaged."""

    partition: int
    records: int
    first_offset: int
    last_offset: int
    missing: int
    doubled: int


def archive(
    spark: SparkSession,
    cluster: Mapping[str, str],
    topic: str,
    to: str,
    *,
    batch_records: int = 5_000_000,
    progress: Callable[[int], None] = lambda records: None,
) -> int:
    """Write what is committed in `topic` now, and not in the archive yet; returns how many records.

    `to` is a folder as Spark names it (a path, ``hdfs://``, ``s3a://``), one for each topic. `progress` is
    told the records written so far. Raises what Spark raises.
    """
    from pyspark.sql import functions as f

    rows = (
        spark.readStream.format("laminar")
        .options(**cluster)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", str(batch_records))
        .option("columns", ",".join((*PLACE, *RECORD)))
        .option("largeRecords", "fetch")
        .load()
    )
    query = (
        rows.withColumn("date", f.to_date("timestamp"))
        .writeStream.format("parquet")
        .partitionBy("date")
        .option("checkpointLocation", f"{to.rstrip('/')}/{CHECKPOINT}")
        .trigger(availableNow=True)
        .start(to)
    )
    written: dict[int, int] = {}
    try:
        while True:
            ended = query.awaitTermination(POLL_S)
            for each in query.recentProgress:
                written[each["batchId"]] = each["numInputRows"]
            progress(sum(written.values()))
            if ended:
                return sum(written.values())
    finally:
        query.stop()


def read_archive(spark: SparkSession, folder: str) -> DataFrame:
    """The records of an archive, with the columns of the source that it holds and their `date`."""
    return spark.read.parquet(folder)


def check(spark: SparkSession, folder: str) -> list[Held]:
    """What the archive holds, by partition: offsets are dense, so a gap or a double is damage.

    Reads one column of numbers. Where retention took the oldest records first, they are not missing.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as f

    try:
        held = read_archive(spark, folder)
    except AnalysisException:
        return []  # of an empty topic nothing was written: there is not even a schema
    rows: list[Any] = (
        held.groupBy("partition")
        .agg(
            f.count("*").alias("records"),
            f.count_distinct("offset").alias("distinct"),
            f.min("offset").alias("first"),
            f.max("offset").alias("last"),
        )
        .orderBy("partition")
        .collect()
    )
    return [
        Held(
            partition=row["partition"],
            records=row["records"],
            first_offset=row["first"],
            last_offset=row["last"],
            missing=row["last"] - row["first"] + 1 - row["distinct"],
            doubled=row["records"] - row["distinct"],
        )
        for row in rows
    ]
