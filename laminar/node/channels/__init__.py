"""The channels of the partitions that this shard leads: they give out records to consumers.

To understand them, begin with `delivery`.
"""
