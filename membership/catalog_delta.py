"""The difference of two states of the catalog, so that copies are updated by the changed records only.

States share the parts of their tables and the records that did not change (`tables`), so a difference is
found by identity, and costs what changed. A delta names the version that it changes; a copy of another
version has a gap, and its owner asks for the whole state.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from membership.records import (
    CatalogState,
    CredentialRecord,
    LimitRecord,
    NodeRecord,
    PartitionRecord,
    Tombstone,
    TopicRecord,
)


class VersionGap(Exception):
    """A delta does not fit a copy: the delta changes version `since`, the copy has `version`."""

    def __init__(self, version: int, since: int) -> None:
        super().__init__(f"the copy has version {version}, the delta changes version {since}")


class CatalogDelta(msgspec.Struct, frozen=True, array_like=True):
    """The changes of each table from version `since` to `version`: by key the new record, None if removed."""

    since: int
    version: int
    cluster_id: bytes
    next_replica_id: int
    nodes: dict[str, NodeRecord | None]
    topics: dict[str, TopicRecord | None]
    partitions: dict[str, PartitionRecord | None]
    tombstones: dict[str, Tombstone | None]
    removed_stores: list[bytes] | None
    """The whole list; None: as before."""
    credentials: dict[str, CredentialRecord | None] = {}
    limits: dict[str, LimitRecord | None] = {}


def delta_between(before: CatalogState, after: CatalogState) -> CatalogDelta:
    """Return the delta that turns `before` into `after`."""
    return CatalogDelta(
        since=before.version,
        version=after.version,
        cluster_id=after.cluster_id,
        next_replica_id=after.next_replica_id,
        nodes=after.nodes.changes_since(before.nodes),
        topics=after.topics.changes_since(before.topics),
        partitions=after.partitions.changes_since(before.partitions),
        tombstones=after.tombstones.changes_since(before.tombstones),
        removed_stores=None if before.removed_stores == after.removed_stores else after.removed_stores,
        credentials=after.credentials.changes_since(before.credentials),
        limits=after.limits.changes_since(before.limits),
    )


def changed_by(before: CatalogState, delta: CatalogDelta) -> CatalogState:
    """Return the state after a delta. The tables that it does not change are shared with `before`.

    Raises:
        VersionGap: the delta changes another version.
    """
    if before.version != delta.since:
        raise VersionGap(before.version, delta.since)
    return replace(
        before,
        cluster_id=delta.cluster_id,
        version=delta.version,
        nodes=before.nodes.changed(delta.nodes),
        topics=before.topics.changed(delta.topics),
        partitions=before.partitions.changed(delta.partitions),
        next_replica_id=delta.next_replica_id,
        tombstones=before.tombstones.changed(delta.tombstones),
        removed_stores=before.removed_stores if delta.removed_stores is None else delta.removed_stores,
        credentials=before.credentials.changed(delta.credentials),
        limits=before.limits.changed(delta.limits),
    )
