"""Documents of the cluster and its nodes, for every client."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from laminar.http.api.documents.shared import Answer, Count, Time


class ShardAddress(Answer):
    """A shard of a node (one of its processes), and its own URL."""

    shard: Count
    url: str


class Node(Answer):
    """A node of the cluster, as every client may see it.

    `start` is the number of starts of its data folder, as the catalog recorded them. `rolled_back` tells that
    the folder is an older copy. `code_version` is the highest version of formats and commands that its
    program supports.
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
    """The cluster as the node that answers sees it.

    `code_version` is the version of formats and commands that is enabled, because all nodes support it.
    """

    cluster_id: str | None
    version: int
    catalog_leader: str
    insecure: bool
    code_version: Count
    nodes: list[Node]


class Remedy(Answer):
    """A piece of advice about a problem; `command` is a command line that helps, empty if there is none."""

    text: str
    command: str


class HealthProblem(Answer):
    """A problem of the cluster, and what to do about it (`do`).

    `subject` is what has the problem: a node, a topic, a partition as ``topic/number``, a consumer or channel
    as ``topic/name``, or ``catalog``. `since` is the earliest time at which one of the nodes that answered
    saw the problem.
    """

    code: str
    severity: Literal["warning", "critical"]
    subject: str
    since: Time
    text: str
    do: list[Remedy]


class NodeHealth(Answer):
    """The number of partitions that a node leads, and of replicas on it.

    `answers` tells whether the node answered; `leads` is null if not all of its shards did.
    """

    node: str
    answers: bool
    leads: Count | None
    replicas: Count


class Health(Answer):
    """The health of the cluster, as its nodes report it.

    `status` is ``critical`` if requests are refused now, or data may be lost. It is ``warning`` if the
    cluster works without reserve, or waits for an operator, and ``well`` if none of this is so and every node
    has answered.
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
