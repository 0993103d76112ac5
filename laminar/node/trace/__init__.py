"""The trace of records: events of what happens to them, and who caused it, for the topic `_trace`."""
