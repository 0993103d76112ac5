"""Where the replicas of a new topic go, as the catalog's leader sees the nodes now."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from laminar.node.catalog.balancing import Balancer
from laminar.node.catalog.service import CatalogService
from laminar.node.host.clock import Clock
from laminar.node.host.settings import Settings
from tests.membership.nodes import node

NAMES = "abcd"


@pytest.mark.parametrize(
    ("replicas", "broken", "suspect", "placed_on"),
    [
        (3, "", "", "abcd"),
        # Gossip has not noticed that it died; its connections broke.
        (3, "b", "", "acd"),
        (3, "", "c", "abd"),
        # All are needed: who is only late for a moment still counts.
        (4, "b", "", "abcd"),
        (3, "bc", "", "abcd"),
    ],
)
def test_a_topic_is_not_placed_on_a_node_that_has_just_died(
    replicas: int, broken: str, suspect: str, placed_on: str
) -> None:
    """Else it waits for that node, or for a replacement, before it has its replicas."""
    nodes = {name: replace(node(name), catalog_replica=number) for number, name in enumerate(NAMES, 1)}
    group = SimpleNamespace(
        replica=SimpleNamespace(replica_id=1),
        catalog=SimpleNamespace(state=lambda: SimpleNamespace(nodes=nodes)),
    )
    directory: Any = SimpleNamespace(
        node="a",
        group=group,
        placement_weights=lambda: dict.fromkeys(NAMES, 1.0),
        statuses=lambda: {name: "suspect" if name in suspect else "alive" for name in NAMES},
    )
    driver: Any = SimpleNamespace(is_active=lambda replica, member: NAMES[member - 1] not in broken)
    transport: Any = None
    service = CatalogService(
        directory,
        balancer=Balancer(Settings(), Clock()),
        driver=driver,
        transport=transport,
        clock=Clock(),
        rng=random.Random(1),
        max_partitions=100,
    )

    assert dict.fromkeys(placed_on, 1.0) == service.weights_for(replicas)
