"""A topic of a catalog's state, and steps of changes of its route."""

from __future__ import annotations

from typing import Any

import msgspec

from membership import catalog_rules, route_rules
from membership.records import (
    CatalogState,
    RouteChange,
    Seal,
    TopicRecord,
)
from membership.requests import (
    BeginChange,
    ChangeRoute,
    CloseChange,
    CreateTopic,
    MarkMade,
    RegisterNode,
    ReportSeal,
    Result,
    RouteStep,
)
from tests.membership.test_catalog import node

NODES = ["a", "b", "c"]
MADE = ("created", "updated", "deleted", "marked")


def group(number: int) -> bytes:
    return number.to_bytes(16, "big")


def do(state: CatalogState, step: RouteStep) -> tuple[CatalogState, Result]:
    """Perform a step as the log has it, twice: the second time it has been done already."""
    request = msgspec.json.decode(msgspec.json.encode(ChangeRoute(step)), type=ChangeRoute)
    after, result = route_rules.change_route(state, request)
    assert (result.outcome in MADE) == (after is not state) and after.version == result.version
    if after is not state:
        assert after.version == state.version + 1
        again, repeated = route_rules.change_route(after, request)
        assert again is after and repeated.outcome == "exists"
    return after, result


def made(state: CatalogState) -> CatalogState:
    """Let all nodes make all replicas."""
    groups = [each.group for each in state.partitions.values()]
    for name in NODES:
        state, _ = catalog_rules.mark_made(state, MarkMade(name, name.encode(), groups))
    return state


def with_topic(partitions: int = 3) -> CatalogState:
    state = CatalogState()
    for name in NODES:
        state, _ = catalog_rules.register_node(state, RegisterNode(node(name)))
    groups = [group(number + 1) for number in range(partitions)]
    request = CreateTopic("t", partitions, 3, {}, groups, [NODES] * partitions, 1)
    state, result = catalog_rules.create_topic(state, request)
    assert result.outcome == "created"
    return made(state)


def begin(
    *inputs: int, after: int = 0, cuts: tuple[int, ...] = (), seed: int = 100, **more: Any
) -> BeginChange:
    wanted: dict[str, Any] = {
        "groups": [group(seed + at) for at in range(len(cuts) + 1)],
        "placement": [NODES] * (len(cuts) + 1),
        "order": "strict",
        "begun_ms": 5,
        "wait_ms": 60_000,
    }
    return BeginChange("t", after, list(inputs), list(cuts), **(wanted | more))


def topic(state: CatalogState) -> TopicRecord:
    return state.topics["t"]


def under_way(state: CatalogState) -> RouteChange:
    change = topic(state).change
    assert change is not None
    return change


def sealed(state: CatalogState, *, number: int, end_offset: int = 812) -> ReportSeal:
    """Return the report of an input's leader for the change under way."""
    record = state.partitions[f"t/{number}"]
    return ReportSeal("t", under_way(state).id, number, record.group, Seal(7, end_offset, 1_000))


def changed(state: CatalogState, request: BeginChange) -> CatalogState:
    """Carry a change out to its end."""
    state, result = do(state, request)
    assert result.outcome == "created", result.detail
    state, result = do(made(state), CloseChange("t", under_way(state).id))
    for number in request.inputs:
        if topic(state).change is not None:
            state, result = do(state, sealed(state, number=number))
    assert topic(state).change is None, result.detail
    return state


def ranges(state: CatalogState) -> list[tuple[int, int, int]]:
    return [(each.number, each.first, each.size) for each in route_rules.route_of(topic(state)).ranges]
