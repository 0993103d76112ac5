"""The common part of controller and shards: sockets, data folder, storage, transport and driver.

Begin with `boot`, the values that a supervisor gives its child, and `process`, the base of controller and
shard.
"""
