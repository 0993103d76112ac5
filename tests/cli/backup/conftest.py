"""A node for all tests of backups, a client of it, and a topic that has all that a record can have."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import laminar as library
from laminar.client.sync.client import Client
from laminar.testing import nodes
from tests.cli.backup.backups import filled


@pytest.fixture(scope="package")
def node_url() -> Iterator[str]:
    """A node of two shards, for this folder's tests."""
    with nodes.serve(shards=2) as url:
        yield url


@pytest.fixture(scope="package")
def client(node_url: str) -> Iterator[Client]:
    with library.connect(node_url) as client:
        yield client


@pytest.fixture
def topic(client: Client, on_node: str) -> str:
    return filled(client, on_node)
