"""Reading: one reader of a topic, cursors, channels, large values; members of a group in `group`.

Begin with `reader`.
"""
