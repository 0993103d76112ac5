"""The channels of the partitions that this shard leads: what is given out, and when it comes back.

Begin with `delivery`.
"""
