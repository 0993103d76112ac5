"""A Spark session to be measured, and what its processes cost: the JVM and the Python workers below it."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import laminar.spark
from benches.common import usage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CORES = 2


@contextmanager
def session(folder: Path) -> Iterator[SparkSession]:
    """A session of two cores, set up as `laminar.spark.configure` says, with its files in `folder`."""
    # Its Python processes import the benches' own sources.
    here = str(Path(__file__).parents[2])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = laminar.spark.configure(SparkSession.builder).master(f"local[{CORES}]").appName("bench")
    for name, value in {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.memory": "2g",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    try:
        yield made
    finally:
        made.stop()


def below(pid: int) -> list[int]:
    """`pid` and the processes that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it has ended
            children.setdefault(int(stat[1]), []).append(int(entry.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found


def spark_pids(spark: SparkSession) -> list[int]:
    """The JVM and its Python processes."""
    gateway = spark.sparkContext._gateway
    assert gateway is not None, "a session without a JVM"
    return below(gateway.proc.pid)


def cpu_by_pid(pids: list[int]) -> dict[int, float]:
    """CPU seconds that each process has used since it began."""
    found = {}
    for pid in pids:
        # One that has ended is left out.
        with suppress(OSError):
            found[pid] = usage.cpu_s([pid])
    return found


def used_s(before: dict[int, float], after: dict[int, float]) -> float:
    """CPU seconds in between, of processes that are there still."""
    return sum(max(0.0, seconds - before.get(pid, 0.0)) for pid, seconds in after.items())


def largest_worker_mib(spark: SparkSession) -> float:
    """The most memory (RSS) that any of Spark's Python processes has had since it began."""
    most_kib = 0
    for pid in spark_pids(spark)[1:]:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                most_kib = max(most_kib, int(line.split()[1]))
    return most_kib / 1024


@dataclass(slots=True)
class Timed:
    """Rounds of one case: seconds each, and CPU seconds of nodes, of Spark and of others in all of them."""

    seconds: list[float]
    nodes_cpu_s: float = 0.0
    spark_cpu_s: float = 0.0
    others_cpu_s: float = 0.0

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def interleaved(
    cases: dict[str, DataFrame],
    *,
    rounds: int,
    warm: int,
    spark: SparkSession,
    nodes: Callable[[], float],
) -> dict[str, Timed]:
    """Each frame into `noop`, `warm` times for nothing and then `rounds` times, in turns, so a slow moment
    hits all.

    `nodes` are the CPU seconds that the cluster has used so far.
    """
    found = {name: Timed([]) for name in cases}
    for number in range(warm + rounds):
        for name, frame in cases.items():
            before, machine_s, own_s = (
                cpu_by_pid(spark_pids(spark)),
                usage.machine_cpu_s(),
                time.process_time(),
            )
            nodes_s, began = nodes(), time.perf_counter()
            frame.write.format("noop").mode("overwrite").save()
            took = time.perf_counter() - began
            if number >= warm:
                timed = found[name]
                nodes_s = nodes() - nodes_s
                spark_s = used_s(before, cpu_by_pid(spark_pids(spark)))
                own_s = time.process_time() - own_s
                timed.seconds.append(took)
                timed.nodes_cpu_s += nodes_s
                timed.spark_cpu_s += spark_s
                timed.others_cpu_s += usage.machine_cpu_s() - machine_s - nodes_s - spark_s - own_s
    return found
