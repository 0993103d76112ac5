"""A shard: one event loop with its partitions.

Begin with `shard`; `replicas` brings the shard's replicas to what the catalog says.
"""
