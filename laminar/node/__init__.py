"""The node: the only package that joins log, Raft, membership, routing and HTTP."""
