"""The listener turns what Spark says of a query's progress into numbers that a monitor reads."""

from __future__ import annotations

import json
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pyspark")

from laminar.spark.lag import LagListener, QueryLag  # only with pyspark

KAFKA = SimpleNamespace(endOffset='{"t": {"0": 5}}', latestOffset='{"t": {"0": 7}}')


def progress(read_to: dict[str, Any], ends: dict[str, Any] | None, **changed: Any) -> Any:
    """What Spark hands a listener, as far as it is looked at."""
    ours = SimpleNamespace(
        endOffset=json.dumps(read_to), latestOffset=None if ends is None else json.dumps(ends)
    )
    given = {"id": "id-1", "name": None, "batchId": 3, "sources": [KAFKA, ours]}
    return SimpleNamespace(progress=SimpleNamespace(**(given | changed)))


def test_lag_is_what_lies_between_by_partition() -> None:
    """A partition that was not read at all counts from its begin; other sources' offsets are theirs."""
    reported: list[QueryLag] = []
    listener = LagListener(reported.append)

    listener.onQueryProgress(progress({"a:0": 5, "v": 2}, {"a:0": 9, "a:1": 2, "v": 2}))

    (found,) = listener.lags()
    assert [found] == reported
    assert ("id-1", 3) == (found.name, found.batch)
    assert {("a", 0): 4, ("a", 1): 2} == found.lags
    assert (6, 4, 2, 3.0) == (found.total, found.highest, found.lowest, found.mean)


def test_a_query_that_ended_has_no_lag() -> None:
    """And one of which nothing is known yet has none either."""
    listener = LagListener()
    listener.onQueryProgress(progress({"start": "latest", "v": 2}, None))
    assert [] == listener.lags()
    listener.onQueryProgress(progress({"a:0": 5, "v": 2}, {"a:0": 9, "v": 2}))
    assert [4] == [each.total for each in listener.lags()]

    listener.onQueryTerminated(SimpleNamespace(id="id-1"))  # type: ignore[arg-type]  # all that is looked at

    assert [] == listener.lags()


def test_it_is_served_as_prometheus_reads_it() -> None:
    """One line a partition, with the query's name; quotes in it are escaped."""
    listener = LagListener()
    listener.onQueryProgress(progress({"a:0": 5, "v": 2}, {"a:0": 9, "v": 2}, name='the "best"'))
    port = listener.serve()
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            text = answer.read().decode()
    finally:
        listener.close()

    assert 'laminar_spark_lag_records{query="the \\"best\\"",topic="a",partition="0"} 4' in text.splitlines()
    assert 'laminar_spark_offset{query="the \\"best\\"",topic="a",partition="0"} 5' in text.splitlines()
