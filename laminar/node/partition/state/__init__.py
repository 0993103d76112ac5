"""The tables that follow from a partition's log: producers, keys, cursors, sinks, stages, its end.

Begin with `state`, which holds them together.
"""
