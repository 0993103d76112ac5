"""The choice of the nodes that should hold a partition, by weighted rendezvous hashing.

Every node draws a number from (partition, node name, weight); the partition ranks the nodes by it and the
first k hold its replicas. The score is ``-weight / ln(u)`` with u uniform in (0, 1) from 64 hashed bits (C.
Schindelhauer and G. Schomaker, "Weighted Distributed Hash Tables", 2005: the logarithmic method). Then

1. a node is ranked first for a share of the partitions equal to its share of the weights;
2. a score depends on that node alone, so when a node joins, leaves or changes its weight, no two *other*
   nodes change their order: only partitions that the changed node wins or loses move.

The logarithm is the platform's, so two platforms might order two scores that differ in the last bit
differently. That can't split a cluster: the answer is computed once, by the proposer of a placement, and
recorded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from struct import Struct

import mmh3

_U32 = Struct("<I")


def partition_hash(topic: str, number: int) -> int:
    """Return the 32-bit hash that represents a partition in placement, ownership and steering.

    mmh3 (x86, 32 bits, seed 0, unsigned) of the topic's name in UTF-8, a zero byte, and the partition's
    number as little-endian u32. The zero byte keeps ("a", n) and ("a...", m) apart; names hold none.
    """
    assert 0 <= number < 1 << 32, number
    assert "\0" not in topic, topic
    return mmh3.hash(topic.encode() + b"\0" + _U32.pack(number), 0, signed=False)


def score(partition_hash: int, node: str, weight: float) -> float:
    """Return this node's draw for the partition: positive, finite, larger is better.

    The bits are the low 64 of the 128-bit mmh3 (x64, seed 0) of the partition hash (u32, little-endian) and
    the node's name in UTF-8.
    """
    assert 0 <= partition_hash < 1 << 32, partition_hash
    assert weight > 0 and math.isfinite(weight), (node, weight)
    low, _ = mmh3.mmh3_x64_128_utupledigest(_U32.pack(partition_hash) + node.encode(), 0)
    # 52 bits and a half: exact in a double, never 0 and never 1 (with 53 bits the largest would round to 1,
    # whose logarithm is 0).
    uniform = ((low >> 12) + 0.5) / (1 << 52)
    return -weight / math.log(uniform)


def rank(partition_hash: int, weights: Mapping[str, float]) -> list[str]:
    """Return every node of positive weight, best first; equal scores are ordered by name.

    A node of weight 0 is left out: it is being drained, or must not hold partitions at all.
    """
    scores = {node: score(partition_hash, node, weight) for node, weight in weights.items() if weight != 0}
    return sorted(scores, key=lambda node: (-scores[node], node))


def place(
    partition_hash: int, weights: Mapping[str, float], k: int, *, zones: Mapping[str, str] | None = None
) -> list[str]:
    """Return the k best nodes for the partition, best first; fewer if there are fewer nodes.

    `zones` has the failure domain of each node; a node without one is a zone of its own. With it, each next
    node is the best among the nodes of the zones that were chosen least often so far, so no zone holds two
    replicas while another holds none.
    """
    assert k >= 0, k
    ranked = rank(partition_hash, weights)
    if not zones:
        return ranked[:k]
    chosen: list[str] = []
    taken: Counter[str] = Counter()
    while ranked and len(chosen) < k:
        # min returns the first of equals, so the best ranked.
        best = min(ranked, key=lambda node: taken[_zone(node, zones)])
        ranked.remove(best)
        taken[_zone(best, zones)] += 1
        chosen.append(best)
    return chosen


def _zone(node: str, zones: Mapping[str, str]) -> str:
    """Return a node's zone; for a node without one, a text that is no other node's zone."""
    return zones.get(node) or f"\0{node}"
