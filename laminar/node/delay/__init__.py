"""Delayed records of the partitions that a shard leads: they are published when due, unless cancelled.

`publisher` publishes and changes the records of one partition, `carrier` copies those that are left in old
entries, `sender` sends those of a sealed partition on, `contents` reads entries with delayed records, and
`publishers` has these objects for each partition of a shard.
"""
