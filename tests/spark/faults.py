"""Topic to topic while everything dies: ``python -m tests.spark.faults --kills 20`` (``make spark-faults``).

A three-node cluster, a producer that does not stop, and a query in a driver of its own, which copies by the
default source and sink. The driver is killed with SIGKILL at a random moment and started again from its
checkpoint. Each life of it is one of four, in turn: alone; with executors that are processes beside it, of
which one is killed before; with a node that is killed before and comes back; or stopped (SIGSTOP) while
another driver takes the checkpoint over, and woken then. At the end each record that the producer has a
receipt for stands in the copy exactly once, and each key in order. Ends 0 only then.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import laminar
from benches.spark.spark_rig import below
from laminar.testing.cluster import LocalCluster
from tests.spark.copying import START_LIMIT_S, Driver, Query, kill

KEYS = 50
FROM, TO = "from", "to"
# Kills come so long after the query's first commit of a run, at random below.
LONGEST_LIFE_S = 8.0
# Where tasks run if not in the driver's process: in two executors that are processes beside it.
BESIDE = "local-cluster[2,1,1024]"
EXECUTOR = "CoarseGrainedExecutorBackend"


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


class Lives:
    """The four kinds of lives; each leaves a driver that is dead, and the cluster whole."""

    def __init__(self, query: Query, cluster: LocalCluster, rng: random.Random) -> None:
        self._query = query
        self._cluster = cluster
        self._rng = rng
        self.kinds = (self.alone, self.without_an_executor, self.without_a_node, self.taken_over)
        self.fenced = 0

    def alone(self) -> None:
        """Killed at a random moment."""
        driver = self._query.start()
        self._live(driver)
        kill(driver)

    def without_an_executor(self) -> None:
        """One of two executors is killed before; Spark makes another, and runs its tasks again."""
        driver = self._query.start(master=BESIDE)
        self._live(driver)
        executors = [pid for pid in below(driver.pid) if EXECUTOR in command_of(pid)]
        assert executors, "a driver without executors"
        os.kill(self._rng.choice(executors), signal.SIGKILL)
        self._query.await_batches(driver, 1)
        kill(driver)

    def without_a_node(self) -> None:
        """A node is killed before, and comes back after."""
        driver = self._query.start()
        self._live(driver)
        node = self._rng.randrange(len(self._cluster.members))
        self._cluster.kill(node)
        time.sleep(self._rng.random() * 2)
        kill(driver)
        self._cluster.restart(node)

    def taken_over(self) -> None:
        """Stopped, while another driver goes on; the one that wakes up ends, and changes nothing."""
        older = self._query.start()
        self._live(older)
        os.killpg(older.pid, signal.SIGSTOP)
        newer = self._query.start()
        try:
            self._live(newer)
            os.killpg(older.pid, signal.SIGCONT)
            # Spark's own log of batches may stop either of them; the cluster must never show both.
            older.wait(START_LIMIT_S)
            assert older.returncode != 0, "an older driver went on beside the newer one"
            self.fenced += 1
        finally:
            for each in (older, newer):
                if each.poll() is None:
                    kill(each)

    def _live(self, driver: Driver) -> None:
        self._query.await_batches(driver, 1)
        time.sleep(self._rng.random() * LONGEST_LIFE_S)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""  # it has ended


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
    options = given.parse_args()
    print(f"python -m tests.spark.faults --kills {options.kills} --seed {options.seed}", flush=True)
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="spark-faults-") as folder:
        return run(Path(folder), rng, options.kills)


def run(folder: Path, rng: random.Random, kills: int) -> int:
    """Kill, restart, check; returns the exit code."""
    checkpoint = folder / "checkpoint"
    with LocalCluster(folder / "nodes", shards=1) as cluster, laminar.connect(cluster.urls) as client:
        for name, partitions in ((FROM, 3), (TO, 4)):
            client.create_topic(name, partitions=partitions, replicas=3)
        query = Query(list(cluster.urls), checkpoint, folder / "driver.log", source=FROM, target=TO)
        lives = Lives(query, cluster, rng)
        feed = Feed(list(cluster.urls))
        feed.start()
        try:
            for number in range(kills):
                kind = lives.kinds[number % len(lives.kinds)]
                kind()
                name = kind.__name__.replace("_", " ")
                print(
                    f"kill {number + 1}, {name}: {query.batches()} batches, {feed.sent} records",
                    flush=True,
                )
        finally:
            feed.enough.set()
            feed.join()
        if query.start(until_done=True).wait() != 0:
            print(query.log.read_text()[-4_000:])
            return 1
        wrong = check(client, feed.sent)
    print(*wrong, sep="\n" if wrong else "")
    print(
        f"{kills} kills, {lives.fenced} older drivers ended, {feed.sent} records,"
        f" {query.batches()} batches: {len(wrong)} keys wrong"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
