"""Transactions over several partitions: batches of a sink, staged and committed once.

Begin with `sinks`.
"""
