"""Fair shares of one loop: what has many bytes waits, so that small appends and Raft do not.

Begin with `bulk`.
"""
