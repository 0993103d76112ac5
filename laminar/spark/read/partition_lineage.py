"""Partitions that took the place of others, and when a query may begin to read them. Pure.

When a topic's route changes, a partition is sealed and others take over its keys. A key's order then runs
from the old partition into a new one; the tasks of a batch run side by side, so a successor is read only in
batches after the one that holds the last record of what it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from laminar.spark.read.offsets import Partition, Positions

# Of each successor the partitions that it replaces, with their final ends.
Replaced = Mapping[Partition, Mapping[Partition, int]]


def predecessors(routes: Sequence[Mapping[str, Any]]) -> dict[int, set[int]]:
    """For each partition that took over from others, which those are: by the routes of a topic, as its
    ``/routes`` lists them, each with ``version`` and ``ranges`` of ``from``, ``to`` and ``partition``.
    """
    found: dict[int, set[int]] = {}
    for before, after in pairwise(sorted(routes, key=lambda route: int(route["version"]))):
        old = {int(held["partition"]) for held in before["ranges"]}
        new = {int(held["partition"]) for held in after["ranges"]}
        for taken in after["ranges"]:
            if int(taken["partition"]) in old:
                continue
            given_up = found.setdefault(int(taken["partition"]), set())
            for held in before["ranges"]:
                overlap = held["from"] < taken["to"] and taken["from"] < held["to"]
                if overlap and int(held["partition"]) not in new:
                    given_up.add(int(held["partition"]))
    return found


def admitted(
    positions: Mapping[Partition, int], ends: Mapping[Partition, int], replaced: Replaced
) -> Positions:
    """`ends` without the partitions whose time has not come: what they replace is not read to its end."""

    def is_due(partition: Partition) -> bool:
        # What was replaced may itself be a successor, and empty: its own predecessors count as well.
        return all(
            positions.get(before, 0) >= end and is_due(before)
            for before, end in replaced.get(partition, {}).items()
        )

    return {partition: end for partition, end in ends.items() if is_due(partition)}
