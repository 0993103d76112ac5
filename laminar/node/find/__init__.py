"""Search records of a partition by their content, and find the history of one record. Nothing is changed.

`where` has the conditions of a search, `examine` applies them to batches, `scan` reads a partition for that,
and `pace` lets one scan of a shard read at a time. `indexing` builds the key indexes that `by_index` uses;
`history` tells the events of one record.
"""
