"""Cluster membership: which nodes seem alive (gossip), and the agreed metadata of the cluster (the catalog).

`gossip` (SWIM) tells which nodes seem alive, as a hint; `catalog` holds the agreed nodes, topics and
placement. Neither knows how bytes are replicated: the group that commits the catalog's commands is passed in
as a `Proposer`. See README.md beside this file.
"""
