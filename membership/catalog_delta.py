"""The difference of two states of the catalog, so that a copy is kept up to date by what changed alone.

States share the tables and the records that did not change (`records`), so a difference is found by identity:
a table that is the same object is skipped whole. A delta names the version that it changes; a copy of another
version has a gap, and its owner asks for the whole state.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from msgspec.structs import replace

from membership.records import CatalogState, NodeRecord, PartitionRecord, Tombstone, TopicRecord

Record = TypeVar("Record")


class VersionGap(Exception):
    """A delta changes another version than the copy's: `since` in place of `version`."""

    def __init__(self, version: int, since: int) -> None:
        super().__init__(f"the copy has version {version}, the delta changes version {since}")


class CatalogDelta(msgspec.Struct, frozen=True, array_like=True):
    """What changed from version `since` to `version`: by key the new record, None for one that is gone."""

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


def delta_between(before: CatalogState, after: CatalogState) -> CatalogDelta:
    """Return what changes `before` into `after`."""
    return CatalogDelta(
        since=before.version,
        version=after.version,
        cluster_id=after.cluster_id,
        next_replica_id=after.next_replica_id,
        nodes=_changes(before.nodes, after.nodes),
        topics=_changes(before.topics, after.topics),
        partitions=_changes(before.partitions, after.partitions),
        tombstones=_changes(before.tombstones, after.tombstones),
        removed_stores=None if before.removed_stores == after.removed_stores else after.removed_stores,
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
        nodes=_with(before.nodes, delta.nodes),
        topics=_with(before.topics, delta.topics),
        partitions=_with(before.partitions, delta.partitions),
        next_replica_id=delta.next_replica_id,
        tombstones=_with(before.tombstones, delta.tombstones),
        removed_stores=before.removed_stores if delta.removed_stores is None else delta.removed_stores,
    )


def _changes(before: dict[str, Record], after: dict[str, Record]) -> dict[str, Record | None]:
    if before is after:
        return {}
    changes: dict[str, Record | None] = {
        key: record for key, record in after.items() if before.get(key) is not record
    }
    if len(before) + len(changes) > len(after):  # else each key of `before` is still there
        changes.update((key, None) for key in before if key not in after)
    return changes


def _with(table: dict[str, Record], changes: dict[str, Record | None]) -> dict[str, Record]:
    if not changes:
        return table
    after = dict(table)
    for key, record in changes.items():
        if record is None:
            after.pop(key, None)
        else:
            after[key] = record
    return after
