"""Catch-up: a replica far behind its group gets the log as whole segments (docs/consensus.md#catch-up).

`source` serves committed batches at a bounded rate; `install` builds a new log from them beside the old one,
and switches to it by one journal record; `lagging` finds, on the leader, the replicas that need it. Raft
handles none of the bytes: it only stops sending to a replica for that time.
"""
