"""The trace of records: events of what happens to them and who did it, on their way to the topic `_trace`."""
