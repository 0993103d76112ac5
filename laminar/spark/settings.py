"""Settings of a Spark session that make this source fast, and `configure`, which sets them.

Each setting has its measured reason beside it. This module imports no pyspark: a builder is any object with
``config(name, value)``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final, Protocol, Self, TypeVar

# Spark's JVM and its Python workers over TCP stall for 40 ms a task (Nagle against delayed acks); over a
# Unix socket a task costs 2 ms. Spark 4.1 and later have the setting, off by default.
UNIX_SOCKET: Final = "spark.python.unix.domain.socket.enabled"

SETTINGS: Final[dict[str, str]] = {
    UNIX_SOCKET: "true",
    # From Spark to Python, Arrow batches of 1 to 4 MB are the fastest. Spark's default limit, 10,000 rows,
    # often makes larger ones.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(4 << 20),
    # Without this setting Spark refuses a source that takes over filters (option `pushdown`).
    "spark.sql.python.filterPushdown.enabled": "true",
}


class SessionBuilder(Protocol):
    """The part of ``SparkSession.Builder`` that is needed here."""

    def config(self, key: str, value: Any) -> Self:
        """Set `key` and return the builder."""
        ...


B = TypeVar("B", bound=SessionBuilder)

log = logging.getLogger(__name__)
_warned = False


def configure(builder: B) -> B:
    """Return `builder` with `SETTINGS`. Settings that the program makes afterwards take precedence.

    Use this function as ``spark = laminar.spark.configure(SparkSession.builder).getOrCreate()``.
    """
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    return builder


def warn_if_slow(environment: Mapping[str, str] = os.environ) -> None:
    """Log a warning, once per process, when Spark's JVM talks to Python over TCP.

    Python processes do not see the session's settings. Spark passes them the environment variable
    ``PYTHON_UNIX_DOMAIN_ENABLED``, from which they learn how to connect.
    """
    global _warned
    if not _warned and environment.get("PYTHON_UNIX_DOMAIN_ENABLED", "").lower() != "true":
        _warned = True
        log.warning(
            "%s is off: each task waits 40 ms for TCP; laminar.spark.configure(builder) turns it on",
            UNIX_SOCKET,
        )
