"""Laminar as a source and a sink of Spark: ``format("laminar")``, in batches and in streams.

Spark finds the data source without registration, by the module `pyspark_laminar`. `configure` sets the Spark
settings that make it fast. This module loads neither pyspark nor pyarrow, because Spark's processes import it
before they need them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from laminar.spark.settings import SETTINGS, configure

if TYPE_CHECKING:
    from laminar.spark.lag import LagListener, QueryLag
    from laminar.spark.source import LaminarDataSource

__all__ = ["SETTINGS", "LagListener", "LaminarDataSource", "QueryLag", "configure"]

# Names that need pyspark, and the modules that hold them.
_LATER = {
    "LagListener": "laminar.spark.lag",
    "LaminarDataSource": "laminar.spark.source",
    "QueryLag": "laminar.spark.lag",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'laminar.spark' has no attribute {name!r}")
    found = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = found
    return found
