"""A shard: one event loop with its partitions, and how their replicas are made and moved.

Begin with `shard`; `reconcile` compares what is here with what the catalog says.
"""
