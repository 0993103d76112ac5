"""What Spark looks for at the top level: the class behind ``format("laminar")``.

Spark imports every module named ``pyspark_*``, in sessions that never read from Laminar too, and a
module that raises breaks them all. So nothing is loaded until the attribute is asked for.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "DefaultSource":
        raise AttributeError(f"module 'pyspark_laminar' has no attribute {name!r}")
    from laminar.spark.source import LaminarDataSource

    return LaminarDataSource
