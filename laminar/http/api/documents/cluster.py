"""The cluster and its nodes, as programs see them."""

from __future__ import annotations

from laminar.http.api.documents.shared import Answer, Count


class ShardAddress(Answer):
    """A shard of a node."""

    shard: Count
    url: str


class Node(Answer):
    """A node.

    `start` is the number of the start of its data folder that the catalog knows of, `code_version` the
    highest code version that its program knows.
    """

    node: str
    url: str
    peer: str
    shards: list[ShardAddress]
    weight: float
    status: str
    alive: bool
    rolled_back: bool
    start: Count
    code_version: Count


class Nodes(Answer):
    """The nodes of the cluster."""

    nodes: list[Node]


class Cluster(Answer):
    """The cluster as the node that answers sees it; `code_version` is the one that is enabled."""

    cluster_id: str | None
    version: int
    catalog_leader: str
    insecure: bool
    code_version: Count
    nodes: list[Node]
