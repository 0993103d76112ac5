"""The lineage of partitions: which replaced which, and when a query may begin to read a successor. Pure.

When a topic's route changes, a partition is sealed and others take over its keys. A key's order then runs
from the old partition into a new one. The tasks of a batch run in parallel, so a successor is read only in
batches after the one that holds the last record of its predecessors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from laminar.spark.read.offsets import Partition, Positions

# For each successor the partitions that it replaces, with their final end offsets.
Replaced = Mapping[Partition, Mapping[Partition, int]]


def predecessors(routes: Sequence[Mapping[str, Any]]) -> dict[int, set[int]]:
    """Return for each partition that took over keys from others, which those are.

    `routes` are those of a topic as its ``/routes`` lists them: each has ``version``, and ``ranges`` of
    ``from``, ``to`` and ``partition``.
    """
    found: dict[int, set[int]] = {}
    for before, after in pairwise(sorted(routes, key=lambda route: int(route["version"]))):
        old = {int(held["partition"]) for held in before["ranges"]}
        new = {int(held["partition"]) for held in after["ranges"]}
        for taken in after["ranges"]:
            if int(taken["partition"]) in old:
                continue
            replaced = found.setdefault(int(taken["partition"]), set())
            for held in before["ranges"]:
                overlap = held["from"] < taken["to"] and taken["from"] < held["to"]
                if overlap and int(held["partition"]) not in new:
                    replaced.add(int(held["partition"]))
    return found


def admitted(
    positions: Mapping[Partition, int], ends: Mapping[Partition, int], replaced: Replaced
) -> Positions:
    """Return `ends` without the partitions whose predecessors are not yet read to their ends."""

    def is_due(partition: Partition) -> bool:
        # A predecessor may itself be a successor, and empty: its own predecessors count as well.
        return all(
            positions.get(before, 0) >= end and is_due(before)
            for before, end in replaced.get(partition, {}).items()
        )

    return {partition: end for partition, end in ends.items() if is_due(partition)}
