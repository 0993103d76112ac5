"""Findings of *audit* and *compare*: a kind of fault, the number of records, and the first few of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from laminar.spark.pipelines.session import PLACE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EXAMPLES: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Records with one kind of fault: how many, and the first few with their places."""

    kind: str
    count: int
    examples: list[dict[str, Any]]


def examples_of(rows: DataFrame, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Return these columns of the first `EXAMPLES` of `rows` by place, as dicts without the nulls."""
    from pyspark.sql import functions as f

    first = rows.withColumn("key", f.col("key").cast("string")).orderBy(*PLACE, *columns)
    return [
        {name: value for name, value in row.asDict().items() if value is not None}
        for row in first.select(*columns).limit(EXAMPLES).collect()
    ]
