"""The Raft driver, which performs the decisions of the Raft cores of all groups of a process.

Begin with `driver` and `replica`.
"""
