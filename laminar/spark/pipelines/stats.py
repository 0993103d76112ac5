"""Stats: rates, sizes, keys, partitions and tags of a topic, and how they are skewed.

The job reads the same range of offsets twice. The first read takes only times and tags, a small part of a
topic, and finds the time range over which rates are counted. The second read counts each record in two
groups: that of its key, and that of its partition, time and size. So values pass through Spark's socket once.
What reaches the driver is bounded for any topic: some hundred buckets of time for each partition, some
thousand classes of sizes (`size_histogram`), the first few keys and tags.

All counts, sums and extremes, and the keys and tags at the top, are exact. Percentiles of sizes, and the
frequencies of further keys, are exact below 128 and within 1.6 % above.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from laminar.spark.pipelines.buckets import DAY_MS, Grid, grid_of
from laminar.spark.pipelines.session import connected, persisted, read_topic
from laminar.spark.pipelines.size_histogram import (
    Class,
    bins,
    class_of,
    of_greatest,
    percentile,
    sum_of_greatest,
)
from laminar.spark.pipelines.stats_values import Key, Keys, Load, Rank, Rates, Series, Sizes, Stats, Tag, Tags

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TOP = 20
# A few records with times far from all others, as of a wrong clock, must not make the buckets so wide that
# all others are in one. Up to this share of the records at either end may be *stray*; they are left out of
# the buckets if the range of all times is more than `_FAR` times the range of the others (at least a day).
_STRAY_SHARE = 0.01
_FAR = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Survey:
    """The result of the first read.

    `first_ms` and `last_ms` are the extremes of all times, `core_first_ms` and `core_last_ms` those without
    the days of stray records at either end.
    """

    first_ms: int
    last_ms: int
    core_first_ms: int
    core_last_ms: int
    tags: Tags

    @property
    def grid(self) -> Grid:
        far = _FAR * max(self.core_last_ms - self.core_first_ms, DAY_MS)
        if self.last_ms - self.first_ms > far:
            return grid_of(self.core_first_ms, self.core_last_ms)
        return grid_of(self.first_ms, self.last_ms)


def stats(spark: SparkSession, cluster: Mapping[str, str], topic: str, *, top: int = TOP) -> Stats:
    """Return the stats of what is committed in `topic` now, with the `top` most frequent keys and tags.

    Raises:
        NotFound: when there is no such topic.
        ValueError: when `top` is below 1. Spark's exceptions are passed on.
    """
    if top < 1:
        raise ValueError(f"top must be at least 1, not {top}")
    starts, ends = _extent(cluster, topic)
    numbers = sorted(number for _, number in ends)
    if starts == ends:
        return _assemble(topic, numbers, None, _Counted())
    # Both reads are of the same records, even if others are appended meanwhile.
    given = {
        option: json.dumps({topic: {str(number): offset for (_, number), offset in places.items()}})
        for option, places in (("startingOffsets", starts), ("endingOffsets", ends))
    }
    times = read_topic(spark, cluster, topic, "timestamp", "tag", **given)
    with persisted(_by_day(times)) as days:
        survey = _survey(days, top)
    # Values larger than a batch are only counted, not fetched.
    given["largeRecords"] = "null"
    rows = read_topic(spark, cluster, topic, "partition", "key", "value", "timestamp", **given)
    with persisted(_grouped(rows, survey.grid)) as grouped:
        counted = _counted(grouped, top)
    return _assemble(topic, numbers, survey, counted)


def _extent(cluster: Mapping[str, str], topic: str) -> tuple[dict[Any, int], dict[Any, int]]:
    """Return the first offsets and the end offsets, by (topic, partition)."""
    from laminar.spark.read.offsets import AT_EARLIEST, AT_LATEST
    from laminar.spark.read.options import parse

    options = parse({**cluster, "subscribe": topic}, streaming=False)
    here = connected(cluster)
    ids = here.run(here.ids(options))
    ends = here.run(here.positions(ids, AT_LATEST))
    return here.run(here.positions(ids, AT_EARLIEST)), ends


def _by_day(rows: DataFrame) -> DataFrame:
    """Return the number of records, and the first and last time, by tag and day."""
    from pyspark.sql import functions as f

    time = f.unix_millis("timestamp")
    timed = rows.select("tag", time.alias("ms"), f.floor(time / DAY_MS).alias("day"))
    return timed.groupBy("tag", "day").agg(
        f.count("*").alias("records"), f.min("ms").alias("first"), f.max("ms").alias("last")
    )


def _survey(days: DataFrame, top: int) -> _Survey:
    """Return the result of the first read, from the rows of `_by_day`."""
    from pyspark.sql import functions as f

    shares = f.array(f.lit(_STRAY_SHARE), f.lit(1 - _STRAY_SHARE))
    whole = days.agg(
        f.sum("records").alias("records"),
        f.min("first").alias("first"),
        f.max("last").alias("last"),
        f.percentile("day", shares, f.col("records")).alias("days"),
    ).collect()[0]
    low, high = math.floor(whole["days"][0]), math.ceil(whole["days"][1])
    core = (
        days.where(f.col("day").between(low, high))
        .agg(f.sum("records").alias("records"), f.min("first").alias("first"), f.max("last").alias("last"))
        .collect()[0]
    )
    # With few records a percentile is between two of them, and leaves out more than intended.
    if (core["records"] or 0) < (1 - 2 * _STRAY_SHARE) * whole["records"]:
        core = whole
    by_tag = days.groupBy("tag").agg(f.sum("records").alias("records"))
    tagged = by_tag.agg(
        f.count("tag").alias("distinct"),
        f.sum(f.when(f.col("tag").isNull(), f.col("records"))).alias("none"),
    ).collect()[0]
    most = by_tag.where("tag is not null").orderBy(f.desc("records"), "tag").limit(top).collect()
    return _Survey(
        first_ms=whole["first"],
        last_ms=whole["last"],
        core_first_ms=core["first"],
        core_last_ms=core["last"],
        tags=Tags(
            distinct=tagged["distinct"],
            untagged_records=tagged["none"] or 0,
            top=[
                Tag(tag=row["tag"], records=row["records"], share=row["records"] / whole["records"])
                for row in most
            ],
        ),
    )


def _grouped(rows: DataFrame, grid: Grid) -> DataFrame:
    """Return the records grouped by key, and also grouped by partition, bucket of time and class of size.

    Both kinds of groups are rows of one DataFrame. Those by key have null for the partition.
    """
    from pyspark.sql import functions as f

    size = f.length("value")
    shaped = rows.select(
        "key",
        "partition",
        f.col("partition").alias("home"),
        f.unix_millis("timestamp").alias("ms"),
        size.alias("size"),
        (f.coalesce(f.length("key"), f.lit(0)) + f.coalesce(size, f.lit(0))).cast("bigint").alias("bytes"),
    ).select("*", grid.bucket_of(f.col("ms")).alias("bucket"), class_of(f.col("size")).alias("class"))
    place = ("partition", "bucket", "class")
    return shaped.groupingSets([["key"], list(place)], "key", *place).agg(
        f.count("*").alias("records"),
        f.sum("bytes").alias("bytes"),
        f.sum(f.col("size").cast("bigint")).alias("value_bytes"),
        f.min("size").alias("smallest"),
        f.max("size").alias("largest"),
        f.min("ms").alias("first"),
        f.max("ms").alias("last"),
        f.min("home").alias("low_home"),
        f.max("home").alias("high_home"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counted:
    """The result of the second read. Classes are in rising order.

    `places`: a Spark row for each partition and bucket; `values`: the sizes of values; `large`: the number of
    values stored apart; `key_bytes`: the sizes of the keys of all records; `keyless`: the number of records
    without a key; `in_several`: the number of keys in several partitions; `frequencies`: the numbers of
    records of the keys; `top`: a Spark row for each of the most frequent keys.
    """

    places: Sequence[Any] = ()
    values: Sequence[Class] = ()
    large: int = 0
    key_bytes: Sequence[Class] = ()
    keyless: int = 0
    in_several: int = 0
    frequencies: Sequence[Class] = ()
    top: Sequence[Any] = ()


def _counted(grouped: DataFrame, top: int) -> _Counted:
    from pyspark.sql import functions as f

    by_place, by_key = grouped.where("partition is not null"), grouped.where("partition is null")
    places = by_place.groupBy("partition", "bucket").agg(
        f.sum("records").alias("records"),
        f.sum("bytes").alias("bytes"),
        f.min("first").alias("first"),
        f.max("last").alias("last"),
    )
    values = by_place.groupBy("class").agg(
        f.sum("records").alias("count"),
        f.sum("value_bytes").alias("total"),
        f.min("smallest").alias("low"),
        f.max("largest").alias("high"),
    )
    measured = by_key.withColumn("length", f.length("key").cast("bigint"))
    key_bytes = measured.groupBy(class_of(f.col("length")).alias("class")).agg(
        f.sum("records").alias("count"),
        f.sum(f.col("length") * f.col("records")).alias("total"),
        f.min("length").alias("low"),
        f.max("length").alias("high"),
        f.count_if(f.col("low_home") < f.col("high_home")).alias("several"),
    )
    keyed = by_key.where("key is not null")
    frequencies = keyed.groupBy(class_of(f.col("records")).alias("class")).agg(
        f.count("*").alias("count"),
        f.sum("records").alias("total"),
        f.min("records").alias("low"),
        f.max("records").alias("high"),
    )
    value_rows, key_rows = values.orderBy("class").collect(), key_bytes.orderBy("class").collect()
    return _Counted(
        places=places.collect(),
        values=_classes(value_rows),
        large=sum(row["count"] for row in value_rows if row["class"] is None),
        key_bytes=_classes(key_rows),
        keyless=sum(row["count"] for row in key_rows if row["class"] is None),
        in_several=sum(row["several"] for row in key_rows if row["class"] is not None),
        frequencies=_classes(frequencies.orderBy("class").collect()),
        top=keyed.orderBy(f.desc("records"), "key").limit(top).collect(),
    )


def _classes(rows: Sequence[Any]) -> list[Class]:
    return [
        Class(row["count"], row["total"], row["low"], row["high"]) for row in rows if row["class"] is not None
    ]


def _assemble(topic: str, numbers: Sequence[int], survey: _Survey | None, counted: _Counted) -> Stats:
    """Return the stats, from the results of both reads. `numbers` are all partitions, the empty ones too.

    `survey` is None for a topic without records.
    """
    records = sum(row["records"] for row in counted.places)
    partitions = [
        _load(number, [row for row in counted.places if row["partition"] == number], records)
        for number in numbers
    ]
    return Stats(
        topic=topic,
        records=records,
        bytes=sum(each.bytes for each in partitions),
        first_ms=survey.first_ms if survey else None,
        last_ms=survey.last_ms if survey else None,
        values=_sizes(counted.values, absent=counted.large),
        key_sizes=_sizes(counted.key_bytes, absent=counted.keyless),
        rates=_rates(survey, numbers, counted.places) if survey else None,
        keys=_keys(counted),
        partitions=partitions,
        largest_over_mean=(
            max(each.records for each in partitions) * len(partitions) / records if records else None
        ),
        tags=survey.tags if survey else Tags(distinct=0, untagged_records=0, top=[]),
    )


def _load(number: int, rows: Sequence[Any], records: int) -> Load:
    mine = sum(row["records"] for row in rows)
    return Load(
        partition=number,
        records=mine,
        bytes=sum(row["bytes"] for row in rows),
        share=mine / records if records else 0.0,
        first_ms=min((row["first"] for row in rows), default=None),
        last_ms=max((row["last"] for row in rows), default=None),
    )


def _sizes(classes: Sequence[Class], *, absent: int) -> Sizes:
    count, total = sum(each.count for each in classes), sum(each.total for each in classes)
    if not count:
        return Sizes(count=0, absent=absent, total=0)
    return Sizes(
        count=count,
        absent=absent,
        total=total,
        mean=total / count,
        min=classes[0].low,
        p50=percentile(classes, 0.5),
        p90=percentile(classes, 0.9),
        p99=percentile(classes, 0.99),
        max=classes[-1].high,
        histogram=bins(classes),
    )


def _rates(survey: _Survey, numbers: Sequence[int], rows: Sequence[Any]) -> Rates:
    grid = survey.grid
    series = {
        number: Series(partition=number, records=[0] * grid.count, bytes=[0] * grid.count)
        for number in numbers
    }
    outside = {-1: 0, grid.count: 0}
    inside = []
    for row in rows:
        bucket = row["bucket"]
        if bucket in outside:
            outside[bucket] += row["records"]
            continue
        inside.append(row)
        series[row["partition"]].records[bucket] = row["records"]
        series[row["partition"]].bytes[bucket] = row["bytes"]
    totals = [sum(column) for column in zip(*(each.records for each in series.values()), strict=True)]
    peak = max(totals)
    is_instant = len({row[end] for row in inside for end in ("first", "last")}) == 1
    lasted_s = None if is_instant else grid.count * grid.width_ms / 1000
    return Rates(
        since_ms=grid.since_ms,
        width_ms=grid.width_ms,
        buckets=grid.count,
        before=outside[-1],
        after=outside[grid.count],
        mean_per_s=sum(totals) / lasted_s if lasted_s else None,
        mean_bytes_per_s=sum(row["bytes"] for row in inside) / lasted_s if lasted_s else None,
        peak_per_s=None if is_instant else peak * 1000 / grid.width_ms,
        peak_ms=grid.since_ms + totals.index(peak) * grid.width_ms,
        partitions=list(series.values()),
    )


def _keys(counted: _Counted) -> Keys:
    frequencies = counted.frequencies
    distinct, keyed = sum(each.count for each in frequencies), sum(each.total for each in frequencies)
    first_percent = math.ceil(distinct / 100)
    ranks = [1 << power for power in range(distinct.bit_length())]
    if distinct and ranks[-1] < distinct:
        ranks.append(distinct)
    # The counts of the top keys, which have the first ranks, are exact; those of other ranks come from
    # classes.
    first = [row["records"] for row in counted.top]
    return Keys(
        distinct=distinct,
        keyless_records=counted.keyless,
        in_several_partitions=counted.in_several,
        top_percent_keys=first_percent,
        top_percent_share=_held(first, frequencies, first_percent) / keyed if keyed else None,
        top=[
            Key(
                key=bytes(row["key"]).decode(errors="backslashreplace"),
                records=row["records"],
                share=row["records"] / keyed,
                bytes=row["bytes"],
                partition=row["low_home"] if row["low_home"] == row["high_home"] else None,
                first_ms=row["first"],
                last_ms=row["last"],
            )
            for row in counted.top
        ],
        ranks=[
            Rank(
                rank=rank,
                records=first[rank - 1] if rank <= len(first) else of_greatest(frequencies, rank),
                share=_held(first, frequencies, rank) / keyed,
            )
            for rank in ranks
        ],
    )


def _held(first: Sequence[int], frequencies: Sequence[Class], rank: int) -> int:
    """Return the number of records that the keys up to this rank have together.

    `first` has the exact counts of the first ranks.
    """
    return sum(first[:rank]) if rank <= len(first) else sum_of_greatest(frequencies, rank)
