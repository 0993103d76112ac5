"""The lineage of partitions: which replaced which, and when a query may begin to read a successor. Pure.

A topic's *route* says which partition holds which keys (`laminar.wire.key_route`). When it changes, a
partition, the *predecessor*, is sealed and others, its *successors*, take over its keys. The records of a key
are then first in the predecessor and then in a successor. The tasks of a batch run in parallel. So, to keep
their order, a successor is read only in batches after the one with the last record of its predecessors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from laminar.spark.read.offsets import Partition, Positions

# For each successor the partitions that it replaces, with their final end offsets.
Replaced = Mapping[Partition, Mapping[Partition, int]]


def predecessors(routes: Sequence[Mapping[str, Any]]) -> dict[int, set[int]]:
    """Return the predecessors of each partition that took over keys, by partition number.

    `routes` are a topic's routes as the API's ``/routes`` lists them: each has ``version``, and ``ranges`` of
    ``from``, ``to`` and ``partition``. A partition that the new route still has is no predecessor.
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
