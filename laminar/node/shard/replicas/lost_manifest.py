"""Recovery of a lost manifest: the replicas that the catalog has for this shard are entered as lost.

Without the manifest (the list of replicas in a store directory) nothing on this node says which replicas were
here and what they promised. If one were created again, it could vote a second time in a term that it has
forgotten. So this shard first waits for a view that is as new as the catalog's leader confirms. Every replica
that this view has for this store and this shard is entered into the manifest, durably, as one whose log is
missing. That includes replicas of groups still being created and replicas that are to leave: they may have
been created and have voted. A replica that the catalog adds later is created as usual, as it was never here
before.

Until then this shard creates, deletes and moves no replica, and does not answer questions about replicas that
it does not know (`laminar.node.consensus.lost_majority`). The lost replicas are then replaced like any others
(docs/consensus.md#births-and-removals).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from laminar.http.api.problems import Problem
from laminar.log.format.manifest import ReplicaEntry
from laminar.node.shard.replicas.context import ShardContext
from membership.records import (
    CatalogState,
    PartitionRecord,
    ReplicaRecord,
)
from router import owner_shard, partition_hash

_log = logging.getLogger("laminar.shard")

# No log has this id, so the replica is found to be lost.
NO_LOG = 0
# How many partitions a log line names.
MOST_NAMES = 50


class LostManifest:
    """Restores one shard's manifest from the catalog, if it was lost."""

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard

    async def settle(self) -> bool:
        """Restore the manifest if it was lost; return whether it is complete now.

        Return True at once if it was not lost, and False if the catalog cannot be asked now.

        Raises:
            TransportError: if the catalog did not answer.
            StorageError: if the manifest cannot be written.
        """
        shard = self._shard
        manifest = shard.storage.manifest
        if manifest.known:
            return True
        try:
            await shard.refresh_view()
        except Problem as error:
            _log.debug("cannot ask the catalog which replicas were here: %s", error.detail)
            return False
        assert shard.view.message is not None, "a view that is as new as the catalog"
        lost = [
            entry
            for entry in recorded_here(
                shard.view.message.catalog,
                node=shard.node,
                store_id=shard.store_id,
                shard=shard.number,
                shards=shard.shards,
            )
            # A group that already has an entry needs none: this store has one replica of it at most, and the
            # manifest has named that one since it was created.
            if manifest.of_group(entry.group) is None
        ]
        await shard.storage.change_manifest(
            lambda known: {each.replica_id: each for each in lost}, known=True
        )
        _log.critical(
            "the manifest of this shard was lost. According to the catalog it had %d replicas, "
            "which are lost: %s",
            len(lost),
            _names(lost) or "none",
        )
        alone = [entry for entry in lost if len(entry.voters) == 1]
        if alone:
            _log.critical(
                "%d partitions have no other replica, so they have no leader any more: %s. Their files are "
                "kept in folders of their names in logs/; `laminar group recover --accept-loss --empty` lets "
                "them continue, empty",
                len(alone),
                _names(alone),
            )
        for entry in lost:
            await shard.open(entry)
        return True


def _names(entries: list[ReplicaEntry]) -> str:
    names = [f"{entry.topic}/{entry.partition}" for entry in entries]
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def recorded_here(
    catalog: CatalogState, *, node: str, store_id: bytes, shard: int, shards: int
) -> list[ReplicaEntry]:
    """Return a manifest entry without a log for each replica that the catalog has for this store's shard."""
    return [
        _entry(catalog, record, replica)
        for _, record in sorted(catalog.partitions.items())
        if owner_shard(partition_hash(record.topic, record.number), shards) == shard
        for replica in _members(record)
        if (replica.node, replica.store_id) == (node, store_id)
    ]


def _members(record: PartitionRecord) -> Iterator[ReplicaRecord]:
    """Yield the placed replicas and those that are to leave; removed replicas never come back."""
    yield from record.replicas
    for each in record.leaving:
        yield each.replica


def _entry(catalog: CatalogState, record: PartitionRecord, replica: ReplicaRecord) -> ReplicaEntry:
    topic = catalog.topics.get(record.topic)
    return ReplicaEntry(
        log_id=NO_LOG,
        replica_id=replica.replica_id,
        incarnation=1,
        group=record.group,
        topic=record.topic,
        partition=record.number,
        partition_hash=partition_hash(record.topic, record.number),
        # Even if it never was made: then the group's creation can end, and the lost replica is replaced.
        state="made",
        created_ms=record.created_ms,
        voters=[(each.replica_id, each.node) for each in _members(record)],
        settings=dict(topic.settings) if topic is not None else {},
    )
