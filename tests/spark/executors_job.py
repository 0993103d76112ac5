"""A job on a cluster of processes: `executors_job.py URL TOPIC ARCHIVE`.

It prints where its executors have Laminar from, writes 1,000 rows into the topic in a batch and as many in a
stream, and prints how many it reads back.
"""

from __future__ import annotations

import sys
import tempfile

from pyspark.sql import SparkSession

import laminar.spark


def where(_: int) -> str:
    """The file that `import laminar` loads, in an executor."""
    return str(__import__("laminar").__file__)


def main(url: str, topic: str, archive: str) -> None:
    """Write, then read."""
    builder = laminar.spark.configure(SparkSession.builder).master("local-cluster[1,1,1024]")
    settings = {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "1",
        # A task that fails once fails the job: no second try hides it.
        "spark.task.maxFailures": "1",
        "spark.executorEnv.PYTHONPATH": "./laminar-executor",
        "spark.archives": f"{archive}#laminar-executor",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    print("executors", *spark.sparkContext.parallelize([0], 1).map(where).collect(), flush=True)
    options = {"laminar.endpoints": url}
    rows = spark.range(0, 1_000, 1, 2).selectExpr("cast(id as string) as value")
    rows.write.format("laminar").options(**options, topic=topic).mode("append").save()
    read = spark.read.format("laminar").options(**options, subscribe=topic).load()
    print("batch", read.selectExpr("cast(value as string)").distinct().count(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        stream = spark.readStream.format("laminar").options(
            **options, subscribe=topic, startingOffsets="earliest"
        )
        copy = stream.load().selectExpr("value").writeStream.format("laminar")
        copied = copy.options(**options, topic=topic, checkpointLocation=folder)
        copied.trigger(availableNow=True).start().awaitTermination()
    # A DataFrame finds its end once: another one has what the stream wrote.
    again = spark.read.format("laminar").options(**options, subscribe=topic).load()
    print("stream", again.count(), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
