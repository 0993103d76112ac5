"""The wanted set: the nodes that should hold a partition, from the catalog alone.

It depends on the nodes that *belong* (registered, not draining, of positive weight, their folder no older
copy) and not on which of them are alive now: a node that restarts moves nothing. The order is the weighted
rendezvous of `router.placement`, spread over the zones first. The nodes of a pin come first, as far
as they belong; if they are too few, the rank fills the rest.
"""

from __future__ import annotations

from collections.abc import Collection

from membership.records import CatalogState, PartitionRecord
from router import partition_hash, place


def belonging_weights(state: CatalogState, *, unfit: Collection[str] = ()) -> dict[str, float]:
    """Return, by node, the weights of the nodes that belong (may hold replicas), without `unfit` ones."""
    return {
        name: node.effective_weight
        for name, node in sorted(state.nodes.items())
        if node.effective_weight > 0 and not node.draining and not node.rolled_back and name not in unfit
    }


def zones_of(state: CatalogState) -> dict[str, str]:
    """Return, by node, the zones (failure domains) of the nodes that have one."""
    return {name: node.effective_zone for name, node in state.nodes.items() if node.effective_zone}


def wanted_number(state: CatalogState, partition: PartitionRecord) -> int:
    """Return how many replicas a partition should have.

    That is the number of nodes to which an operator has pinned it or, without a pin, its topic's number of
    replicas.
    """
    return state.topics[partition.topic].replicas if partition.pin is None else len(partition.pin.nodes)


def wanted_nodes(
    state: CatalogState, partition: PartitionRecord, *, unfit: Collection[str] = ()
) -> list[str]:
    """Return the nodes that should hold a partition, best first; fewer than wanted if too few belong.

    `unfit` are nodes that are left out because they have been gone for long.
    """
    return Wanted(state, unfit=unfit).nodes(partition)


class Wanted:
    """The wanted sets of all partitions, for one state of the catalog's nodes; each is computed once."""

    def __init__(self, state: CatalogState, *, unfit: Collection[str] = ()) -> None:
        self._weights = belonging_weights(state, unfit=unfit)
        self._zones = zones_of(state)
        self._topics = state.topics
        self._known: dict[tuple[str, int, int], list[str]] = {}

    def follow(self, state: CatalogState, *, unfit: Collection[str] = ()) -> None:
        """Use `state` from now on. Results are kept if nodes, weights and zones are still the same."""
        weights, zones = belonging_weights(state, unfit=unfit), zones_of(state)
        if (weights, zones) != (self._weights, self._zones):
            self._known = {}
        elif len(self._known) > 2 * len(state.partitions) + 16:
            self._known = {}  # most of it is of topics that are deleted
        self._weights, self._zones, self._topics = weights, zones, state.topics

    def nodes(self, partition: PartitionRecord) -> list[str]:
        """Return the nodes that should hold a partition, best first."""
        if partition.pin is None:
            return self._by_rank(partition, self._topics[partition.topic].replicas)
        number = len(partition.pin.nodes)
        pinned = [name for name in partition.pin.nodes if name in self._weights]
        if len(pinned) == number:
            return pinned
        ranked = self._by_rank(partition, len(self._weights))
        return [*pinned, *(name for name in ranked if name not in pinned)][:number]

    def order(self, partition: PartitionRecord) -> list[str]:
        """Return all nodes that belong, in the order in which they would be chosen for a partition."""
        return self._by_rank(partition, len(self._weights))

    def _by_rank(self, partition: PartitionRecord, number: int) -> list[str]:
        key = (partition.topic, partition.number, number)
        known = self._known.get(key)
        if known is None:
            hashed = partition_hash(partition.topic, partition.number)
            known = self._known[key] = place(hashed, self._weights, number, zones=self._zones)
        return known
