"""A shard: one event loop with its partitions, and how their replicas are made and moved.

Begin with `shard`; `reconcile` makes the shard's replicas what the catalog says.
"""
