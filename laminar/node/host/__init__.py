"""What a process takes from its machine: clocks, settings, logging, disk space, forks.

These modules know nothing of each other.
"""
