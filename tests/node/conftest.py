"""Fixtures of the node's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from laminar.node.runtime.listeners import NodeSockets


@pytest.fixture
def opened() -> Iterator[list[NodeSockets]]:
    """Whatever a test opens and appends here is closed afterwards."""
    nodes: list[NodeSockets] = []
    yield nodes
    for node in nodes:
        node.close()
