"""The trace of records: its way from a shard's ring to the topic `_trace`, and the route that reads it."""
