"""What a Spark session must be told for this source to be fast, and a helper that tells it.

The measured reasons stand beside each setting. It imports no pyspark: a builder is anything with
``config(name, value)``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final, Protocol, Self, TypeVar

# Spark's JVM and its Python workers over TCP stall for 40 ms a task (Nagle against delayed acks); over a
# Unix socket a task costs 2 ms. Spark 4.1 and later have it, switched off.
UNIX_SOCKET: Final = "spark.python.unix.domain.socket.enabled"

SETTINGS: Final[dict[str, str]] = {
    UNIX_SOCKET: "true",
    # From Spark to Python, Arrow batches of 1 to 4 MB are the fastest; 10,000 rows are often more.
    "spark.sql.execution.arrow.maxBytesPerBatch": str(4 << 20),
    # Without it Spark refuses a source that would take over filters: the option `pushdown`.
    "spark.sql.python.filterPushdown.enabled": "true",
}


class Builder(Protocol):
    """The part of ``SparkSession.Builder`` that is needed here."""

    def config(self, key: str, value: Any) -> Self: ...


B = TypeVar("B", bound=Builder)

log = logging.getLogger(__name__)
_warned = False


def configure(builder: B) -> B:
    """`builder` with `SETTINGS`; call it before ``getOrCreate``, and set what you want otherwise after it::

    spark = laminar.spark.configure(SparkSession.builder).getOrCreate()
    """
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    return builder


def warn_if_slow(environment: Mapping[str, str] = os.environ) -> None:
    """Say once in a process of Spark's that its JVM talks to Python over TCP.

    Python processes don't see the session's settings; by this variable Spark tells them where to connect.
    """
    global _warned
    if not _warned and environment.get("PYTHON_UNIX_DOMAIN_ENABLED", "").lower() != "true":
        _warned = True
        log.warning(
            "%s is off: each task waits 40 ms for TCP; laminar.spark.configure(builder) sets it", UNIX_SOCKET
        )
