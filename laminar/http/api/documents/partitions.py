"""Documents of a topic's partitions, their replicas, and their losses."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from laminar.http.api.documents.key_routes import KeyRange
from laminar.http.api.documents.shared import Answer, Count, Id, RouteVersion


class CatchUpProgress(Answer):
    """The progress of a replica that gets its log from another replica, in whole segments."""

    received_bytes: Count
    source_bytes: Count


class ReplicaStatus(Answer):
    """A replica of a partition; a member that is null was not reported by its node."""

    node: str
    url: str | None
    role: Literal["leader", "follower"]
    reachable: bool
    in_sync: bool
    reason: str
    state: Literal["made", "joining", "catching_up", "failed", "lost"]
    catch_up: CatchUpProgress | None
    recovering: bool | None
    abandoned: bool | None
    end_offset: Count | None
    lag: int | None


class Leader(Answer):
    """The replica that leads a partition."""

    node: str
    url: str | None


class DamagedOffsets(Answer):
    """A range of records whose bytes are damaged on a node, from `first_offset` to before `next_offset`.

    A damaged entry without records has an empty range.
    """

    node: str
    first_offset: Count
    next_offset: Count


class LeavingReplica(Answer):
    """A replica that was replaced and is still a member of the group."""

    node: str
    why: str


class Partition(Answer):
    """A partition; a member that is null is unknown at the moment."""

    partition: Count
    id: Id
    state: Literal["creating", "live"]
    leader: Leader | None
    term: Count | None
    start_offset: Count | None
    end_offset: Count | None
    bytes: Count | None
    damaged: list[DamagedOffsets]
    replicas: list[ReplicaStatus]
    leaving: list[LeavingReplica]
    status: Annotated[
        Literal["waiting", "open", "sealing", "sealed"],
        Meta(description="Whether it takes records: not yet, yes, until a moment ago, or no more."),
    ]
    start: Annotated[int, Meta(description="The first of its logical partitions.")] = field(name="from")
    to: Annotated[int, Meta(description="The logical partition after its last.")]
    inputs: Annotated[list[Count], Meta(description="The partitions that it follows.")]
    outputs: Annotated[list[Count], Meta(description="The partitions that follow it.")]
    drained_by: list[str] | UnsetType = UNSET
    """The cursors that have reached the end of a partition that has ended, if its leader answers."""
    not_drained_by: dict[str, Count] | UnsetType = UNSET
    """The cursors that have not reached that end, and their positions."""


class Partitions(Answer):
    """The partitions of a topic, the key ranges of its route, and the number of partitions at its creation.

    The numbers of the partitions may have gaps, because a change of the route ends partitions.
    """

    topic: str
    route: RouteVersion
    partitions: list[Partition]
    ranges: list[KeyRange]
    created_with: Count


class LossReport(Answer):
    """The consequences of accepting the loss of replicas (docs/protocol.md#accepted-losses-and-trimming).

    The partition continues with the log of the replica on node `goes_on_from`. That replica knows the records
    up to `committed_offset` as committed, and its log ends at `kept_offset`: records that only other replicas
    have after that may be lost. `accept_loss` tells whether the loss was accepted, or this is only a preview.
    """

    topic: str
    partition: Count
    accept_loss: bool
    answering: list[str]
    recovering: list[str]
    absent: list[str]
    abandoned: list[str]
    goes_on_from: str
    committed_offset: Count
    kept_offset: Count
    accepted: list[str]
