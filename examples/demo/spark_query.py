"""The Spark query, as a program: ``python -m examples.demo.spark_query URLS TOPIC PER_BATCH RESULT``.

It computes the mean delay by airport and month, as a streaming query in micro-batches of PER_BATCH flights,
until all records of the topic are read. It is a process of its own, so that the JVM and its Python workers
end with it. The result is the JSON file RESULT (`Result`), which is renamed when it is complete. Spark's
files are in the same folder.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec


class Row(msgspec.Struct, frozen=True):
    """A group of the query's result: an airport and a month."""

    origin: str
    month: str
    flights: int
    total_minutes: int
    mean_minutes: float


class Result(msgspec.Struct, frozen=True):
    """The query's result, the number of records of each micro-batch, and Spark's version."""

    rows: list[Row]
    batches: list[int]
    spark: str


def query(urls: str, topic: str, per_batch: int, folder: Path) -> Result:
    """Run the query in a local Spark session with two cores; Spark's files go to `folder`."""
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f

    from laminar.spark import configure

    # Spark's workers need this interpreter, which has Laminar installed; the first python3 on the path may
    # not.
    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.Builder().master("local[2]").appName("laminar-demo")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }.items():
        builder = builder.config(name, value)
    spark = configure(builder).getOrCreate()
    try:
        spark.sparkContext.setLogLevel("ERROR")
        records = (
            spark.readStream.format("laminar")
            .option("laminar.endpoints", urls)
            .option("subscribe", topic)
            .option("startingOffsets", "earliest")
            .option("maxOffsetsPerTrigger", str(per_batch))
            .load()
        )
        flight = f.from_json(records.value.cast("string"), "date string, delay int, origin string")
        delays = (
            records.select(flight.alias("flight"))
            .groupBy(f.col("flight.origin").alias("origin"), f.substring("flight.date", 1, 7).alias("month"))
            .agg(
                f.count("*").alias("flights"),
                f.sum("flight.delay").alias("total_minutes"),
                f.avg("flight.delay").alias("mean_minutes"),
            )
        )
        stream = (
            delays.writeStream.format("memory")
            .queryName("delays")
            .outputMode("complete")
            .trigger(availableNow=True)
            .start()
        )
        stream.awaitTermination()
        batches = [int(each["numInputRows"]) for each in stream.recentProgress if each["numInputRows"]]
        rows = [Row(**row.asDict()) for row in spark.table("delays").collect()]
        return Result(rows, batches, spark.version)
    finally:
        spark.stop()


def main(arguments: list[str]) -> None:
    """Run the query and write its result. `arguments` are URLS, TOPIC, PER_BATCH and RESULT."""
    urls, topic, per_batch, result = arguments
    found = query(urls, topic, int(per_batch), Path(result).parent)
    fresh = f"{result}.new"
    with open(fresh, "wb") as file:
        file.write(msgspec.json.encode(found))
    os.replace(fresh, result)


if __name__ == "__main__":
    main(sys.argv[1:])
