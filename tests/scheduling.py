"""Order of the tests in a run with several workers: what takes long begins first, few clusters run at a time.

A module is one unit, as its tests may share fixtures. Spark's modules are one unit together, as they share a
session of a gigabyte. Extends pytest-xdist's `loadscope`; `tests/conftest.py` puts this in its place.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Beginnings of paths below tests/: units of half a minute and more, by CPU or by waiting, the longest first.
# What is not named comes after them, in the order of its path.
LONGEST = (
    "docs/",
    "spark/test_executors",
    "spark/",
    "client/consume/",
    "console/",
    "outbox/",
    "cluster/",
    "benches/",
    "ebpf/",
    "sim/",
    "raft/test_simulation",
    "log/test_machine",
    "test_guards",
    "crash/",
    "membership/test_swim",
    "cli/",
    "log/commit/",
    "log/recovery/",
)
# One unit, in one worker: Spark, and the pages, which name ports. But not what starts a Spark of its own.
TOGETHER = ("spark/", "docs/")
APART = ("spark/test_executors",)
# Each test is a unit: it has its own cluster, and waits most of the time.
SINGLE = ("cluster/test_real_faults",)
# Units that start several nodes each: at most so many workers have one at a time.
CROWDED = ("cluster/", "ebpf/")
MOST_CROWDED = 2


def place(path: str) -> str:
    """Return a test's path below tests/."""
    return path.removeprefix("tests/")


def turn(path: str) -> int:
    """Return when a test below tests/ has its turn: the smaller, the sooner."""
    return next((at for at, start in enumerate(LONGEST) if path.startswith(start)), len(LONGEST))


class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Units in the order in which they were collected, and never too many crowded ones at a time."""

    def _split_scope(self, nodeid: str) -> str:
        path = place(nodeid)
        if path.startswith(SINGLE):
            return nodeid
        for folder in TOGETHER:
            if path.startswith(folder) and not path.startswith(APART):
                return folder
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Assign the first unit that may be begun now; the first of all where there is no other."""
        under_way = sum(
            place(scope).startswith(CROWDED) and not all(unit.values())
            for units in self.assigned_work.values()
            for scope, unit in units.items()
        )
        if under_way >= MOST_CROWDED:
            for scope in self.workqueue:
                if not place(scope).startswith(CROWDED):
                    self.workqueue.move_to_end(scope, last=False)
                    break
        super()._assign_work_unit(node)


def scheduler(config: pytest.Config, log: Producer) -> LongestFirst:
    """Return the scheduler of a run with several workers."""
    config.option.loadscopereorder = False  # else by the number of tests
    return LongestFirst(config, log)
