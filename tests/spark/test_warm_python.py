"""Forked Pythons of Spark (`warm_python.py`) end as executed ones do, and with the program that Spark has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.spark.warm_python import warm_python

DAEMON = ("-m", "pyspark.daemon", "pyspark.worker")
LIMIT_S = 240
PORT_BYTES = 4


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with warm_python(tmp_path_factory.mktemp("python")) as path:
        yield path


def start(program: str | Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [program, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONHASHSEED": "0"},
    )


def test_what_is_forked_ends_as_what_is_executed(python: Path) -> None:
    """A daemon tells its port, and ends with its input."""
    runs = [start(program, *DAEMON) for program in (sys.executable, python)]
    told = [run.communicate(timeout=LIMIT_S) for run in runs]

    assert runs[0].returncode == runs[1].returncode, told
    assert [(PORT_BYTES, b"")] * 2 == [(len(out), err) for out, err in told]


def test_a_failure_is_shown(python: Path) -> None:
    """With its code."""
    runs = [start(program, "-m", "pyspark.no_such_module") for program in (sys.executable, python)]
    told = [run.communicate(timeout=LIMIT_S) for run in runs]

    assert [run.returncode for run in runs] == [1, 1]
    assert all(b"No module named pyspark.no_such_module" in err for _, err in told), told


def test_it_dies_with_the_program_that_spark_has(python: Path) -> None:
    """Spark kills that program: nothing may go on that writes to its streams."""
    with start(python, *DAEMON) as run:
        assert run.stdout is not None
        assert PORT_BYTES == len(run.stdout.read(PORT_BYTES))
        run.kill()
        assert b"" == run.stdout.read()
