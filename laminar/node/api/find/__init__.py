"""Routes that search records and tell a record's history. They change nothing.

`search` answers requests, `places` encodes the rest of a search as a token for the next request, `steps` asks
the shards that have replicas.
"""
