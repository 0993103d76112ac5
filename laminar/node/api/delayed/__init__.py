"""Routes of delayed records: list, describe, cancel, or change their delivery time.

`records` answers requests, `steps` asks the leaders of partitions.
"""
