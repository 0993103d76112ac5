"""Audit: compare what producers claim to have written with what a topic holds.

It finds records that are lost, doubled, reordered or unclaimed. Producers write a *claim* for each record
that they have a receipt for: a row with an `id` that the record contains too and, where order matters, an
`ordinal` that rises with each record of one key. Claims and records are joined by id in Spark, so the job
scales as Spark's joins do; the driver holds no records but the examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from laminar.spark.pipelines.findings import Finding, examples_of
from laminar.spark.pipelines.session import PLACE, persisted, read_topic

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

KINDS = ("lost", "doubled", "reordered", "unclaimed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """The findings of an audit, one for each of `KINDS`, with the numbers of claims and of records.

    An unclaimed record is no fault by itself: a producer that got no receipt may have written it.
    """

    claims: int
    records: int
    findings: list[Finding]

    @property
    def sound(self) -> bool:
        """Whether no record is lost, doubled or reordered."""
        return not any(each.count for each in self.findings if each.kind != "unclaimed")


def read_claims(spark: SparkSession, path: str) -> DataFrame:
    """Return the claims in a folder or file of Parquet, or of JSON lines (``.json``, ``.jsonl``).

    Raises:
        ValueError: when there is no column `id`.
    """
    suffix = path.rstrip("/").rpartition(".")[2].lower()
    claims = spark.read.json(path) if suffix in ("json", "jsonl") else spark.read.parquet(path)
    if "id" not in claims.columns:
        raise ValueError(f"{path}: claims need a column id, and may have ordinal; found {claims.columns}")
    return claims


def identity(given: str) -> Column:
    """Return the column that holds a record's id, as text.

    `given` is ``key``, ``value``, ``header:NAME`` (the first header of that name) or ``json:$.path`` (a path
    in the value). A record without it has null.

    Raises:
        ValueError: for any other text.
    """
    from pyspark.sql import functions as f

    kind, _, name = given.partition(":")
    if given in ("key", "value"):
        return f.col(given).cast("string")
    if kind == "header" and name:
        named = f.filter("headers", lambda each: each["key"] == name)
        return f.get(named, f.lit(0))["value"].cast("string")
    if kind == "json" and name.startswith("$"):
        return f.get_json_object(f.col("value").cast("string"), name)
    raise ValueError(f"an id must be key, value, header:NAME or json:$.path, not {given!r}")


def audit(
    spark: SparkSession, cluster: Mapping[str, str], topic: str, claims: DataFrame, *, id: str = "value"
) -> Audited:
    """Compare `claims` (column `id`, and `ordinal` if there is one) with what is committed in `topic`.

    `id` says where a record has its id: see `identity`. Lost: claimed and not in the topic. Doubled: an id
    that more than one record has. Reordered: a record that comes after a record of its key and partition with
    a higher ordinal; of an id that is doubled the first record counts. Unclaimed: a record whose id no claim
    has, or that has no id. Spark's exceptions are passed on.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    held = read_topic(spark, cluster, topic, *PLACE, "key", "value", "headers")
    held = held.select(*PLACE, "key", identity(id).alias("id"))
    ordered = "ordinal" in claims.columns
    said = claims.select(
        f.col("id").cast("string").alias("id"),
        (f.col("ordinal").cast("bigint") if ordered else f.lit(None).cast("bigint")).alias("ordinal"),
    ).dropDuplicates(["id"])
    copies = held.groupBy("id").agg(
        f.count("*").alias("copies"), f.min(f.struct("partition", "offset", "key")).alias("first")
    )
    joined = (
        said.withColumn("claimed", f.lit(True))
        .join(copies, "id", "full_outer")
        .select("id", "ordinal", "claimed", f.coalesce("copies", f.lit(0)).alias("copies"), "first.*")
    )
    before = (
        Window.partitionBy("partition", "key").orderBy("offset").rowsBetween(Window.unboundedPreceding, -1)
    )
    with persisted(joined) as kept:
        in_place = kept.where("claimed and copies > 0 and ordinal is not null")
        in_place = in_place.withColumn("highest", f.max("ordinal").over(before))
        wrong = {
            "lost": kept.where("copies = 0"),
            "doubled": kept.where("copies > 1 and id is not null"),
            "reordered": in_place.where("ordinal < highest"),
            "unclaimed": kept.where("claimed is null"),
        }
        totals = kept.agg(f.count("claimed").alias("claims"), f.sum("copies").alias("records")).collect()[0]
        findings = [_finding(kind, wrong[kind]) for kind in KINDS]
    return Audited(claims=totals["claims"], records=totals["records"] or 0, findings=findings)


def _finding(kind: str, rows: DataFrame) -> Finding:
    from pyspark.sql import functions as f

    shown = [
        name
        for name in ("id", "key", "partition", "offset", "copies", "ordinal", "highest")
        if name in rows.columns
    ]
    count = rows.agg(f.sum("copies") if kind == "unclaimed" else f.count("*")).collect()[0][0] or 0
    if not count:
        return Finding(kind=kind, count=0, examples=[])
    return Finding(kind=kind, count=int(count), examples=examples_of(rows, shown))
