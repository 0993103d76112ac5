"""One node of two shards for the modules of the API's tests: each test makes topics of its own.

Modules that look at the node as a whole, drain it or exhaust it have one of their own, which ends with them:
so none depends on what another left behind.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from laminar.testing.nodes import serve
from tests.node.api.asking import MAX_APPEND_BYTES, Partition

HERE = Path(__file__).parent
# What has a node of its own, by the beginnings of paths below this folder.
APART = (
    "admin/",
    "channels/test_api_jobs",
    "channels/test_streams",
    "cluster/test_api_node",
    "metrics/",
    "test_api_described",
    "test_api_fuzz",
    "test_api_limits",
)

_numbers = itertools.count()


class SharedNode:
    """The node of the modules that are not apart: it runs from the first of them to the last in a row."""

    def __init__(self) -> None:
        self._running = contextlib.ExitStack()
        self._url: str | None = None

    def url(self) -> str:
        """Where it is; it is started if it does not run."""
        if self._url is None:
            self._url = self._running.enter_context(_node())
        return self._url

    def end(self) -> None:
        self._url = None
        self._running.close()


_shared = SharedNode()


def _node() -> contextlib.AbstractContextManager[str]:
    return serve(shards=2, settings={"max_append_bytes": MAX_APPEND_BYTES})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """End the shared node behind the last test of this folder, when the fixtures are through."""
    try:
        return (yield)
    finally:
        if nextitem is None or HERE not in nextitem.path.parents:
            _shared.end()


@pytest.fixture(scope="module")
def api_url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The server's shared port."""
    if request.path.relative_to(HERE).as_posix().startswith(APART):
        with _node() as url:
            yield url
    else:
        yield _shared.url()


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
