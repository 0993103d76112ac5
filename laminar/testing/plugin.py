"""The pytest plug-in: the fixtures ``laminar_client`` and ``laminar_url``.

pytest finds this module through the distribution's entry point ``pytest11``. One server serves all tests of a
session; a test that needs a server of its own uses `laminar.testing.node`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from laminar.client.sync.client import Client


@pytest.fixture(scope="session")
def laminar_url() -> Iterator[str]:
    """Return the URL of a real server, started for this session."""
    from laminar.testing.nodes import serve

    with serve() as url:
        yield url


@pytest.fixture
def laminar_client(laminar_url: str) -> Iterator[Client]:
    """Return a client of the session's server. Name topics after the test: the server is shared."""
    from laminar.client.sync.client import connect

    with connect(laminar_url) as client:
        yield client
