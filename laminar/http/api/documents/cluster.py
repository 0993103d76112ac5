"""Documents of the cluster and its nodes, for every client."""

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

    `start` counts the starts of its data folder, as the catalog recorded them; `code_version` is the highest
    code version that its program supports.
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
    """Advice about a problem; `command` is a command line, empty if none helps."""

    text: str
    command: str


class HealthProblem(Answer):
    """A problem of the cluster.

    `subject` is a node, a topic, a partition as ``topic/number``, a consumer or channel as ``topic/name``, or
    ``catalog``. `since` is the time when one of the nodes that answered first saw it.
    """

    code: str
    severity: Literal["warning", "critical"]
    subject: str
    since: Time
    text: str
    do: list[Remedy]


class NodeHealth(Answer):
    """What a node leads and holds; `leads` is null if not all of its shards answer."""

    node: str
    answers: bool
    leads: Count | None
    replicas: Count


class Health(Answer):
    """The health of the cluster, as its nodes report it.

    ``critical`` means that requests are refused now, or that data may be lost; ``warning`` that the cluster
    works without reserve, or waits for an operator; ``well`` neither, with an answer of every node.
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
