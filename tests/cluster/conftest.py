"""Clusters of real processes. A module's tests that only use it share one; those that kill get their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from laminar.testing.cluster import LocalCluster
from tests.cluster.patience import PATIENCE_S


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes of two shards, for tests that leave them as they were."""
    with LocalCluster(tmp_path_factory.mktemp("shared"), nodes=3, shards=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[LocalCluster]:
    """Three nodes of two shards, for a test to do with them what it likes."""
    with LocalCluster(real_disk / "cluster", nodes=3, shards=2) as own:
        until_all_vote(own)
        yield own


@pytest.fixture
def replacing_cluster(real_disk: Path) -> Iterator[LocalCluster]:
    """Four nodes that give up a dead one after three seconds; small segments, short retention."""
    settings = {
        "segment_size_bytes": 1 << 20,
        "journal_file_bytes": 4 << 20,
        "retention_check_ms": 50,
        "replace_after_ms": 3000,
    }
    with LocalCluster(real_disk / "cluster", nodes=4, shards=1, settings=settings) as own:
        yield own


def until_all_vote(cluster: LocalCluster) -> None:
    """On the catalog: right after its founding one or two do, and the loss of one of two stops it."""
    deadline = time.monotonic() + 120
    while (told := _catalog_voters(cluster.urls[0])) < cluster.nodes:
        assert time.monotonic() < deadline, f"{told:g} of {cluster.nodes} nodes vote"
        time.sleep(0.1)  # it is a long page


def _catalog_voters(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False, timeout=PATIENCE_S).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("laminar_catalog_voters{"))
