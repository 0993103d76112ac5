"""One replica of a partition: its appends and their waiters, its readers, and the start of its log.

Begin with `partition`.
"""
