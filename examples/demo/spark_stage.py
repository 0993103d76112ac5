"""The demo's step with Spark: whether Spark can run here, and the query in another process."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from examples.demo.flights import Delay, Delays
from examples.demo.spark_query import Result
from laminar.testing.cluster import LocalCluster, kill_group

JAVA_VERSION = 17
TIMEOUT_S = 150.0
# So the demo's own file takes five micro-batches.
FLIGHTS_PER_BATCH = 4_000


class QueryFailed(Exception):
    """Spark's process ended without a result, or took too long; the message has the end of its log."""


def why_not(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return what Spark lacks here and how to install it; None if it can run."""
    if importlib.util.find_spec("pyspark") is None:
        return "pyspark is not installed (pip install 'laminar-mq[demo]')"
    home = environment.get("JAVA_HOME")
    java = f"{home}/bin/java" if home else shutil.which("java")
    wanted = f"Spark needs Java {JAVA_VERSION} or newer (Debian: apt-get install openjdk-17-jre-headless)"
    if java is None:
        return f"there is no Java; {wanted}"
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30).stderr
    except OSError:
        return f"{java} does not run; {wanted}"
    version = java_version(told)
    return None if version >= JAVA_VERSION else f"{java} is version {version}; {wanted}"


def java_version(told: str) -> int:
    """Return the major version in the output of ``java -version``; 0 if it has none.

    Java 8 calls itself 1.8.
    """
    _, _, rest = told.partition('"')
    parts = rest.partition('"')[0].replace("-", ".").split(".")
    numbers = [int(part) for part in parts[:2] if part.isdecimal()]
    if not numbers:
        return 0
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def run_query(cluster: LocalCluster, topic: str, *, folder: Path) -> Result:
    """Run the query in a process that ends with the cluster at the latest; its files are in `folder`.

    Raises:
        QueryFailed: when it ends without a result, or takes more than `TIMEOUT_S`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    result, log = folder / "result.json", folder / "log"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "examples.demo.spark_query"]
    command += [",".join(cluster.urls), topic, str(FLIGHTS_PER_BATCH), str(result)]
    process = cluster.open_process(command, log=log)
    try:
        process.wait(TIMEOUT_S)
        return msgspec.json.decode(result.read_bytes(), type=Result)
    except (subprocess.TimeoutExpired, FileNotFoundError):
        how = (
            f"ended with {process.returncode}" if process.poll() is not None else f"took over {TIMEOUT_S:g} s"
        )
        tail = log.read_bytes()[-4_000:].decode("utf-8", "replace")
        raise QueryFailed(f"the Spark query {how}:\n{tail}") from None
    finally:
        kill_group(process)


def delays_of(result: Result) -> Delays:
    """Return Spark's groups in the form that `examples.demo.flights.delays_of` returns."""
    return {(row.origin, row.month): Delay(row.flights, row.total_minutes) for row in result.rows}
