"""Clusters of real processes. One is shared by tests that only use it; those that kill get their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.testing.cluster import LocalCluster


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three nodes of two shards, for tests that leave them as they were."""
    with LocalCluster(tmp_path_factory.mktemp("shared"), nodes=3, shards=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(real_disk: Path) -> Iterator[LocalCluster]:
    """Three nodes of two shards, for a test to do with them what it likes."""
    with LocalCluster(real_disk / "cluster", nodes=3, shards=2) as own:
        yield own
