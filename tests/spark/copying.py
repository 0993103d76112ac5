"""A query that copies a topic, in a driver of its own that can be killed at any moment and started again.

``python -m tests.spark.copying CHECKPOINT ...`` is the driver. It reads and writes by the default source and
sink, and goes on where its checkpoint says.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.spark.quick_python import quick_python

START_LIMIT_S = 600.0
# Two tasks at a time, in the driver's process.
HERE = "local[2,2]"
# Short lives: Java's second compiler takes more CPU than it saves.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

Driver = subprocess.Popen[bytes]


@dataclass(frozen=True)
class Query:
    """What all its drivers have in common."""

    urls: list[str]
    checkpoint: Path
    log: Path
    source: str
    target: str
    batch_records: int = 2000

    def start(self, *, master: str = HERE, until_done: bool = False) -> Driver:
        """In a process group of its own: Spark's Java and Python processes die with it."""
        command = [sys.executable, "-m", "tests.spark.copying", str(self.checkpoint)]
        command += ["--urls", ",".join(self.urls), "--master", master]
        command += ["--from", self.source, "--to", self.target, "--batch-records", str(self.batch_records)]
        python = self.checkpoint.parent / "python"
        if not python.exists():
            quick_python(self.checkpoint.parent)
        environment = {"PYSPARK_PYTHON": str(python), "JDK_JAVA_OPTIONS": JAVA_OPTIONS}
        with self.log.open("ab") as out:
            return subprocess.Popen(
                command + ["--until-done"] * until_done,
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=os.environ | environment,
            )

    def batches(self) -> int:
        """How many batches Spark has noted as done. It keeps the notes of the last hundred or more."""
        noted = (path.name for path in (self.checkpoint / "commits").glob("*"))
        return max((int(name) + 1 for name in noted if name.isdecimal()), default=0)

    def await_batches(self, driver: Driver, more: int) -> None:
        """Until `more` batches were committed; SystemExit if it ends before."""
        count = self.batches() + more
        deadline = time.monotonic() + START_LIMIT_S
        while self.batches() < count:
            if driver.poll() is not None:
                print(self.log.read_text()[-4_000:])
                raise SystemExit(f"the driver ended by itself: {driver.returncode}")
            if time.monotonic() > deadline:
                raise SystemExit(f"no batch was committed within {START_LIMIT_S:g} s")
            time.sleep(0.05)


def kill(driver: Driver) -> None:
    """Kill it with SIGKILL, and all that it started in its group."""
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()


def drive(given: argparse.Namespace) -> None:
    """The driver: a query that runs until it is killed, or has copied all there is."""
    from pyspark.sql import SparkSession

    import laminar.spark

    builder = laminar.spark.configure(SparkSession.builder).master(given.master)
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.sql.session.timeZone": "UTC",
        "spark.local.dir": given.checkpoint + "-local",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    query = (
        spark.readStream.format("laminar")
        .options(
            **{
                "laminar.endpoints": given.urls,
                "subscribe": given.source,
                "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": str(given.batch_records),
                "minPartitions": "5",  # a partition in several tasks: in order all the same
            }
        )
        .load()
        .select("key", "value")
        .writeStream.format("laminar")
        .options(
            **{
                "laminar.endpoints": given.urls,
                "topic": given.target,
                "checkpointLocation": given.checkpoint,
            }
        )
        .trigger(**({"availableNow": True} if given.until_done else {"processingTime": "0 seconds"}))
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser("python -m tests.spark.copying", description=__doc__)
    arguments.add_argument("checkpoint")
    arguments.add_argument("--urls", required=True)
    arguments.add_argument("--master", default=HERE)
    arguments.add_argument("--from", dest="source", required=True)
    arguments.add_argument("--to", dest="target", required=True)
    arguments.add_argument("--batch-records", type=int, required=True)
    arguments.add_argument("--until-done", action="store_true")
    drive(arguments.parse_args())
