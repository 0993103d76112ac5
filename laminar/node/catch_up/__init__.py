"""Catch-up: a replica far behind its group gets the log as whole segments (docs/consensus.md#catch-up).

`source` serves committed batches at the pace it is given; `install` builds a new log from them beside the
old one and lets it take the old one's place by one journal record; `lagging` is the leader's eye on who needs
it. Raft hears of none of the bytes: it only stops sending to a replica for that time.
"""
