"""The start of a shard's replicas: each is rebuilt from its log and takes part in its group again.

A replica takes part only if everything by which it made promises is there: its log, and its term and vote. If
entries that its state needs are damaged, it waits a while until they are repaired from other replicas, then
votes without them, and leads only when its state is complete. A lone voter (a replica that is the only voter
of its group) campaigns only when the catalog has confirmed that this data folder is the newest. A learner
whose log may end differently from its group's after a power loss starts again with an empty log. This module
decides for one replica at a time; the manifest says which replicas there are.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from laminar.batch import Kind
from laminar.http.api.names import TRACE_TOPIC
from laminar.log.disk.errors import (
    DamagedRange,
    EntriesTrimmed,
    ReplicaStopped,
    StorageClosed,
    StorageError,
)
from laminar.log.format.manifest import ReplicaEntry
from laminar.log.partition_log.log import Log
from laminar.node.catch_up.install import new_name
from laminar.node.consensus.replica import replay
from laminar.node.partition import snapshot
from laminar.node.partition.flush_policy import policy_of
from laminar.node.partition.partition import Partition
from laminar.node.partition.state.state import PartitionState
from laminar.node.runtime.replica_factory import recovering_text
from laminar.node.shard.replicas.context import ShardContext
from laminar.node.shard.replicas.reconcile import channels_of
from laminar.node.shard.replicas.replica_moves import EMPTY

_log = logging.getLogger("laminar.shard")

# A replica whose state needs damaged entries waits this long for their repair before it votes without them.
REPAIR_PATIENCE_S = 3.0
REPAIR_CHECK_S = 1.0
READ_BYTES = 4 * 1024 * 1024
# Kinds of entries without which a replica may vote: not configurations, nor log starts, which repeat them.
_DISPENSABLE = (
    Kind.DATA,
    Kind.CURSOR,
    Kind.NOOP,
    Kind.STAGED,
    Kind.PREPARE,
    Kind.PUBLISH,
    Kind.SINK,
    Kind.FENCE,
    Kind.SEAL,
    Kind.OPEN,
    Kind.CHANNEL,
    Kind.DELAYED,
    Kind.SKIP,
)


class ReplicaOpener:
    """Opens the replicas of one shard, at the start and later."""

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        # Lone voters that must not campaign until the catalog has confirmed this node's data folder.
        self._alone: list[Partition] = []

    async def open_all(self) -> None:
        """Open the replicas that the manifest names.

        A replica in the state `making` never sent a message: it is deleted, and created again later.
        """
        shard = self._shard
        entries = shard.storage.manifest.entries
        unfinished = [entry for entry in entries if entry.state == "making"]
        if unfinished:
            for entry in unfinished:
                if entry.log_id in shard.storage.logs:
                    await shard.storage.delete_log(entry.log_id, replica_id=entry.replica_id)
            await shard.storage.write_manifest([entry for entry in entries if entry.state != "making"])
        await shard.drop_unfinished()
        for entry in shard.storage.manifest.entries:
            await self.open(entry, comes_back=True)
        self.campaign_lone_voters()

    def campaign_lone_voters(self) -> None:
        """Start elections by the lone voters that may lead by now."""
        shard = self._shard
        for partition in list(self._alone):
            if self._may_lead_alone(partition):
                self._alone.remove(partition)
                if shard.driver.is_current(partition.replica):
                    partition.replica.core.inhibit_campaign(False, now_ms=shard.clock.monotonic_ms())
                    shard.driver.campaign(partition.replica)

    def _may_lead_alone(self, partition: Partition) -> bool:
        """Return whether the catalog confirms that a lone voter may lead.

        A lone voter may have lost the entry by which its group got other members, and it asks none of them
        when it campaigns. So the catalog must have confirmed that this node's data folder is the newest. For
        a recovering replica, whose log may lack a configuration, the catalog must also list no other replica
        of the group, or all replicas must have answered that their logs have no more entries (a release).
        """
        message, replica = self._shard.view.message, partition.replica
        if message is None or not message.confirmed:
            return False
        if not replica.core.recovering or replica.core.is_released:
            return True
        record = self._shard.view.partition(partition.topic, partition.number)
        return (
            record is not None
            and record.group == replica.group
            and [each.replica_id for each in record.replicas] == [replica.replica_id]
            and not record.leaving
        )

    async def open(self, entry: ReplicaEntry, *, comes_back: bool = False) -> None:
        """Start a replica of the manifest; note it as `lost` if its log, or its term and vote, is missing.

        `comes_back` says that its log is from an earlier run of this process, not just received from its
        group.
        """
        shard = self._shard
        log = shard.storage.logs.get(shard.storage.resolve(entry.log_id))
        voted = entry.replica_id in shard.storage.hard_states
        sure = voted and entry.replica_id not in shard.storage.lost_hard_states
        empty = log is not None and log.last_index == log.start.index
        if log is None or (empty and entry.state != EMPTY) or not sure:
            # In the manifest, but its files are gone: it may have made promises, so it must not take part.
            shard.lost.append(entry)
            _log.error(
                "%s/%d: this replica is lost because its files are missing; it does not join its group again",
                entry.topic,
                entry.partition,
            )
            return
        if log.recovering:
            # Recovery state and incarnation are durable: the recovery that found the loss wrote them first.
            _log.warning("%s", recovering_text(f"{entry.topic}/{entry.partition}", log))
        shard.repairs.keep(entry, log)
        try:
            await self._start(entry, log, comes_back=comes_back)
        except DamagedRange:
            # Other replicas can repair it. Opening the shard's other replicas need not wait for that.
            shard.spawn(self._start_damaged(entry, log, comes_back=comes_back))
        except StorageError as error:
            # If one log cannot be read, only its replica does not take part; the shard's others serve.
            shard.repairs.forget(entry.group)
            shard.lost.append(entry)
            _log.error(
                "%s/%d: this replica counts as lost because its log cannot be read: %s",
                entry.topic,
                entry.partition,
                error,
            )
        except Exception as error:  # noqa: BLE001  # only this replica does not take part
            self._mark_failed(entry, error)

    def _mark_failed(self, entry: ReplicaEntry, error: Exception) -> None:
        """Note that a replica does not take part until a restart, because of a bug while it was opened.

        It does not count as lost, because its files are intact, and so it is not replaced by another replica.
        """
        shard = self._shard
        shard.repairs.forget(entry.group)
        if (entry.topic, entry.partition) in shard.partitions:
            shard.driver.remove(entry.group, ReplicaStopped(str(error)))
        shard.failed[entry.replica_id] = (entry, f"{type(error).__name__}: {error}")
        shard.driver.say_stopped(f"{entry.topic}/{entry.partition}", error)

    async def _start(
        self, entry: ReplicaEntry, log: Log, *, comes_back: bool, leave_out: bool = False
    ) -> Partition:
        """Rebuild a replica's state from its log and let it take part; return its partition.

        `comes_back` as in `open`. With `leave_out` damaged entries are left out of its state if they are not
        needed for votes and acknowledgements; the replica does not lead then.

        Raises:
            DamagedRange: if an entry that its state needs is damaged.
        """
        shard = self._shard
        partition = Partition(
            topic=entry.topic,
            number=entry.partition,
            driver=shard.driver,
            log=log,
            refusal=shard.refusal if entry.topic != TRACE_TOPIC else shard.trace_refusal,
            consumer_refusal=shard.consumer_refusal,
            asks_catalog=True,
            code_version=lambda: shard.view.code_version,
        )
        name = f"{entry.topic}/{entry.partition}"

        def past_damage(index: int) -> bool:
            if shard.repairs.is_trimmed(entry.group, index):
                # The group's `log_start` entry, by which this log will be trimmed, too, has its effects.
                partition.state.left_out.append(index)
                return True
            # No replica has an intact copy, and the rest of the log can be served.
            if len(entry.voters) == 1 or shard.repairs.is_gone(entry.group, index):
                _log.error(
                    "%s: no replica has an intact copy of entry %d; its effects on producers, cursors and "
                    "other state are lost",
                    name,
                    index,
                )
                partition.state.succession.lacks_entries = True
                return True
            if not leave_out or log.index_entry(index).kind not in _DISPENSABLE:
                return False
            partition.state.left_out.append(index)
            return True

        known = snapshot.read(log)
        if known is not None:
            partition.state.restore(known.state, known.configurations, known.start)
        replica = await shard.replica_factory.open(
            entry,
            name=name,
            machine=partition,
            known_up_to=known.index if known is not None else 0,
            configurations=known.configurations if known is not None else (),
            past_damage=past_damage,
        )
        if not shard.repairs.keeps(log):
            raise StorageClosed(f"{name} was removed meanwhile")
        if comes_back and _may_end_differently(entry, log) and _was_never_voter(entry, partition):
            return await self._restart_empty(entry, log)
        partition.replica = replica
        partition.committed(replica.core.committed_index)
        partition.copies.wanted = self._min_replicas(entry)
        topic = shard.view.topics().get(entry.topic)
        channels = channels_of(topic) if topic is not None else ()
        partition.context.follow_trace(self._settings_of(entry), shard.traces, channels)
        shard.partitions[(entry.topic, entry.partition)] = partition
        shard.by_group[entry.group] = partition
        if replica.configuration.voters == (replica.replica_id,) and not self._may_lead_alone(partition):
            self._alone.append(partition)
            replica.core.inhibit_campaign(True, now_ms=shard.clock.monotonic_ms())
        shard.driver.add(replica)
        shard.repairs.attach_replica(replica)
        record = shard.view.partition(entry.topic, entry.partition)
        if record is not None and any(replica.replica_id in loss.abandoned for loss in record.losses):
            shard.driver.remove(
                entry.group, ReplicaStopped("an operator decided that its group goes on without it")
            )
        shard.opened(partition)
        return partition

    def _min_replicas(self, entry: ReplicaEntry) -> int:
        """Return the topic's `min_replicas`: from the view, or from the manifest if there is no view yet."""
        return int(self._settings_of(entry).get("min_replicas", 1))

    def _settings_of(self, entry: ReplicaEntry) -> Mapping[str, int | str]:
        """Return the topic's settings: from the view, or from the manifest if there is no view yet."""
        topic = self._shard.view.topics().get(entry.topic)
        return topic.settings if topic is not None else entry.settings

    async def _restart_empty(self, entry: ReplicaEntry, log: Log) -> Partition:
        """Start a learner that may have lost entries again, with an empty log; return its partition.

        The new log is durable when the learner takes part. It is needed because voters that may have lost
        entries ask each other before they elect a leader (docs/consensus.md#recovering), but ask no learner.
        If all of them have lost the same entries, they continue without these and write others. Then a
        learner may have entries as committed that no other replica has; it would serve them, and refuse the
        leader's entries at these indexes. The learner may have been promoted by an entry that it has lost. So
        it keeps its id, its term and vote, and its recovering mark, and answers candidates, which may need
        the vote of every replica.
        """
        shard, storage = self._shard, self._shard.storage
        name = f"{entry.topic}/{entry.partition}"
        _log.warning("%s: this learner may have lost entries; it starts again with an empty log", name)
        emptied = msgspec.structs.replace(entry, state=EMPTY, voters=[])
        # Write the manifest first: after a crash the old log is found, and all of this is repeated.
        await storage.change_manifest(lambda known: _changed(known, emptied))
        if not shard.repairs.keeps(log):
            raise StorageClosed(f"{name} was removed meanwhile")
        # The entries that it acknowledged in its former incarnation are gone, so it gets a new incarnation.
        # The new log takes over the incarnation and the recovering mark.
        log.set_recovering(recovering=True, incarnation=log.incarnation + 1, power_lost=log.power_lost)
        new = storage.create_log(new_name(entry.topic, entry.partition))
        named = msgspec.structs.replace(emptied, log_id=new.log_id)
        replaced = storage.replace_log(log.log_id, new)
        # At once, so that a removal of the replica meanwhile finds its present log.
        shard.repairs.keep(named, new)
        await replaced
        await storage.change_manifest(lambda known: _changed(known, named))
        if not shard.repairs.keeps(new):
            if new.log_id in storage.logs:
                await storage.delete_log(new.log_id, replica_id=entry.replica_id)
            raise StorageClosed(f"{name} was removed meanwhile")
        return await self._start(named, new, comes_back=False)

    async def _start_damaged(self, entry: ReplicaEntry, log: Log, *, comes_back: bool) -> None:
        """Start a replica whose state needs damaged entries: wait for their repair, later without them.

        After `REPAIR_PATIENCE_S` the replica votes without these entries, and leads once they are repaired,
        or once no replica has an intact copy.
        """
        shard = self._shard
        loop = asyncio.get_running_loop()
        name, patient_until = f"{entry.topic}/{entry.partition}", loop.time() + REPAIR_PATIENCE_S
        while True:
            try:
                late = loop.time() >= patient_until
                partition = await self._start(entry, log, comes_back=comes_back, leave_out=late)
                break
            except DamagedRange:
                await self._repaired_within(entry, REPAIR_CHECK_S)
            except StorageClosed:
                return
            except StorageError as error:
                shard.lost.append(entry)
                _log.error("%s: this replica counts as lost because its log cannot be read: %s", name, error)
                return
            except Exception as error:  # noqa: BLE001  # only this replica does not take part
                self._mark_failed(entry, error)
                return
            if not shard.repairs.keeps(log):
                return  # The log was removed or replaced meanwhile, and is not repaired any more.
        if partition.state.left_out:
            _log.warning(
                "%s: takes part without the damaged entries %s, and does not lead until they are repaired",
                name,
                partition.state.left_out,
            )
        while partition.state.left_out and shard.by_group.get(entry.group) is partition:
            await self._repaired_within(entry, REPAIR_CHECK_S)
            missing = [index for index in partition.state.left_out if log.quarantine.at(index) is not None]
            if partition.state.left_out and not missing:
                try:
                    await self._complete_state(partition)
                except Exception as error:  # noqa: BLE001  # stops this partition's replica
                    partition.stop(error)
                    return
                shard.opened(partition)
                continue
            if missing and all(shard.repairs.is_gone(entry.group, index) for index in missing):
                _log.error(
                    "%s: no replica has intact copies of entries %s; their effects on producers, cursors and "
                    "other state are lost",
                    name,
                    missing,
                )
                partition.state.left_out.clear()
                partition.state.succession.lacks_entries = True
                partition.doubt()
                shard.repairs.attach_replica(partition.replica)
                shard.opened(partition)

    async def _repaired_within(self, entry: ReplicaEntry, timeout_s: float) -> None:
        """Wait up to `timeout_s` for the next progress in the repair of a log's damage."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._shard.repairs.wait_for_progress(entry.group)
        except TimeoutError:
            pass

    async def _complete_state(self, partition: Partition) -> None:
        """Rebuild the derived state with the entries that were left out, while the replica runs."""
        log = partition.log
        whole = PartitionState(log.start.index)
        known = snapshot.read(log)
        if known is not None:
            whole.restore(known.state, known.configurations, known.start)
        index = max(log.start.index, known.index if known is not None else 0) + 1
        before = log.truncations
        while index <= log.last_index:
            try:
                frames = await log.read(index, log.last_index, max_bytes=READ_BYTES)
            except (DamagedRange, EntriesTrimmed):
                return
            if log.truncations != before:
                return  # the next pass tries again
            replay(frames, whole)
            index += len(frames)
        # No await since the end of the log was read, so it still holds.
        partition.state.adopt(whole)
        self._shard.repairs.attach_replica(partition.replica)


def _changed(known: Mapping[int, ReplicaEntry], new: ReplicaEntry) -> dict[int, ReplicaEntry | None]:
    """Return the change of the manifest that sets a replica's entry; empty if it was removed meanwhile."""
    return {new.replica_id: new} if new.replica_id in known else {}


def _may_end_differently(entry: ReplicaEntry, log: Log) -> bool:
    """Return whether, after a power loss, this log may end differently from those of its group.

    This log may have been synced while those of the others were not: each append of a new replica is synced
    until the topic's `interval` policy is set for its log, and so is a whole log received in a catch-up. Then
    a power loss takes no entry from this log and leaves no recovering mark, but may take entries from the
    others. So if the topic's policy is `interval`, a log without the mark is not trusted either.
    """
    if log.last_index == log.start.index:
        return False
    return log.recovering or policy_of(entry.settings).is_interval


def _was_never_voter(entry: ReplicaEntry, partition: Partition) -> bool:
    """Return whether no configuration that the replica knows has it as a voter."""
    known = [record for _, record in partition.state.configurations_up_to(partition.log.last_index)]
    return all(entry.replica_id not in dict(voters) for voters in (entry.voters, *(r.voters for r in known)))
