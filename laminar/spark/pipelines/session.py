"""The common part of all pipelines: their Spark session, and a topic as a DataFrame."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from laminar.client.net.endpoints import resolve
from laminar.spark.settings import configure

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from laminar.spark.read.cluster import Cluster

# The columns of a record that both the source and the sink have.
RECORD = ("key", "value", "headers", "tag", "timestamp")
# The columns that say where in a topic a record is.
PLACE = ("partition", "offset")
_COALESCE_PERSISTED = "spark.sql.optimizer.canChangeCachedPlanOutputPartitioning"


def cluster_options(
    url: str | Sequence[str] | None,
    token: str | None = None,
    *,
    token_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    certificate: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
) -> dict[str, str]:
    """Return the source's and the sink's options for a cluster.

    What is None is found as `laminar.connect` finds it.
    """
    endpoints = resolve(url, token, token_file=token_file, ca=ca, certificate=certificate, key=key)
    options = {
        "laminar.endpoints": ",".join(endpoints.urls),
        "laminar.token": endpoints.token,
        "laminar.tokenFile": endpoints.token_file,
        "laminar.ca": endpoints.ca,
        "laminar.certificate": endpoints.certificate,
        "laminar.key": endpoints.key,
    }
    return {name: value for name, value in options.items() if value is not None}


@contextmanager
def session(name: str, *, master: str | None, conf: Mapping[str, str]) -> Iterator[SparkSession]:
    """Yield a Spark session set up by `configure` and `conf`, which takes precedence; stop it afterwards.

    Without `master` the session uses the master of Spark's configuration, or else this machine. If a session
    is active already, it is yielded as it is and not stopped: `master` and `conf` have no effect.
    """
    from pyspark import SparkConf
    from pyspark.sql import SparkSession

    found = SparkSession.getActiveSession()
    if found is not None:
        yield found
        return
    builder = configure(SparkSession.builder).appName(name)
    master = master or SparkConf().get("spark.master") or "local[*]"
    builder = builder.master(master)
    if master.startswith("local"):
        # Local workers need this interpreter's packages; Spark would take the first python3 of the path.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    # Times are shown and written in one time zone, wherever the job runs.
    builder = builder.config("spark.sql.session.timeZone", "UTC").config(
        "spark.ui.showConsoleProgress", "false"
    )
    for key, value in conf.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def read_topic(
    spark: SparkSession, cluster: Mapping[str, str], topic: str, *columns: str, **options: str
) -> DataFrame:
    """Return a topic's present records as a DataFrame with these columns; values of any length are fetched.

    `options` are further options of the source, and take precedence.
    """
    columns_ = {"columns": ",".join(columns), "largeRecords": "fetch"}
    given = {**cluster, "subscribe": topic, **columns_, **options}
    return spark.read.format("laminar").options(**given).load()


@contextmanager
def persisted(rows: DataFrame) -> Iterator[DataFrame]:
    """Persist `rows` for the block, in as few partitions as their size needs.

    By default Spark keeps all 200 partitions of a shuffle, and each further step has as many tasks. For a few
    thousand records that takes 20 s instead of 3.
    """
    conf = rows.sparkSession.conf
    before = conf.get(_COALESCE_PERSISTED) == "true"
    conf.set(_COALESCE_PERSISTED, True)
    try:
        kept = rows.persist()
    finally:
        conf.set(_COALESCE_PERSISTED, before)
    try:
        yield kept
    finally:
        kept.unpersist()


def connected(cluster: Mapping[str, str]) -> Cluster:
    """Return the driver's own connection to a cluster, given as the source's options."""
    from laminar.spark.read.cluster import cluster as connect
    from laminar.spark.read.options import endpoints_of

    endpoints = resolve(
        endpoints_of(cluster.get("laminar.endpoints")),
        cluster.get("laminar.token"),
        token_file=cluster.get("laminar.tokenFile"),
        ca=cluster.get("laminar.ca"),
        certificate=cluster.get("laminar.certificate"),
        key=cluster.get("laminar.key"),
    )
    return connect(endpoints, timeout_ms=120_000)
