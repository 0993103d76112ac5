"""Reading: one reader of a topic, members of a group, cursors and leases.

Begin with `reader` and `subscription`.
"""
