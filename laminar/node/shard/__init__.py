"""A shard: one event loop with its partitions, and how their replicas are created and moved.

Begin with `shard`; `reconcile` brings the shard's replicas to what the catalog says.
"""
