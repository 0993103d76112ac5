"""The lineage of partitions: which replaced which, and when a query may begin to read a successor. Pure.

A topic's *route* says which partition holds which keys (`laminar.wire.key_route`). When it changes, a
partition, the *predecessor*, is sealed and others, its *successors*, take over its keys. The records of a key
are then first in the predecessor and then in a successor. The tasks of a batch run in parallel. So, to keep
their order, a successor is read only in batches after the one with the last record of its predecessors.
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.client.policy.lineage import Lineage
from laminar.spark.read.offsets import Partition, Positions

# For each successor the partitions that it replaces, with their final end offsets.
Replaced = Mapping[Partition, Mapping[Partition, int]]


def replaced(topic: str, lineage: Lineage) -> dict[Partition, dict[Partition, int]]:
    """Return for each successor the partitions that it replaces, with their final end offsets.

    A change with weak order lets its successors be read at once. A reclaimed predecessor has no records.
    """
    return {
        (topic, number): {(topic, each.partition): each.end for each in change.inputs if not each.reclaimed}
        for change in lineage.changes
        if change.strict
        for number in change.outputs
    }


def final_ends(topic: str, lineage: Lineage) -> dict[Partition, int]:
    """Return the ends of the partitions that have ended, behind which no record will ever be."""
    return {(topic, each.partition): each.end for change in lineage.changes for each in change.inputs}


def admitted(
    positions: Mapping[Partition, int], ends: Mapping[Partition, int], replaced: Replaced
) -> Positions:
    """Return `ends` without the partitions whose predecessors are not yet read to their ends."""
    # A predecessor may itself be a successor, and empty: its own predecessors count as well. Each partition
    # is looked at once, after those that it replaced, which have lower numbers.
    is_due: dict[Partition, bool] = {}
    for partition in sorted(replaced):
        is_due[partition] = all(
            positions.get(before, 0) >= end and is_due.get(before, True)
            for before, end in replaced[partition].items()
        )
    return {partition: end for partition, end in ends.items() if is_due.get(partition, True)}
