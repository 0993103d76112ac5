"""Routes that look into records, and change nothing.

`search` answers requests, `places` is what a search has left between two of them, `steps` asks the replicas.
"""
