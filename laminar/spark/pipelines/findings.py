"""What is wrong with records, as *audit* and *compare* tell it: a kind, how many, the first few of them."""

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
    """Records of one kind: how many, and the first few of them, what they are and where they stand."""

    kind: str
    count: int
    examples: list[dict[str, Any]]


def examples_of(rows: DataFrame, columns: Sequence[str]) -> list[dict[str, Any]]:
    """The first of `rows` by place: these columns, without what is null."""
    from pyspark.sql import functions as f

    first = rows.withColumn("key", f.col("key").cast("string")).orderBy(*PLACE, *columns)
    return [
        {name: value for name, value in row.asDict().items() if value is not None}
        for row in first.select(*columns).limit(EXAMPLES).collect()
    ]
