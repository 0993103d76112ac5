"""Cluster membership: who seems alive (gossip), and what the cluster has agreed on (the catalog).

`gossip` (SWIM) says who seems alive, as a hint; `catalog` holds what is agreed: nodes, topics, placement.
Neither knows how bytes are replicated: the group that agrees on the catalog's commands is passed in as a
`Proposer`. See README.md beside this file.
"""
