"""The secret that the nodes of a cluster share: its file, and its keys, one for each use."""
