"""Catch-up: a replica far behind its group gets the log as whole segments (docs/consensus.md#catch-up).

`source` serves committed entries at a bounded rate; `install` builds a new log from them beside the old one,
and switches to it by one journal record; `lagging` finds, on the leader, the replicas that need a new log.
Raft transfers none of these bytes: during a catch-up its leader only stops sending entries to the replica.
"""
