"""What Spark loads to find the source, and what a worker process does once."""

from __future__ import annotations

import gc
import pickle
import subprocess
import sys

import pytest

import laminar.spark
from laminar.spark import settings
from laminar.spark.read import cluster


def test_the_module_that_spark_looks_for_loads_nothing() -> None:
    """Spark imports it in sessions that never read from Laminar; only the attribute costs something."""
    program = (
        "import sys, pyspark_laminar\n"
        "loaded = {name.partition('.')[0] for name in sys.modules}\n"
        "assert not loaded & {'laminar', 'pyspark', 'pyarrow'}, loaded\n"
        "assert not hasattr(pyspark_laminar, 'OtherSource')\n"
    )

    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=120)


def test_the_source_loads_no_arrow() -> None:
    """Spark's look-up asks for the class itself, in every session: the base class of pyspark, and no more."""
    program = (
        "import sys, pyspark_laminar\n"
        "assert 'laminar' == pyspark_laminar.DefaultSource.name()\n"
        "loaded = {name for name in sys.modules if name.startswith('laminar')}\n"
        "assert not loaded & {'laminar.client', 'laminar.batch', 'laminar.spark.read.cluster'}, loaded\n"
    )
    pytest.importorskip("pyspark")

    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=120)


def test_the_source_is_pickled_by_name() -> None:
    """Drivers and executors import it; its code does not travel."""
    pytest.importorskip("pyspark")
    source = laminar.spark.LaminarDataSource

    assert source is pickle.loads(pickle.dumps(source))
    assert len(pickle.dumps(source)) < 200


def test_a_worker_is_tuned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is loaded leaves the collector's sight; what a task makes later is collected as always."""
    calls: list[str] = []
    monkeypatch.setattr(cluster, "_tuned", False)
    monkeypatch.setattr(gc, "collect", lambda: calls.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))

    cluster.tune()
    cluster.tune()

    assert ["collect", "freeze"] == calls


def test_a_builder_is_given_all_settings() -> None:
    """Anything with `config(name, value)` will do; what comes back is the builder."""

    class Builder:
        def __init__(self) -> None:
            self.given: dict[str, str] = {}

        def config(self, key: str, value: str) -> Builder:
            self.given[key] = value
            return self

    assert laminar.spark.SETTINGS == laminar.spark.configure(Builder()).given
    assert "true" == laminar.spark.SETTINGS["spark.python.unix.domain.socket.enabled"]


def test_a_session_that_was_not_configured_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the variable that Spark sets for its Python processes; over the Unix socket nothing is said."""
    monkeypatch.setattr(settings, "_warned", False)
    settings.warn_if_slow({"PYTHON_UNIX_DOMAIN_ENABLED": "True"})
    assert "spark.python.unix" not in caplog.text

    settings.warn_if_slow({})
    settings.warn_if_slow({})

    assert 1 == caplog.text.count("spark.python.unix.domain.socket.enabled is off")
