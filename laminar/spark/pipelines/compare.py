"""Compare: find the differences of two topics, on one cluster or two, or of the replicas of one topic.

By *place*, the records at the same partition and offset are compared with each other. That is for replicas,
and for a copy that kept partitions and offsets. Each side computes a digest of each range of `CHUNK` offsets,
and only ranges whose digests differ are read again. So no record crosses the network between executors while
there is no difference.

By *key*, the records of a key are compared in their order, wherever they are. That is for a copy with other
partitions or offsets. If a key has several equal records, the first on one side is paired with the first on
the other, and so on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from laminar.spark.pipelines.findings import Finding, examples_of
from laminar.spark.pipelines.session import PLACE, RECORD, connected, persisted, read_topic

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

By = Literal["place", "key"]
KINDS: Final = ("missing", "extra", "different", "reordered")
# Offsets that one digest covers: 10 million records have 150 digests, and a range that differs is read
# quickly.
CHUNK: Final = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One side of a comparison: a topic on a cluster, which is given by options of the source.

    `replica` is the number of the replica to read; with None any replica is read. `until` has for each
    partition the offset at which to stop; with None all records are read.
    """

    cluster: Mapping[str, str]
    topic: str
    replica: int | None = None
    until: Mapping[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The result of a comparison. `records` and `others` are the numbers of records on either side."""

    records: int
    others: int
    differences: list[Finding]

    @property
    def equal(self) -> bool:
        """Whether there is no difference."""
        return not any(each.count for each in self.differences)


def compare(
    spark: SparkSession,
    one: Side,
    other: Side,
    *,
    by: By = "place",
    columns: Sequence[str] = RECORD,
) -> Compared:
    """Return the records of `other` that are missing, extra, different or reordered, compared with `one`.

    `columns` are the ones to compare, of key, value, headers, tag and timestamp: compare a copy that did not
    keep the times without timestamp. By place a record of `one` is *missing* if `other` has none at its
    partition and offset, and no record is *reordered*. Records that retention trimmed on one side are missing
    or extra. By key no record is *different*: one is missing and another is extra. *Reordered* is a record
    that comes after another of its key in `other` and before it in `one`.

    Raises:
        ValueError: for a column that cannot be compared, or another `by`. Spark's exceptions are passed on.
    """
    unknown = [name for name in columns if name not in RECORD]
    if unknown or not columns:
        raise ValueError(
            f"columns to compare must be of {', '.join(RECORD)}, not {unknown[0] if unknown else ''!r}"
        )
    if by not in ("place", "key"):
        raise ValueError(f"compare by place or by key, not by {by!r}")
    left, right = (_rows(spark, each, columns) for each in (one, other))
    return _by_place(left, right) if by == "place" else _by_key(left, right)


def replicas_of(cluster: Mapping[str, str], topic: str) -> tuple[int, dict[int, int]]:
    """Return the number of replicas of each partition of `topic`, and where the partitions end now.

    Raises:
        ValueError: as `common_count`.
    """
    from laminar.spark.read.options import parse

    options = parse({**cluster, "subscribe": topic}, streaming=False)
    here = connected(cluster)
    ends = here.run(here.positions(here.run(here.ids(options)), options.end))
    places = here.run(here.session.topic_map(topic)).places
    count = common_count([len(place.replicas) for place in places.values()], topic)
    return count, {partition: end for (_, partition), end in ends.items()}


def common_count(counts: Sequence[int], topic: str) -> int:
    """Return the number of replicas that every partition has.

    Raises:
        ValueError: partitions have one replica only, or some have more than others.
    """
    fewest, most = min(counts), max(counts)
    if fewest != most:
        raise ValueError(
            f"partitions of topic {topic} have {fewest} to {most} replicas now, as one is being replaced: "
            "try again when each has as many"
        )
    if fewest < 2:
        raise ValueError(f"topic {topic} has partitions with {fewest} replica: there is nothing to compare")
    return fewest


def compare_replicas(
    spark: SparkSession, cluster: Mapping[str, str], topic: str, *, columns: Sequence[str] = RECORD
) -> list[Compared]:
    """Compare each further replica of each partition with the first one, up to the present end offsets.

    Return one result for the second replica of each partition, one for the third, and so on: see `compare`.
    The nodes' own checks compare digests of stored batches; this function compares what clients read.

    Raises:
        ValueError: as `common_count`.
    """
    count, until = replicas_of(cluster, topic)
    sides = [Side(cluster=cluster, topic=topic, replica=number, until=until) for number in range(count)]
    return [compare(spark, sides[0], each, columns=columns) for each in sides[1:]]


def _rows(spark: SparkSession, side: Side, columns: Sequence[str]) -> DataFrame:
    """Return each record's place and key, and a hash of `columns`.

    The hash has 64 bits: it shows accidental differences, but not those made on purpose to go unnoticed.
    """
    from pyspark.sql import functions as f

    options: dict[str, str] = {}
    if side.replica is not None:
        options["replica"] = str(side.replica)
    if side.until is not None:
        ends = {str(partition): end for partition, end in side.until.items()}
        options["endingOffsets"] = json.dumps({side.topic: ends})
    needed = dict.fromkeys((*PLACE, "key", *columns))
    rows = read_topic(spark, side.cluster, side.topic, *needed, **options)
    # Spark's hash skips nulls: without the null flags, a null and a value could swap columns unnoticed.
    hashed = f.xxhash64(*(part for name in columns for part in (f.col(name).isNull(), f.col(name))))
    return rows.select(*PLACE, "key", hashed.alias("hash"))


def _by_place(left: DataFrame, right: DataFrame) -> Compared:
    from pyspark.sql import functions as f

    sides = [_digests(rows) for rows in (left, right)]
    digests = (
        sides[0]
        .alias("a")
        .join(sides[1].alias("b"), ["partition", "chunk"], "full_outer")
        .select(
            "partition",
            "chunk",
            f.coalesce("a.records", f.lit(0)).alias("records"),
            f.coalesce("b.records", f.lit(0)).alias("others"),
            (
                f.col("a.digest").eqNullSafe(f.col("b.digest"))
                & f.col("a.records").eqNullSafe(f.col("b.records"))
            ).alias("same"),
        )
    )
    with persisted(digests) as kept:
        [total] = kept.agg(
            f.sum("records").alias("records"),
            f.sum("others").alias("others"),
            f.count_if(~f.col("same")).alias("odd"),
        ).collect()
        counts = total["records"] or 0, total["others"] or 0
        if not total["odd"]:
            return _compared(counts, [])
        odd = f.broadcast(kept.where("not same").select("partition", "chunk"))
        suspects = [
            rows.withColumn("chunk", _chunk()).join(odd, ["partition", "chunk"], "left_semi").drop("chunk")
            for rows in (left, right)
        ]
        joined = suspects[0].alias("a").join(suspects[1].alias("b"), list(PLACE), "full_outer")
        pairs = joined.select(
            *PLACE,
            f.coalesce("a.key", "b.key").alias("key"),
            f.when(f.col("b.hash").isNull(), "missing")
            .when(f.col("a.hash").isNull(), "extra")
            .when(f.col("a.hash") != f.col("b.hash"), "different")
            .alias("kind"),
        )
        return _compared(counts, _differences(pairs.where("kind is not null")))


def _chunk() -> Column:
    from pyspark.sql import functions as f

    return f.floor(f.col("offset") / CHUNK)


def _digests(rows: DataFrame) -> DataFrame:
    """Return for each range of offsets its number of records, and a digest of their hashes and offsets.

    The digest is an exclusive or. Offsets in a range are distinct, so equal records do not cancel each other
    out.
    """
    from pyspark.sql import functions as f

    return rows.groupBy("partition", _chunk().alias("chunk")).agg(
        f.count("*").alias("records"), f.bit_xor(f.xxhash64("offset", "hash")).alias("digest")
    )


def _by_key(left: DataFrame, right: DataFrame) -> Compared:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    # `turn` numbers the equal records of a key, in order. Each key is in one partition; where a changed route
    # has moved it, the partition with the lower number counts as the older one.
    turns = Window.partitionBy("key", "hash").orderBy(*PLACE)
    sides = [rows.withColumn("turn", f.row_number().over(turns)) for rows in (left, right)]
    a, b = f.col("a.hash"), f.col("b.hash")
    joined = (
        sides[0]
        .alias("a")
        .join(
            sides[1].alias("b"),
            f.col("a.key").eqNullSafe(f.col("b.key")) & (a == b) & (f.col("a.turn") == f.col("b.turn")),
            "full_outer",
        )
        .select(
            f.coalesce("a.key", "b.key").alias("key"),
            *(f.col(f"{side}.{name}").alias(f"{side}_{name}") for side in "ab" for name in PLACE),
        )
    )
    before = (
        Window.partitionBy("key")
        .orderBy("b_partition", "b_offset")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    place = f.struct("a_partition", "a_offset")
    here = (f.col("a_partition").alias("partition"), f.col("a_offset").alias("offset"), "key", "kind")
    there = (f.col("b_partition").alias("partition"), f.col("b_offset").alias("offset"), "key", "kind")
    with persisted(joined) as kept:
        # Records without a key have no order across partitions.
        in_order = kept.where("key is not null and a_offset is not null and b_offset is not null")
        late = in_order.withColumn("last", f.max(place).over(before)).where(place < f.col("last"))
        wrong = (
            kept.where("b_offset is null")
            .withColumn("kind", f.lit("missing"))
            .select(*here)
            .union(kept.where("a_offset is null").withColumn("kind", f.lit("extra")).select(*there))
            .union(late.withColumn("kind", f.lit("reordered")).select(*here))
        )
        [total] = kept.agg(
            f.count("a_offset").alias("records"), f.count("b_offset").alias("others")
        ).collect()
        return _compared((total["records"], total["others"]), _differences(wrong))


def _compared(counts: tuple[int, int], found: list[Finding]) -> Compared:
    by_kind = {each.kind: each for each in found}
    nothing = (Finding(kind=kind, count=0, examples=[]) for kind in KINDS)
    return Compared(
        records=counts[0], others=counts[1], differences=[by_kind.get(each.kind, each) for each in nothing]
    )


def _differences(rows: DataFrame) -> list[Finding]:
    """Return one finding for each kind in `rows`, which have partition, offset, key and kind."""
    from pyspark.sql import functions as f

    counts = {row["kind"]: row["count"] for row in rows.groupBy("kind").count().collect()}
    return [
        Finding(
            kind=kind,
            count=count,
            examples=examples_of(rows.where(f.col("kind") == kind), (*PLACE, "key")),
        )
        for kind, count in counts.items()
    ]
