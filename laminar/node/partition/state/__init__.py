"""The tables that are derived from a partition's log: producers, keys, cursors, channels, sinks and others.

Begin with `state`, which combines them.
"""
