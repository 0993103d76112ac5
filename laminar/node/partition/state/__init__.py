"""The tables that follow from a partition's log: producers, keys, cursors, sinks, stages.

Begin with `state`, which holds them together.
"""
