"""The module by which Spark finds the class of ``format("laminar")``.

Spark imports every top-level module named ``pyspark_*``, also in sessions that never use Laminar, and a
module that raises breaks them all. So nothing is loaded before the attribute is read.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "DefaultSource":
        raise AttributeError(f"module 'pyspark_laminar' has no attribute {name!r}")
    from laminar.spark.source import LaminarDataSource

    return LaminarDataSource
