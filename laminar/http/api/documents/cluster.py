"""The cluster and its nodes, as programs see them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from laminar.http.api.documents.shared import Answer, Count, Time


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


class Remedy(Answer):
    """Something to do about a problem; `command` is one of the command line, empty where none helps."""

    text: str
    command: str


class HealthProblem(Answer):
    """A problem of the cluster.

    `subject` is a node, a topic, a partition as ``topic/number``, a consumer or channel as ``topic/name``, or
    ``catalog``. `since`: when a node that answers saw it first.
    """

    code: str
    severity: Literal["warning", "critical"]
    subject: str
    since: Time
    text: str
    do: list[Remedy]


class NodeHealth(Answer):
    """What a node leads and holds; `leads` is null where not all of its shards answer."""

    node: str
    answers: bool
    leads: Count | None
    replicas: Count


class Health(Answer):
    """The health of the cluster, as its nodes tell it.

    ``critical``: something is refused now, or may be lost. ``warning``: it works, but has no reserve, or
    waits for an operator. ``well``: neither, and every node has answered.
    """

    status: Literal["well", "warning", "critical"]
    problems: list[HealthProblem]
    left_out: Annotated[
        dict[str, Count],
        Meta(
            description="By code, problems that are not listed: beyond 100, or of topics that are not yours."
        ),
    ]
    silent: Annotated[list[str], Meta(description="Nodes that do not answer: nothing of them is known.")]
    nodes: list[NodeHealth]
    topics: Count
    partitions: Count
