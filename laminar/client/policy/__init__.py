"""The client's decisions as pure functions: retries, choice of nodes, assignment of partitions.

Begin with `retry` and `routing`. Nothing here has a clock, a socket or a thread.
"""
