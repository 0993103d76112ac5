"""The node: the package that joins log, Raft, membership, routing and HTTP into a server."""
