"""`make bench-spark` runs, at sizes that measure nothing, so it can't rot; its figures keep their names."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import laminar

pytest.importorskip("pyspark")

from benches.spark import bench_spark, spark_sink  # only with pyspark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FIGURES = (
    *(
        rf"{source}, {columns} +[\d.]+ s +[\d,]+ rows/s .*CPU s a GB: nodes [\d.]+, Spark [\d.]+"
        for source in ("laminar", "socket", "memory", "tuples", "Parquet")
        for columns in ("value", "all columns")
    ),
    r"laminar, all but value .*",
    r"value: [\d.]+ of a bare socket .* of the same from memory.*",
    r"all columns: [\d.]+ of a bare socket .* of the same from memory.*",
    r"a micro-batch: \d+ ms against the rate source's \d+ ms.*",
    r"an idle query costs the nodes -?[\d.]+% of a core .*",
    r"largest Python process of Spark: \d+ MiB.*",
    *(
        rf"into {sink}, {columns} +[\d.]+ s +[\d,]+ MB/s; CPU s a GB: nodes [\d.]+, Spark [\d.]+"
        for sink in ("laminar", "laminar-discard")
        for columns in ("value", "key and value")
    ),
    r"the client's own producer: [\d,]+ MB/s, keys and values",
    r"value: [\d.]+ of the sink that throws its frames away .*",
    r"key and value: [\d.]+ of the sink that throws its frames away .*",
    r"a micro-batch from topic to topic, exactly once: \d+ ms .*",
)


@pytest.mark.long
def test_each_figure_is_there(
    spark: SparkSession,
    url: str,
    client: laminar.Client,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Once each; beside our source the same work is done by what it is held against."""
    rig = bench_spark.Rig(tmp_path, spark, url, client, [os.getpid()], replicas=1)

    bench_spark.measure(rig, bench_spark.QUICK)
    spark_sink.measure(rig, spark_sink.QUICK)

    lines = capsys.readouterr().out.splitlines()
    for figure in FIGURES:
        assert sum(bool(re.fullmatch(figure, line)) for line in lines) == 1, (figure, lines)
