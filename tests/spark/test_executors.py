"""Executors whose Python has pyspark and pyarrow, and no Laminar: an archive brings what they need."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import laminar
from tests.spark.bare import NEEDED, THERE, archive, bare_python

Topic = laminar.Topic[bytes]
JOB = Path(__file__).with_name("executors_job.py")
ROOT = Path(__file__).parents[2]


def test_client_and_source_need_few_packages() -> None:
    """Those that docs/spark.md names. What the server needs is on no executor."""
    pytest.importorskip("pyspark")
    pytest.importorskip("pyarrow")
    # Also what their own modules need: not named, as pip brings it.
    allowed = {name.partition(".")[0] for name in (*NEEDED, *THERE)} | {"laminar", "typing_extensions"}
    refused = set(importlib.metadata.packages_distributions()) - allowed
    program = f"""
import sys
refused = {refused}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in refused:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Refuse())
import laminar, laminar.aio, laminar.client.sync.client, laminar.client.sync.sinks
import laminar.client.transact.stage_sender
import laminar.spark, laminar.spark.source
import laminar.spark.read.batch_reader, laminar.spark.read.stream_reader, laminar.spark.write.writers
import laminar.spark.read.cluster, laminar.spark.read.columns, laminar.spark.read.loss
import laminar.spark.write.task_stager, laminar.spark.write.rows, laminar.spark.write.fingerprints
"""

    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=120, cwd=ROOT)


def test_the_documented_packages_are_those() -> None:
    """What a reader copies is what is tested."""
    text = (ROOT / "docs/spark.md").read_text()

    assert "pip install --target laminar-executor --no-deps laminar-mq" in text
    assert f"pip install --target laminar-executor {' '.join(NEEDED[:3])} 'backports.zstd; " in text


@pytest.mark.long
def test_executors_without_laminar_read_and_write_with_the_archive_alone(
    topic: Topic, url: str, tmp_path: Path
) -> None:
    """In a batch and in a stream, with Spark's executors in processes of their own."""
    pytest.importorskip("pyspark")
    python = bare_python(tmp_path / "bare")
    packed = archive(tmp_path / "laminar-executor")
    # The driver has Laminar; its executors' path is that of the job's settings.
    paths = [str(ROOT), str(ROOT / "laminar/spark/autoload"), *sys.path[1:]]
    environment = os.environ | {"PYSPARK_PYTHON": str(python), "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, str(JOB), url, topic.name, str(packed)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert 0 == done.returncode, done.stdout + done.stderr
    where, *counts = done.stdout.splitlines()
    executor, _, file = where.removeprefix("executors ").partition("/laminar-executor/")
    # Spark keeps executors' folders in its home, for ever.
    assert Path(executor).parent.parent.name == "work"
    shutil.rmtree(Path(executor).parent)
    assert "laminar/__init__.py" == file
    assert ["batch 1000", "stream 2000"] == counts
