"""Archive: write a topic to Parquet by day, each record once. The next run continues where the last ended.

The job is a streaming query that ends when it has read all that was committed at its start
(``availableNow``). Its checkpoint is in the folder that it writes to, so nothing else must be kept. Spark's
file sink takes each micro-batch once.
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
    """The records of one partition in an archive, which is damaged unless `missing` and `doubled` are 0.

    `missing` counts the offsets between the first and the last that no record has, `doubled` the records
    whose offset another record has.
    """

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
    """Write the records that are committed now and not yet in the archive; return their number.

    `to` is a folder as Spark names it (a path, ``hdfs://``, ``s3a://``), one for each topic. A micro-batch
    has about `batch_records` records. `progress` is called about once a second with the number of records
    that this run has written. Spark's exceptions are passed on.
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
    """Return the records of an archive, with the columns partition, offset, those of `RECORD`, and date."""
    return spark.read.parquet(folder)


def check(spark: SparkSession, folder: str) -> list[Held]:
    """Return for each partition what the archive holds of it; nothing if the archive has no records.

    A partition's offsets have no gaps, so a gap or a repeated offset is damage. Only the columns partition
    and offset are read. Records that retention trimmed before the first run do not count as missing.
    """
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as f

    try:
        held = read_archive(spark, folder)
    except AnalysisException:
        return []  # for an empty topic nothing was written, so there is no schema
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
