"""One Spark session and one node for all of Spark's tests, in the small: two cores, two tries a task."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import laminar
import laminar.spark
from laminar.spark.read import cluster as clusters
from laminar.testing import nodes
from tests.spark.warm_python import warm_python

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Whether Spark compiles code for each query: more work than these short ones are. `compiled` has it.
CODE = {
    False: {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"},
    True: {"spark.sql.codegen.wholeStage": "true", "spark.sql.codegen.factoryMode": "FALLBACK"},
}


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """A node's URL."""
    with nodes.serve(shards=2) as served:
        yield served


@pytest.fixture(scope="session")
def client(url: str) -> Iterator[laminar.Client]:
    with laminar.connect(url) as connected:
        yield connected


@pytest.fixture
def topic(client: laminar.Client, request: pytest.FixtureRequest) -> laminar.Topic[bytes]:
    """A topic of three partitions, named after the test."""
    name = re.sub(r"[^A-Za-z0-9_]+", "-", request.node.name)
    return client.create_topic(name, partitions=3, replicas=1)


@pytest.fixture
def no_connection_is_left() -> Iterator[None]:
    """A worker keeps its connections for life; a test that does its work doesn't."""
    yield
    while clusters._clusters:
        clusters._clusters.popitem()[1].close()


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session as `configure` sets it up. Nothing registers the source: Spark finds it."""
    from pyspark.sql import SparkSession

    home = tmp_path_factory.mktemp("spark")
    # Spark's processes import the sink that fails on purpose.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    builder = laminar.spark.configure(SparkSession.builder).master("local[2,2]").appName("laminar-tests")
    settings = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.local.dir": str(home / "local"),
        "spark.sql.warehouse.dir": str(home / "warehouse"),
        "spark.sql.streaming.stopTimeout": "120s",  # only a hang reaches it
        # A query that has read everything asks for more at once: 100 times a second by default.
        "spark.sql.streaming.pollingDelay": "50ms",
        **CODE[False],
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    with warm_python(home) as python:
        os.environ["PYSPARK_PYTHON"] = str(python)
        session = builder.getOrCreate()
        session.sparkContext.setLogLevel("OFF")
        yield session
        session.stop()


@pytest.fixture
def compiled(spark: SparkSession) -> Iterator[None]:
    """Queries of this test are compiled, as by default."""
    for on in (True, False):
        for name, value in CODE[on].items():
            spark.conf.set(name, value)
        if on:
            yield


@pytest.fixture
def read(spark: SparkSession, url: str) -> Callable[..., DataFrame]:
    """``read(topic, option=value, ...)``: the batch DataFrame of a topic."""

    def load(topic: laminar.Topic[bytes], schema: str | None = None, **options: str) -> DataFrame:
        reader = spark.read.format("laminar").option("laminar.endpoints", url).option("subscribe", topic.name)
        if schema is not None:
            reader = reader.schema(schema)
        return reader.options(**options).load()

    return load
