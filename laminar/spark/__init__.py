"""Laminar as a source of Spark: ``spark.readStream.format("laminar")`` and ``spark.read.format("laminar")``.

Spark finds the source by itself (`pyspark_laminar`); `configure` sets what makes it fast. This
module loads neither pyspark nor pyarrow: Spark's processes import it before they need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from laminar.spark.settings import SETTINGS, configure

if TYPE_CHECKING:
    from laminar.spark.source import LaminarDataSource

__all__ = ["SETTINGS", "LaminarDataSource", "configure"]


def __getattr__(name: str) -> Any:
    if name != "LaminarDataSource":
        raise AttributeError(f"module 'laminar.spark' has no attribute {name!r}")
    from laminar.spark.source import LaminarDataSource

    globals()[name] = LaminarDataSource
    return LaminarDataSource
