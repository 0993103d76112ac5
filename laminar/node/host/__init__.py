"""The interface of a process to its machine: clocks, settings, logging, disk space, forks.

These modules do not depend on each other.
"""
