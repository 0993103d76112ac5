"""Routes of delayed records: list them, cancel them, give them another time.

`records` answers requests, `steps` asks the leaders of partitions.
"""
