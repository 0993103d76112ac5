"""The work of `laminar.node.placement` done at once, for one state: nodes do it in slices."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from typing import TypeVar

from laminar.node.placement.balance import Decision, Survey, deciding
from laminar.node.placement.load import LoadReport
from laminar.node.placement.planner import Planner, Step
from laminar.node.placement.preferred_leaders import choosing
from laminar.node.placement.slices import SLICE
from laminar.node.placement.wanted import Wanted
from membership.records import CatalogState

Result = TypeVar("Result")


def whole(work: Generator[None, None, Result]) -> Result:
    """Do all work and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: Result = end.value
            return result


def plan(
    state: CatalogState,
    wanted: Wanted,
    *,
    gone: Collection[str],
    present: Collection[str],
    settled: Collection[str],
    voting: Collection[str] = (),
) -> list[Step]:
    """Return the steps to begin now, by a planner that has seen no other state."""
    planner = Planner(wanted)
    planner.follow(state, gone=gone, present=present, settled=settled)
    while planner.look(SLICE):
        pass
    return planner.steps(voting=voting)


def choose(state: CatalogState, *, unfit: Collection[str] = ()) -> dict[str, str]:
    return whole(choosing(state, unfit=unfit))


def obstacle(
    state: CatalogState, wanted: Wanted, reports: Mapping[str, LoadReport], *, absent: Collection[str]
) -> str:
    return whole(Survey(state, wanted).obstacle(reports, absent=absent))


def decide(
    state: CatalogState,
    wanted: Wanted,
    reports: Mapping[str, LoadReport],
    *,
    threshold: float,
    resting: Collection[str] = (),
) -> Decision:
    return whole(deciding(state, wanted, reports, threshold=threshold, resting=resting))
