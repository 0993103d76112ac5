"""Documents of a topic's partitions, their replicas, and their losses."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType, field

from laminar.http.api.documents.key_routes import KeyRange
from laminar.http.api.documents.shared import Answer, Count, Id, RouteVersion


class CatchUpProgress(Answer):
    """Progress of a replica whose log is rebuilt from whole segments."""

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
    """A range of offsets that are damaged on a node; a damaged control entry has no offsets."""

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
    """Of one that has ended, if its leader answers: the cursors at its end."""
    not_drained_by: dict[str, Count] | UnsetType = UNSET
    """The same for those that are not, and their positions."""


class Partitions(Answer):
    """The partitions of a topic, the key ranges of its route, and the number of partitions at its creation.

    Their numbers may have gaps.
    """

    topic: str
    route: RouteVersion
    partitions: list[Partition]
    ranges: list[KeyRange]
    created_with: Count


class LossReport(Answer):
    """The consequences of accepting a loss (docs/protocol.md#accepted-losses-and-trimming)."""

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
