"""Order of the tests in a run with several workers: what takes long begins first, few clusters run at a time.

A module is one unit, as its tests may share fixtures. Spark's modules are one unit together, as they share a
session of a gigabyte. Of four workers or more the first one is in the background: it runs what only computes,
at a lower priority, while the others wait for a disk, a timer or Java. Extends pytest-xdist's `loadscope`;
`tests/conftest.py` puts this in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Beginnings of paths below tests/: units of half a minute and more, by CPU or by waiting, the longest first.
# What is not named comes after them, in the order of its path; but what computes comes last.
LONGEST = (
    "docs/",
    "spark/test_executors",
    "spark/",
    "cluster/test_real_faults",
    "cluster/test_demo",
    "cluster/test_life",
    "client/consume/",
    "console/",
    "outbox/",
    "cluster/",
    "benches/",
    "ebpf/",
    "log/test_machine",
    "test_guards",
    "crash/",
    "cli/",
    "log/commit/",
    "log/recovery/",
)
# Units that only compute, the longest first. Their time is simulated, so they may be run late by any time.
COMPUTED = (
    "sim/test_replacement",
    "sim/test_routes",
    "sim/test_growth",
    "sim/test_roll_back",
    "sim/",
    "raft/test_simulation",
    "membership/gossip/test_swim",
    "raft/",
    "batch/",
    "router/",
)
# One unit, in one worker: Spark, the pages, which name ports, and backups, which share a node. But not what
# starts a Spark of its own.
TOGETHER = ("spark/", "docs/", "cli/backup/")
APART = ("spark/test_executors",)
# Each test is a unit: it has its own cluster, and waits most of the time.
SINGLE = ("cluster/test_real_faults",)
# Units that start several nodes each: at most so many workers have one at a time.
CROWDED = ("cluster/", "ebpf/")
MOST_CROWDED = 2
BACKGROUND = "gw0"
LEAST_FOR_BACKGROUND = 4
"""Fewer workers have none in the background."""
NICE = 5
"""Of the worker in the background: a third of the time that another process gets while both want it."""


def place(path: str) -> str:
    """Return a test's path below tests/."""
    return path.removeprefix("tests/")


def turn(path: str) -> int:
    """Return when a test below tests/ has its turn: the smaller, the sooner."""
    for at, start in enumerate(COMPUTED):
        if path.startswith(start):
            return len(LONGEST) + 1 + at
    return next((at for at, start in enumerate(LONGEST) if path.startswith(start)), len(LONGEST))


def in_background(worker: str, workers: int) -> bool:
    """Return whether a worker, by its name among so many, is the one in the background.

    In a run of which nothing only computes (`some_compute`) it is as the others.
    """
    return worker == BACKGROUND and workers >= LEAST_FOR_BACKGROUND


def some_compute(tests: Iterable[str]) -> bool:
    """Return whether one of these tests, by their ids, only computes."""
    return any(place(test).startswith(COMPUTED) for test in tests)


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Units in the order in which they were collected, and never too many crowded ones at a time."""

    # Whether some of the tests only compute; None until they are collected.
    _computed: bool | None = None

    def _split_scope(self, nodeid: str) -> str:
        path = place(nodeid)
        if path.startswith(SINGLE):
            return nodeid
        for folder in TOGETHER:
            if path.startswith(folder) and not path.startswith(APART):
                return folder
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Assign the first unit that this worker may begin now; the first of all where there is none.

        A worker gets its next unit while it is at the end of one. So who has a crowded unit goes on with the
        next one, and does not count itself.
        """
        if self._in_background(node):
            self._prefer(COMPUTED)
        elif MOST_CROWDED <= sum(
            _has_crowded(units) for other, units in self.assigned_work.items() if other is not node
        ):
            self._prefer(CROWDED, not_these=True)
        super()._assign_work_unit(node)

    def _prefer(self, starts: tuple[str, ...], *, not_these: bool = False) -> None:
        """Put the first unit whose path begins so before all others, or the first of which does not."""
        for scope in self.workqueue:
            if place(scope).startswith(starts) != not_these:
                self.workqueue.move_to_end(scope, last=False)
                break

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker more when it has little left; that in the background ends when all is computed."""
        if node.shutting_down:
            return
        computed = any(place(scope).startswith(COMPUTED) for scope in self.workqueue)
        if self._in_background(node) and not computed:
            node.shutdown()
        else:
            super()._reschedule(node)

    def _in_background(self, node: WorkerController) -> bool:
        if self._computed is None:
            self._computed = some_compute(self.collection or ())
        return self._computed and in_background(node.gateway.id, self.numnodes)


def _has_crowded(units: Mapping[str, Mapping[str, bool]]) -> bool:
    """Return whether a worker has a crowded unit that it has not finished."""
    return any(place(scope).startswith(CROWDED) and not all(unit.values()) for scope, unit in units.items())


def scheduler(config: pytest.Config, log: Producer) -> LongestFirst:
    """Return the scheduler of a run with several workers."""
    config.option.loadscopereorder = False  # else by the number of tests
    return LongestFirst(config, log)
