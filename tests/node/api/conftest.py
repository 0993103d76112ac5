"""One node of two shards for each module of the API's tests: each test makes topics of its own.

It ends with the module, so that no module depends on what another left behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import httpx
import pytest

from laminar.testing.nodes import serve
from tests.node.api.asking import MAX_APPEND_BYTES, Partition

_numbers = itertools.count()


@pytest.fixture(scope="module")
def api_url() -> Iterator[str]:
    """The server's shared port."""
    with serve(shards=2, settings={"max_append_bytes": MAX_APPEND_BYTES}) as url:
        yield url


@pytest.fixture(scope="module")
def http(api_url: str) -> Iterator[httpx.Client]:
    """A client that keeps its connections and knows nothing of Laminar."""
    with httpx.Client(base_url=api_url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def new_topic(http: httpx.Client) -> Callable[..., str]:
    """Makes a topic and gives its name."""

    def make(partitions: int = 1) -> str:
        name = f"topic-{next(_numbers)}"
        made = http.put(f"/v1/topics/{name}", json={"partitions": partitions})
        assert 201 == made.status_code, made.text
        return name

    return make


@pytest.fixture
def partition(http: httpx.Client, new_topic: Callable[..., str]) -> Partition:
    """The only partition of a new topic."""
    return Partition(http, new_topic())
