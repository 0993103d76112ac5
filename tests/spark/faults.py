"""Topic to topic while everything dies: ``python -m tests.spark.faults --kills 20`` (``make spark-faults``).

A three-node cluster, a producer that does not stop, and a query in a driver of its own, which copies by the
default source and sink. The driver is killed with SIGKILL at a random moment and started again from its
checkpoint; now and then a node is killed too, and comes back. At the end each record that the producer has a
receipt for stands in the copy exactly once, and each key in order. Ends 0 only then.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import laminar
from laminar.testing.cluster import LocalCluster

KEYS = 50
FROM, TO = "from", "to"
# Kills come so long after the query's first commit of a run, at random below.
LONGEST_LIFE_S = 8.0
START_LIMIT_S = 600.0


def drive(urls: str, checkpoint: str, *, until_done: bool) -> None:
    """The driver: a query that runs until it is killed, or has copied all there is."""
    from pyspark.sql import SparkSession

    import laminar.spark

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = laminar.spark.configure(SparkSession.builder).master("local[2,2]")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.session.timeZone": "UTC",
        "spark.local.dir": checkpoint + "-local",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    query = (
        spark.readStream.format("laminar")
        .options(
            **{
                "laminar.endpoints": urls,
                "subscribe": FROM,
                "startingOffsets": "earliest",
                "maxOffsetsPerTrigger": "2000",
                "minPartitions": "5",  # a partition in several tasks: in order all the same
            }
        )
        .load()
        .select("key", "value")
        .writeStream.format("laminar")
        .options(**{"laminar.endpoints": urls, "topic": TO, "checkpointLocation": checkpoint})
        .trigger(**({"availableNow": True} if until_done else {"processingTime": "0 seconds"}))
        .start()
    )
    query.awaitTermination()
    spark.stop()


class Feed(threading.Thread):
    """Sends numbers by key until told to stop; `sent` are those with a receipt."""

    def __init__(self, urls: list[str]) -> None:
        super().__init__(name="feed")
        self.sent = 0
        self.enough = threading.Event()
        self._urls = urls

    def run(self) -> None:
        with laminar.connect(self._urls) as client:
            topic = client.topic(FROM)
            while not self.enough.is_set():
                with topic.producer() as producer:
                    for number in range(self.sent, self.sent + 100):
                        producer.send(b"%d" % number, b"%d" % (number % KEYS))
                self.sent += 100
                self.enough.wait(0.2)


def committed(checkpoint: Path) -> int:
    """How many batches Spark has noted as done."""
    return sum(path.name.isdecimal() for path in (checkpoint / "commits").glob("*"))


def start_driver(
    urls: list[str], checkpoint: Path, *, until_done: bool, log: Path
) -> subprocess.Popen[bytes]:
    """In a process group of its own: Spark's Java and Python processes die with it."""
    command = [sys.executable, "-m", "tests.spark.faults", "--drive", str(checkpoint)]
    command += ["--urls", ",".join(urls), *(["--until-done"] if until_done else [])]
    with log.open("ab") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)


def kill(driver: subprocess.Popen[bytes]) -> None:
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()


def await_batches(driver: subprocess.Popen[bytes], checkpoint: Path, count: int) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while committed(checkpoint) < count:
        if driver.poll() is not None:
            raise SystemExit(f"the driver ended by itself: {driver.returncode}")
        if time.monotonic() > deadline:
            raise SystemExit(f"no batch was committed within {START_LIMIT_S:g} s")
        time.sleep(0.05)


def check(client: laminar.Client, sent: int) -> list[str]:
    """What is wrong with the copy; nothing if it is right."""
    by_key: dict[bytes | None, list[int]] = {}
    for record in client.topic(TO).read():
        by_key.setdefault(record.key, []).append(int(record.raw))
    wrong = []
    for key in range(KEYS):
        expected, found = list(range(key, sent, KEYS)), by_key.pop(b"%d" % key, [])
        if expected != found:
            lost, doubled = sorted(set(expected) - set(found)), len(found) - len(set(found))
            wrong.append(f"key {key}: {len(lost)} lost {lost[:5]}, {doubled} doubled, of {len(expected)}")
    return wrong + [f"key {key!r} was never sent" for key in by_key]


def main() -> int:
    given = argparse.ArgumentParser("python -m tests.spark.faults", description=__doc__)
    given.add_argument("--kills", type=int, default=20)
    given.add_argument("--seed", type=int, default=random.randrange(10**6))
    given.add_argument("--drive")
    given.add_argument("--urls")
    given.add_argument("--until-done", action="store_true")
    options = given.parse_args()
    if options.drive:
        drive(options.urls, options.drive, until_done=options.until_done)
        return 0
    print(f"python -m tests.spark.faults --kills {options.kills} --seed {options.seed}", flush=True)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="spark-faults-") as folder:
        return run(Path(folder), rng, options.kills)


def run(folder: Path, rng: random.Random, kills: int) -> int:
    """Kill, restart, check; returns the exit code."""
    checkpoint, log = folder / "checkpoint", folder / "driver.log"
    with LocalCluster(folder / "nodes", shards=1) as cluster, laminar.connect(cluster.urls) as client:
        for name, partitions in ((FROM, 3), (TO, 4)):
            client.create_topic(name, partitions=partitions, replicas=3)
        feed = Feed(list(cluster.urls))
        feed.start()
        driver = None
        try:
            for number in range(kills):
                before = committed(checkpoint)
                driver = start_driver(cluster.urls, checkpoint, until_done=False, log=log)
                await_batches(driver, checkpoint, before + 1)
                time.sleep(rng.random() * LONGEST_LIFE_S)
                node = rng.randrange(1, 4) if number % 3 == 2 else None
                if node is not None:
                    cluster.kill(node)
                    time.sleep(rng.random() * 2)
                kill(driver)
                if node is not None:
                    cluster.restart(node)
                print(f"kill {number + 1}: {committed(checkpoint)} batches, {feed.sent} records", flush=True)
            feed.enough.set()
            feed.join()
            driver = start_driver(cluster.urls, checkpoint, until_done=True, log=log)
            if driver.wait() != 0:
                print(log.read_text()[-4_000:])
                return 1
        finally:
            feed.enough.set()
            feed.join()
            if driver is not None and driver.poll() is None:
                kill(driver)
        wrong = check(client, feed.sent)
    print(*wrong, sep="\n" if wrong else "")
    print(f"{kills} kills, {feed.sent} records, {committed(checkpoint)} batches: {len(wrong)} keys wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
