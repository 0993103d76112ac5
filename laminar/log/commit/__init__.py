"""How changes become durable: group commit, journal, segment writer and checkpoints.

Begin with `group_commit`, then `journal` and `segment_writer`.
"""
