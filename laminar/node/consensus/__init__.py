"""Raft's driver: it carries out what the core decides, for all groups of a process.

Begin with `driver` and `replica`.
"""
