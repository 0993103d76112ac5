"""Reconciliation of a shard with the catalog: create and remove replicas, apply settings, start elections.

A replica is created, and data is deleted, only after the catalog's leader has confirmed the reason, because
the copy in a view may be outdated (docs/consensus.md#births-and-removals). Each step may be interrupted
anywhere, and is then repeated. Replicas that join or leave live groups are handled in `replica_moves`. The
partitions that a step has to look at are on its work list (`work_lists`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence

import msgspec

from laminar.log.disk.errors import DiskError, LogRemoved, ReplicaStopped, StorageClosed, StorageError
from laminar.log.format.manifest import ReplicaEntry
from laminar.node.catalog.messages.requests import ConfirmRequest, MadeRequest, RemovedRequest
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.consensus.replica import initial_frame
from laminar.node.partition.flush_policy import policy_of
from laminar.node.partition.partition import Partition
from laminar.node.shard.replicas.context import ShardContext
from laminar.node.shard.replicas.work_lists import WorkLists
from membership.records import (
    AcceptedLoss,
    PartitionRecord,
    TopicRecord,
)
from router import partition_hash

_log = logging.getLogger("laminar.shard")

RETRY_S = 0.2
# Seconds after which it is checked again whether a batch is still prepared or has pins.
PINNED_S = 1.0
FIRST_TERM = 1


def with_empty_log(
    shard: ShardContext, record: PartitionRecord, replica_id: int, *, voters: list[tuple[int, str]]
) -> ReplicaEntry:
    """Create a new log, and return a manifest entry of a new replica with it, in the state `making`.

    The caller writes the entry to the manifest.
    """
    topic = shard.view.topics().get(record.topic)
    log = shard.storage.create_log(f"{record.topic}-{record.number}")
    return ReplicaEntry(
        log_id=log.log_id,
        replica_id=replica_id,
        incarnation=1,
        group=record.group,
        topic=record.topic,
        partition=record.number,
        partition_hash=partition_hash(record.topic, record.number),
        state="making",
        created_ms=record.created_ms,
        voters=voters,
        settings=dict(topic.settings) if topic is not None else {},
    )


def channels_of(topic: TopicRecord) -> list[Mapping[str, object]]:
    """Return the settings of each of a topic's channels."""
    return [channel.settings for channel in (topic.channels or {}).values()]


class Reconciler:
    """Creates, changes and removes the replicas of one shard until they match the catalog."""

    def __init__(self, shard: ShardContext, work: WorkLists) -> None:
        self._shard = shard
        self._work = work
        # By key of the partition, the live groups whose first replica has campaigned, or does not need to.
        self._campaigned: dict[str, bytes] = {}
        self._to_make = work.add("to make", self._is_to_be_made)
        self._policies = work.add("policies", self._has_another_policy)
        self._copies = work.add("min_replicas", self._has_other_min_replicas)
        self._traces = work.add("trace", self._has_another_trace)
        self._losses = work.add("losses", _has_losses)
        self._first = work.add("first campaigns", self._is_to_campaign)

    @property
    def is_unfinished(self) -> bool:
        """Whether the catalog waits for a replica to be created or deleted here."""
        return bool(self._to_make.keys or self._work.stones)

    def _is_to_be_made(self, record: PartitionRecord, partition: Partition | None) -> bool:
        return record.state == "creating" and bool(self._to_be_made(record))

    def _to_be_made(self, record: PartitionRecord) -> list[int]:
        """Return the id of the replica of this store that is still to be created, if there is one."""
        shard = self._shard
        return [
            replica.replica_id
            for replica in record.replicas
            if replica.node == shard.node and replica.store_id == shard.store_id and not replica.made
        ]

    def _topic_of(self, record: PartitionRecord) -> TopicRecord | None:
        return self._shard.view.topics().get(record.topic)

    async def make_missing(self) -> None:
        """Create the replicas that the catalog wants here, and report those that exist (`made`)."""
        shard = self._shard
        manifest = shard.storage.manifest
        wanted = [
            (record, replica_id)
            for record, _ in self._work.due(self._to_make)
            for replica_id in self._to_be_made(record)
        ]
        if not wanted:
            return
        held = {record.group: manifest.of_group(record.group) for record, _ in wanted}
        # The origin of a group never changes, so it is right in any copy of the catalog.
        origins = {record.group: record.origin for record, _ in wanted}
        # An earlier pass wrote these to the manifest as `making`, and failed to write `made`.
        begun = [each for each in held.values() if each is not None and each.state == "making"]
        await self._finish(begun, origins)
        new = [(record, replica_id) for record, replica_id in wanted if held[record.group] is None]
        if new:
            # The view may be outdated: a replica is created only after the catalog's leader has confirmed it.
            answer = await shard.ask_catalog(ConfirmRequest([record.group for record, _ in new]))
            creating = set(answer.creating)
            await self._make([each for each in new if each[0].group in creating], origins)
        groups = [
            record.group
            for record, _ in wanted
            if (entry := manifest.of_group(record.group)) is not None and entry.state == "made"
        ]
        if groups:
            answer = await shard.ask_catalog(MadeRequest(shard.node, shard.store_id, groups))
            if answer.error:
                asyncio.get_running_loop().call_later(RETRY_S, shard.request_reconcile)

    async def _make(self, new: Sequence[tuple[PartitionRecord, int]], origins: Mapping[bytes, int]) -> None:
        """Create replicas: write `making` to the manifest, then the log with entry 1, then `made`.

        Only after that they are opened and may send messages.
        """
        shard = self._shard
        if not new:
            return
        entries = [
            with_empty_log(
                shard,
                record,
                replica_id,
                voters=[(replica.replica_id, replica.node) for replica in record.replicas],
            )
            for record, replica_id in new
        ]
        try:
            await shard.storage.change_manifest(lambda known: {each.replica_id: each for each in entries})
        except StorageError:
            # The manifest does not name these logs, and the next pass makes new ones.
            for entry in entries:
                shard.storage.delete_log(entry.log_id).add_done_callback(_retrieve_exception)
            raise
        await self._finish(entries, origins)

    async def _finish(self, entries: Sequence[ReplicaEntry], origins: Mapping[bytes, int]) -> None:
        """Bring new replicas from the state `making` to `made`, and open them.

        If a full disk interrupts it, it is repeated later. `origins` maps each group to the change of routes
        that created its partition (0: none), which entry 1 names.
        """
        shard = self._shard
        if not entries:
            return
        for entry in entries:
            log = shard.storage.logs[entry.log_id]
            if log.last_index > log.start.index:
                continue
            first = initial_frame(
                ConfigurationRecord(
                    voters=tuple((member, node) for member, node in entry.voters),
                    successor_of=origins[entry.group],
                ),
                created_ms=entry.created_ms,
            )
            log.append([first])
            shard.storage.record_hard_state(entry.replica_id, term=FIRST_TERM, vote=0)
        await shard.storage.sync()
        # Only after the sync: a new log has the policy `commit`, so its first entry survives a power loss.
        await asyncio.gather(
            *(
                shard.storage.set_policy(shard.storage.logs[entry.log_id], policy_of(entry.settings))
                for entry in entries
            )
        )
        # A copy, not in place: the manifest in memory must equal the one on disk.
        made = {entry.replica_id: msgspec.structs.replace(entry, state="made") for entry in entries}
        await shard.storage.change_manifest(
            lambda known: {replica_id: entry for replica_id, entry in made.items() if replica_id in known}
        )
        for entry in made.values():
            await shard.open(entry)
            await asyncio.sleep(0)  # an open takes half a millisecond, and a topic may have hundreds

    async def change_policies(self) -> None:
        """Change each replica's flush policy to its topic's setting, while appends continue.

        A change to `interval` waits while a batch is prepared or has pins: the prepare promises that the
        batch is synced when it is published.
        """
        shard = self._shard
        changed: dict[int, dict[str, int | str]] = {}
        for record, partition in self._work.due(self._policies):
            topic = self._topic_of(record)
            if partition is None or topic is None:
                continue
            policy = policy_of(topic.settings)
            state = partition.state
            if policy.is_interval and (state.stages.prepared or state.channels.pins):
                asyncio.get_running_loop().call_later(PINNED_S, shard.request_reconcile)
                continue
            try:
                await shard.storage.set_policy(partition.log, policy)
            except LogRemoved:
                continue  # Another log has replaced this one, which requests another pass.
            except StorageError as error:
                _log.error(
                    "%s/%d: cannot change the flush policy to that of its topic: %s",
                    record.topic,
                    record.number,
                    error,
                )
                continue
            changed[partition.replica.replica_id] = dict(topic.settings)
        if changed:
            await shard.storage.change_manifest(
                lambda known: {
                    replica_id: msgspec.structs.replace(entry, settings=settings)
                    for replica_id, settings in changed.items()
                    if (entry := known.get(replica_id)) is not None
                }
            )

    def _has_another_policy(self, record: PartitionRecord, partition: Partition | None) -> bool:
        """Return whether the flush policy of the log or of the manifest differs from that of the topic."""
        topic = self._topic_of(record)
        if partition is None or topic is None:
            return False
        policy = policy_of(topic.settings)
        if partition.log.policy != policy:
            return True
        entry = self._shard.storage.manifest.of_group(record.group)
        return entry is not None and policy_of(entry.settings) != policy

    def follow_min_replicas(self) -> None:
        """Apply each topic's present `min_replicas` to its partitions here."""
        for record, partition in self._work.due(self._copies):
            topic = self._topic_of(record)
            if partition is not None and topic is not None:
                partition.copies.wanted = int(topic.settings.get("min_replicas", 1))

    def _has_other_min_replicas(self, record: PartitionRecord, partition: Partition | None) -> bool:
        topic = self._topic_of(record)
        return (
            partition is not None
            and topic is not None
            and partition.copies.wanted != int(topic.settings.get("min_replicas", 1))
        )

    def follow_trace(self) -> None:
        """Apply each topic's present settings of the trace to its partitions here."""
        for record, partition in self._work.due(self._traces):
            topic = self._topic_of(record)
            if partition is not None and topic is not None:
                partition.context.follow_trace(topic.settings, self._shard.traces, channels_of(topic))

    def _has_another_trace(self, record: PartitionRecord, partition: Partition | None) -> bool:
        topic = self._topic_of(record)
        if partition is None or topic is None:
            return False
        return not partition.context.follows_trace(topic.settings, channels_of(topic))

    def stop_abandoned(self) -> None:
        """Stop the replicas that an operator's decision abandoned, at once and for good.

        Otherwise they could form a majority of the old group together with others that come back.
        """
        shard = self._shard
        for record, partition in self._work.due(self._losses):
            gone = {replica_id for loss in record.losses for replica_id in loss.abandoned}
            if partition is not None and partition.replica.replica_id in gone:
                shard.driver.remove(
                    record.group, ReplicaStopped("an operator decided that its group goes on without it")
                )

    async def go_on_alone(self) -> None:
        """Make replicas the only voters of groups that have lost their majority, as an operator has decided.

        The catalog's leader must confirm the decision first: an old copy of the catalog may still list a
        replica that was replaced since. Repeated until it is done.
        """
        shard = self._shard
        due: dict[bytes, AcceptedLoss] = {}
        for record, partition in self._work.due(self._losses):
            if partition is None or partition.replica.replica_id != record.losses[-1].kept:
                continue
            if not set(record.losses[-1].abandoned) <= set(partition.replica.configuration.abandoned):
                due[record.group] = record.losses[-1]
        if not due:
            return
        answer = await shard.ask_catalog(ConfirmRequest(list(due)))
        for group, loss in due.items():
            partition = shard.by_group.get(group)
            if partition is not None and partition.replica.replica_id == loss.kept in answer.kept:
                shard.driver.go_on_alone(partition.replica, loss.abandoned, node=shard.node)
                if not set(loss.abandoned) <= set(partition.replica.configuration.abandoned):
                    asyncio.get_running_loop().call_later(RETRY_S, shard.request_reconcile)  # it still leads

    def campaign_first_replicas(self) -> None:
        """Start the first election of each partition that has just become live, by its first replica."""
        for record, partition in self._work.due(self._first):
            if partition is None:
                continue
            self._campaigned[f"{record.topic}/{record.number}"] = record.group
            core = partition.replica.core
            if core.term == FIRST_TERM and not core.leader_id:
                self._shard.driver.campaign(partition.replica)

    def _is_to_campaign(self, record: PartitionRecord, partition: Partition | None) -> bool:
        return (
            partition is not None
            and record.state == "live"
            and record.replicas[0].node == self._shard.node
            and self._campaigned.get(f"{record.topic}/{record.number}") != record.group
        )

    async def remove_deleted(self) -> None:
        """Remove the replicas of deleted partitions and move their logs to the trash.

        Only if the catalog's leader confirms the deletion.
        """
        shard = self._shard
        if shard.view.message is None:
            return
        reported = [bytes.fromhex(key) for key in sorted(self._work.stones)]
        if not reported:
            return
        answer = await shard.ask_catalog(ConfirmRequest(reported))
        deleted = set(answer.deleted)
        held = [shard.storage.manifest.of_group(group) for group in reported if group in deleted]
        gone = [entry for entry in held if entry is not None]
        for entry in gone:
            shard.remove_replica(entry, StorageClosed(f"topic {entry.topic!r} is deleted"))
            if self._campaigned.get(key := f"{entry.topic}/{entry.partition}") == entry.group:
                del self._campaigned[key]
        if gone:
            logs: list[tuple[int, int]] = []

            def without(known: Mapping[int, ReplicaEntry]) -> dict[int, ReplicaEntry | None]:
                # Resolve log ids only now: another log may have replaced one since the catalog was asked.
                here = [known[each.replica_id] for each in gone if each.replica_id in known]
                logs[:] = [(shard.storage.resolve(each.log_id), each.replica_id) for each in here]
                return {each.replica_id: None for each in here}

            # Write the manifest first: the next start does not miss a log that the manifest does not name.
            # Only if the disk is too full for a manifest, delete the logs first, to make room. Until the
            # manifest is written it names logs that are gone, which does no harm for a deleted group.
            try:
                await shard.storage.change_manifest(without)
            except DiskError as error:
                if not error.is_full:
                    raise
                await self._delete_logs(logs)
                raise
            await self._delete_logs(logs)
        if deleted:
            await shard.ask_catalog(RemovedRequest(shard.node, shard.store_id, sorted(deleted)))

    async def _delete_logs(self, logs: Sequence[tuple[int, int]]) -> None:
        storage = self._shard.storage
        for log_id, replica_id in logs:
            if log_id in storage.logs:
                await storage.delete_log(log_id, replica_id=replica_id)


def _has_losses(record: PartitionRecord, partition: Partition | None) -> bool:
    return partition is not None and bool(record.losses)


def _retrieve_exception(done: asyncio.Future[None]) -> None:
    """Retrieve a future's failure, so that asyncio does not log it; the next pass tries again."""
    if not done.cancelled():
        done.exception()
