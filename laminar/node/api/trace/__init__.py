"""The trace of records: the task that writes a shard's events to topic `_trace`, and the route to read it."""
