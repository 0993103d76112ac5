"""The node: the one place where log, Raft, membership, routing and HTTP are joined."""
