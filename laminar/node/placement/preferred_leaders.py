"""The preferred leader of each partition: spread over the nodes by weight, changed as little as possible.

`choosing` returns what is to be changed. A partition keeps its preferred leader while that node is fit
and holds a replica that is created. A new one goes to the replica whose node leads least for its weight, the
better rank among equals. Then, while one node leads more than another by so much that handing over one
partition improves both, partitions change hands along the shortest chain of nodes that share them (augmenting
paths, as in bipartite matching). Leaders hand over by themselves (`laminar.node.shard`).
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Generator, Mapping
from itertools import islice

from laminar.node.placement.slices import SLICE
from laminar.node.placement.wanted import belonging_weights
from membership.records import CatalogState, PartitionRecord
from router import partition_hash, rank

MOST_CHANGES = 1000
"""Most partitions of one answer; the next one goes on."""


def choosing(state: CatalogState, *, unfit: Collection[str] = ()) -> Generator[None, None, dict[str, str]]:
    """Return, after some slices of work, the changes of preferred leaders: a node by "topic/number".

    `unfit` are nodes that have been gone for long. Partitions whose replicas are all unfit are left alone.
    """
    weights = belonging_weights(state, unfit=unfit)
    spread = _Spread(weights)
    changed: dict[str, str] = {}
    unassigned = []
    for number, (key, partition) in enumerate(state.partitions.items(), 1):
        if number % SLICE == 0:
            yield
        candidates = _candidates(partition, weights)
        if not candidates:
            continue
        leader = _leader(partition, candidates)
        if not leader:
            unassigned.append((key, partition, candidates))
        elif leader == partition.preferred_leader:
            spread.assign(key, candidates, leader)
        else:
            spread.count(leader)
    for key, partition, candidates in unassigned:
        if len(changed) >= MOST_CHANGES:
            break
        changed[key] = spread.least(_by_rank(partition, candidates, weights))
        spread.assign(key, candidates, changed[key])
    while len(changed) < MOST_CHANGES:
        moved = yield from spread.improve()
        if not moved:
            break
        changed.update(moved)
    return {key: node for key, node in changed.items() if state.partitions[key].preferred_leader != node}


class Leaders:
    """The number of partitions that each node should lead, updated partition by partition (`look`).

    From the counts it names a leader for a new partition at once, and tells whether `choosing` might improve
    the spread.
    """

    def __init__(self) -> None:
        self._weights: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._counted: dict[str, str] = {}
        self._without: dict[str, PartitionRecord] = {}

    def begin(self, weights: Mapping[str, float]) -> None:
        """Start again with these nodes and weights: call `look` for every partition next."""
        self._weights = dict(weights)
        self._counts = dict.fromkeys(weights, 0)
        self._counted, self._without = {}, {}

    def look(self, key: str, partition: PartitionRecord | None) -> None:
        """Update the counts with the present record of a partition; None if it no longer exists."""
        self._without.pop(key, None)
        counted = self._counted.pop(key, None)
        if counted is not None:
            self._counts[counted] -= 1
        candidates = [] if partition is None else _candidates(partition, self._weights)
        if partition is None or not candidates:
            return
        leader = _leader(partition, candidates)
        if leader:
            self._counts[leader] += 1
            self._counted[key] = leader
        else:
            self._without[key] = partition

    def missing(self) -> dict[str, str]:
        """Return a preferred leader for each partition that has none, for at most `MOST_CHANGES` of them."""
        counts, chosen = dict(self._counts), {}
        for key, partition in islice(self._without.items(), MOST_CHANGES):
            ranked = _by_rank(partition, _candidates(partition, self._weights), self._weights)
            chosen[key] = min(ranked, key=lambda node: (counts[node] + 1) / self._weights[node])
            counts[chosen[key]] += 1
        return chosen

    def uneven(self) -> bool:
        """Return whether a node leads more than another one would with one partition more."""
        least = min(((count + 1) / self._weights[node] for node, count in self._counts.items()), default=0.0)
        return any(count / self._weights[node] > least for node, count in self._counts.items())


def _candidates(partition: PartitionRecord, weights: Mapping[str, float]) -> list[str]:
    """Return the nodes that may lead a partition."""
    return [
        each.node
        for each in partition.replicas
        if each.made and not each.lost and not each.abandoned and each.node in weights
    ]


def _leader(partition: PartitionRecord, candidates: Collection[str]) -> str:
    """Return the node that is to lead a partition; empty if one is to be chosen."""
    if partition.preferred_leader in candidates:
        return partition.preferred_leader
    if not partition.preferred_leader and not all(each.made for each in partition.replicas):
        return next(iter(candidates))  # it grows, and is led where it is until then
    return ""


def transfer(state: CatalogState, key: str, node: str) -> dict[str, str]:
    """Return the preferred leaders to be changed so that `node` leads a partition, and goes on doing so.

    If `node` would lead too many then, the former leader gets one of its partitions in exchange, so that
    `choosing` finds nothing to change afterwards. If the two nodes share no such partition, `choosing` may
    change leaders again.
    """
    weights = belonging_weights(state)
    former = state.partitions[key].preferred_leader
    changed = {key: node}
    if former == node or former not in weights or node not in weights:
        return changed
    led = Counter(partition.preferred_leader for partition in state.partitions.values())
    if led[former] / weights[former] >= (led[node] + 1) / weights[node] - 1e-9:
        return changed
    for other, partition in sorted(state.partitions.items()):
        if other == key or partition.preferred_leader != node:
            continue
        if former in _candidates(partition, weights):
            return changed | {other: former}
    return changed


def _by_rank(
    partition: PartitionRecord, candidates: Collection[str], weights: Mapping[str, float]
) -> list[str]:
    hashed = partition_hash(partition.topic, partition.number)
    return rank(hashed, {node: weights[node] for node in candidates})


class _Spread:
    """How many partitions each node is to lead, and which others could lead them."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = weights
        self._counts = dict.fromkeys(weights, 0)
        self._candidates: dict[str, list[str]] = {}
        # By node: the partitions that it is to lead, in the order in which they were assigned.
        self._led: dict[str, dict[str, None]] = defaultdict(dict)

    def assign(self, key: str, candidates: list[str], node: str) -> None:
        self._candidates[key] = candidates
        self._led[node][key] = None
        self._counts[node] += 1

    def count(self, node: str) -> None:
        """Count a partition that a node leads and that is not to be handed over."""
        self._counts[node] += 1

    def least(self, ranked: list[str]) -> str:
        """Return the node that would lead least for its weight; the first among equals."""
        return min(ranked, key=lambda node: (self._counts[node] + 1) / self._weights[node])

    def improve(self) -> Generator[None, None, dict[str, str]]:
        """Hand partitions over along one chain from a node that leads too much; return what changed."""
        least = min(((count + 1) / self._weights[node] for node, count in self._counts.items()), default=0.0)
        for node in sorted(self._counts, key=lambda node: -self._load(node)):
            if self._load(node) <= least:
                break
            chain = yield from self._chain(node)
            if chain:
                return self._hand_over(chain)
        return {}

    def _load(self, node: str) -> float:
        return self._counts[node] / self._weights[node]

    def _chain(self, first: str) -> Generator[None, None, list[tuple[str, str]]]:
        """Return the partitions and their new nodes on the way from `first` to a node that leads too little.

        Too little: with one partition more it would still lead less for its weight than `first` does now.
        """
        most = self._load(first)
        came: dict[str, tuple[str, str]] = {}  # by node: the partition that it gets, and the node before it
        queue = deque([first])
        while queue:
            node = queue.popleft()
            for number, key in enumerate(self._led[node], 1):
                if number % SLICE == 0:
                    yield
                for other in self._candidates[key]:
                    if other == first or other in came:
                        continue
                    came[other] = (key, node)
                    if (self._counts[other] + 1) / self._weights[other] < most - 1e-9:
                        return self._way(came, first, other)
                    queue.append(other)
        return []

    def _way(self, came: Mapping[str, tuple[str, str]], first: str, last: str) -> list[tuple[str, str]]:
        chain = []
        node = last
        while node != first:
            key, before = came[node]
            chain.append((key, node))
            node = before
        return chain

    def _hand_over(self, chain: list[tuple[str, str]]) -> dict[str, str]:
        for key, node in chain:
            former = next(each for each, led in self._led.items() if key in led)
            del self._led[former][key]
            self._counts[former] -= 1
            self._led[node][key] = None
            self._counts[node] += 1
        return dict(chain)
