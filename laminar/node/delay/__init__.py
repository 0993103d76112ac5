"""Delayed records of the partitions that a shard leads: published when due, cancelled, kept, sent on.

`publisher` publishes and changes those of one partition, `carrier` copies what is left in old entries,
`contents` reads entries with delayed records, `publishers` has one for each partition of a shard.
"""
