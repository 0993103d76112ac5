"""Placement: pure arithmetic on names, hashes and weights.

It computes which nodes should hold a partition, which shard of a node owns it, and which shard's socket a TCP
connection reaches. Everything is a function of its arguments alone, so a client, every node and (for
`owner_shard` and `shard_of_source_port`) a program in the kernel compute the same answer without a message.
These functions know neither which nodes are alive nor earlier results: a placement is computed once and then
*recorded* in the catalog, so two nodes with different knowledge never start one partition twice.
"""

from __future__ import annotations

from router.ownership import owner_shard, shard_of_source_port
from router.placement import partition_hash, place, rank

__all__ = ["owner_shard", "partition_hash", "place", "rank", "shard_of_source_port"]
