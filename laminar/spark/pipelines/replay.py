"""Replay: write records of an archive, or of a time range of a topic, into another topic, each key in order.

The job is cut into slices: a slice has the same number of offsets of each partition, and is one batch of a
sink that only this job uses. So each slice is written whole and once. The first run determines what is
replayed and stores it in the job's checkpoint before it writes anything. A job that died and is started again
continues after the last committed slice. A job that is done does nothing, even if the source has grown.

In a slice each partition of the source is read by one task, or in order by tasks with rising numbers. The
sink publishes rows in the order of tasks and, within a task, in the order of its rows. So the records of a
key, which are in one partition, keep their order.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from laminar.spark.pipelines.archive import read_archive
from laminar.spark.pipelines.session import PLACE, RECORD, connected, read_topic

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The result of a run: records and slices written, slices written before, and the job's sink."""

    sink: str
    records: int
    slices: int
    slices_before: int


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of offsets of one partition of the source, the end exclusive."""

    partition: int
    start: int
    end: int

    def slice(self, number: int, records: int) -> Extent:
        """Return the part of this range in slice `number`, if slices have `records` offsets; may be empty."""
        start = min(self.start + number * records, self.end)
        return Extent(self.partition, start, min(start + records, self.end))


def replay(
    spark: SparkSession,
    cluster: Mapping[str, str],
    to: str,
    *,
    checkpoint: str,
    archive: str | None = None,
    topic: str | None = None,
    since_ms: int | None = None,
    until_ms: int | None = None,
    keep_partitions: bool = False,
    slice_records: int = 1_000_000,
    progress: Callable[[int, int], None] = lambda done, slices: None,
) -> Replayed:
    """Write what `archive` (a folder) or `topic` holds into the topic `to`.

    `since_ms` and `until_ms`, epoch milliseconds, bound the timestamps of what is replayed: in each partition
    it is all from the first to the last record with a timestamp from `since_ms` to `until_ms - 1`. Records
    between these are replayed too, whatever their timestamps. Keys choose the partition, unless
    `keep_partitions`. A slice has up to `slice_records` of each partition. `progress` is called after each
    slice with the number of slices done and of slices in all.

    `checkpoint` is a folder as Spark names it, one for each job. The first run stores there which offsets are
    replayed. Later runs ignore `since_ms` and `until_ms`, and what was appended since.

    Raises:
        ValueError: when the checkpoint is that of a job with other arguments, or unless exactly one of
            `archive` and `topic` is given. Spark's exceptions are passed on.
    """
    if (archive is None) is (topic is None):
        raise ValueError("give either an archive or a topic to replay")
    rows = (
        read_archive(spark, archive)
        if archive is not None
        else read_topic(spark, cluster, topic or "", *PLACE, *RECORD)
    )
    job = {
        "archive": archive,
        "topic": topic,
        "to": to,
        "slice_records": slice_records,
        "keep_partitions": keep_partitions,
    }
    plan = _saved_plan(spark, checkpoint)
    if plan is None:
        extents = _extents(rows, since_ms=since_ms, until_ms=until_ms)
        found = [(each.partition, each.start, each.end) for each in extents]
        plan = {"job": job, "sink": f"replay-{uuid.uuid4().hex}", "extents": found}
        _save_plan(spark, checkpoint, plan)
    odd = [name for name, value in job.items() if plan["job"].get(name) != value]
    if odd:
        raise ValueError(
            f"checkpoint {checkpoint} belongs to a replay with {odd[0]} {plan['job'].get(odd[0])!r},"
            f" not {job[odd[0]]!r}: use another checkpoint for another replay"
        )
    extents = [Extent(*each) for each in plan["extents"]]
    sink = str(plan["sink"])
    slices = max((-(-(each.end - each.start) // slice_records) for each in extents), default=0)
    first = _committed(cluster, sink) + 1
    records = 0
    for number in range(first, slices):
        parts = [each.slice(number, slice_records) for each in extents]
        parts = [each for each in parts if each.start < each.end]
        if topic is not None:
            ranges = {
                option: json.dumps({topic: {str(e.partition): getattr(e, side) for e in parts}})
                for option, side in (("startingOffsets", "start"), ("endingOffsets", "end"))
            }
            assigned = {"assign": json.dumps({topic: [e.partition for e in parts]})}
            chosen = _read_ranges(spark, cluster, {**ranges, **assigned})
        else:
            chosen = _in_order(rows, parts)
        keep = [*RECORD, "partition"] if keep_partitions else list(RECORD)
        chosen.select(*keep).write.format("laminar").options(**cluster).options(
            topic=to, txnAppId=sink, txnVersion=str(number)
        ).mode("append").save()
        records += sum(each.end - each.start for each in parts)
        progress(number + 1, slices)
    return Replayed(
        sink=sink, records=records, slices=max(0, slices - first), slices_before=min(first, slices)
    )


def _saved_plan(spark: SparkSession, checkpoint: str) -> dict[str, Any] | None:
    """Return the plan that the first run stored in the job's checkpoint; None if this is the first."""
    from pyspark.errors import AnalysisException

    try:
        rows = spark.read.text(_plan(checkpoint), wholetext=True).collect()
    except AnalysisException as error:
        if "PATH_NOT_FOUND" not in str(error):
            raise
        return None
    found: dict[str, Any] | None = json.loads(rows[0][0]) if rows else None
    return found


def _save_plan(spark: SparkSession, checkpoint: str, plan: Mapping[str, Any]) -> None:
    # One file, which Spark renames when it is complete. A run that died here leaves a folder without that
    # file, which `_saved_plan` takes for a first run.
    rows = spark.createDataFrame([(json.dumps(plan),)], "value string").coalesce(1)
    rows.write.mode("overwrite").text(_plan(checkpoint))


def _plan(checkpoint: str) -> str:
    return f"{checkpoint.rstrip('/')}/replay"


def _extents(rows: DataFrame, *, since_ms: int | None, until_ms: int | None) -> list[Extent]:
    from pyspark.sql import functions as f

    if since_ms is not None:
        rows = rows.where(f.col("timestamp") >= f.timestamp_millis(f.lit(since_ms)))
    if until_ms is not None:
        rows = rows.where(f.col("timestamp") < f.timestamp_millis(f.lit(until_ms)))
    found = rows.groupBy("partition").agg(f.min("offset").alias("start"), f.max("offset").alias("last"))
    return [
        Extent(row["partition"], row["start"], row["last"] + 1)
        for row in found.orderBy("partition").collect()
    ]


def _read_ranges(spark: SparkSession, cluster: Mapping[str, str], ranges: Mapping[str, str]) -> DataFrame:
    """Return ranges of offsets of a topic, in order; a range of many bytes has several tasks."""
    options = {**cluster, **ranges, "columns": ",".join((*PLACE, *RECORD)), "largeRecords": "fetch"}
    return spark.read.format("laminar").options(**options).load()


def _in_order(rows: DataFrame, parts: list[Extent]) -> DataFrame:
    """Return these ranges of an archive: each partition in one task, sorted by offset."""
    from pyspark.sql import functions as f

    chosen = f.lit(False)
    for each in parts:
        place = (f.col("partition") == each.partition) & f.col("offset").between(each.start, each.end - 1)
        chosen = chosen | place
    return rows.where(chosen).repartition(len(parts), "partition").sortWithinPartitions("partition", "offset")


def _committed(cluster: Mapping[str, str], sink: str) -> int:
    """Return the number of the last slice that was written; -1 before the first."""
    from laminar.spark.write.task_stager import sink_info

    here = connected(cluster)
    committed = here.run(sink_info(here, sink)).committed
    return -1 if committed is None else committed
