"""The shard's part when replicas join and leave live groups.

A shard has two roles. As a *home* of replicas it creates the empty replica that the catalog wants in this
store, reports it as made once its log durably has entries, reports lost replicas, and deletes a replica whose
removal the group has committed. As a *leader* it changes the group's configuration, one step at a time, until
this is the placement that the catalog wants, and reports committed removals.

A new replica begins empty and is not a member: its log has no entries, and its manifest entry no voters, so
it can neither campaign nor vote. All its entries come from the group. It becomes a voter only after its node
has reported it as `made`, and the node does so only after its manifest no longer permits an empty log. So if
the log of a voter has vanished, the replica is found to be lost, like any other. See
docs/consensus.md#births-and-removals.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from laminar.http.api.problems import Problem
from laminar.log.disk.errors import StorageClosed, StorageError
from laminar.log.format.manifest import ReplicaEntry
from laminar.node.catalog.messages.requests import ConfirmRequest, ReplicaRequest
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.partition.partition import Partition
from laminar.node.partition.receipts import Receipt
from laminar.node.shard.replicas.context import ShardContext
from laminar.node.shard.replicas.reconcile import with_empty_log
from laminar.node.shard.replicas.work_lists import WorkLists
from laminar.node.transport.transport import TransportError
from membership.records import (
    PartitionRecord,
    ReplicaRecord,
)
from membership.requests import (
    ReplicaChange,
    ReportRemovals,
    ReportReplicas,
)
from raft.configuration import ConfigurationRefused
from raft.values import NotLeader

_log = logging.getLogger("laminar.moves")

CHECK_S = 1.0
# Most empty replicas that a shard has at one time, from their creation until they have entries.
AT_ONCE = 2
# Most steps of a group in one pass, and how long the pass waits for each of them to be committed.
MOST_STEPS = 8
STEP_WAIT_S = 0.2
# The state in the manifest of a replica that is created and whose log may still be empty.
EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class Observed:
    """The observations of a group's leader by which `next_step` decides, apart from the configurations."""

    caught_up: Callable[[int], bool]
    """Whether a replica was heard from lately and has all committed entries."""
    recovering: Callable[[int], bool]
    """Whether a replica was heard from lately and may still be recovering."""
    majority_active: Callable[[ConfigurationRecord], bool]
    """Whether a majority of that configuration's voters was heard from lately."""
    newest: bool
    """Whether the catalog's leader has confirmed the record, or a later one, in this term of the group."""


def next_step(
    record: PartitionRecord, current: ConfigurationRecord, observed: Observed
) -> ConfigurationRecord | None:
    """Return the next configuration on the way to the placement in `record`; None if there is no step now.

    The first of these steps that applies is taken:

    1. A member that `record` does not name is removed, unless it is of a later placement.
    2. A dead or lost replica is removed. If the remaining voters would have no active majority, another voter
       is silent, too, and the replica may be alive and needed: it stays until its successor votes.
    3. Each placed replica that is not a member is added as a learner, but only by the newest record: by an
       older one, the replica may have left since, and its node may be about to delete it.
    4. Learners that are made and caught up are promoted. A group with one voter waits until *all* placed
       replicas are ready: with two voters the loss of either would stop it, until the third has caught up.
    5. When all placed replicas vote, those that moved away are removed. This is not urgent, so it waits while
       a voter that stays may be recovering.

    A replica that an operator has abandoned is neither added nor waited for.

    `record` may be outdated. Ids of replicas only grow. A member with an id above all that the partition had
    in `record` is of a later placement, and nothing is done. A member with a lower id that `record` does not
    name was removed for good: its node deletes it.
    """
    members = current.nodes()
    if any(member > record.highest_replica_id for member in members):
        return None
    placed = {each.replica_id: each for each in record.replicas if not each.abandoned}
    leaving = {each.replica.replica_id: each for each in record.leaving}
    abandoned = {each.replica_id for each in record.replicas if each.abandoned}
    for member in members:
        if member not in placed and member not in leaving and member not in abandoned:
            return current.without(member)
    for replica_id, each in leaving.items():
        if each.why != "moved" and replica_id in members:
            without = current.without(replica_id)
            if observed.majority_active(without):
                return without
    if observed.newest:
        for replica_id, replica in placed.items():
            if replica_id not in members:
                return current.with_learner(replica_id, replica.node)
    voters = dict(current.voters)
    learners = dict(current.learners)
    awaited = [replica_id for replica_id in placed if replica_id not in voters]
    ready = [
        replica_id
        for replica_id in awaited
        if replica_id in learners and placed[replica_id].made and observed.caught_up(replica_id)
    ]
    if ready and (len(voters) > 1 or ready == awaited):
        return current.promoted(ready[0])
    if placed and not awaited:
        for replica_id, each in leaving.items():
            if replica_id not in members:
                continue
            staying = [voter for voter in voters if voter != replica_id]
            if each.why != "moved" or not any(map(observed.recovering, staying)):
                return current.without(replica_id)
    return None


class ReplicaMover:
    """The moves of one shard's replicas, in both roles. The shard's reconcile loop calls `run_pass`.

    `give_away(partition)` hands over the leadership of a group led here; it returns False if no other voter
    takes it. `learners_added(partition)` is called when learners were added to a group led here.
    """

    def __init__(
        self,
        shard: ShardContext,
        work: WorkLists,
        *,
        give_away: Callable[[Partition], bool] = lambda partition: False,
        learners_added: Callable[[Partition], None] = lambda partition: None,
    ) -> None:
        self._shard = shard
        self._give_away = give_away
        self._learners_added = learners_added
        self._work = work
        self._to_settle = work.add("members", self._is_unsettled)
        self._home = work.add("home", self._is_changing_here)
        self.steps = 0
        self.made = 0
        self.deleted = 0

    @property
    def needed(self) -> bool:
        """Whether `run_pass` may have work to do."""
        shard = self._shard
        return bool(self._to_settle.keys or self._home.keys or shard.lost or shard.storage.manifest.unmade)

    def _is_own(self, replica: ReplicaRecord) -> bool:
        shard = self._shard
        return (replica.node, replica.store_id) == (shard.node, shard.store_id)

    def _is_changing_here(self, record: PartitionRecord, partition: Partition | None) -> bool:
        """Return whether a replica of this store is to be created in a live group, or to be deleted."""
        return record.state == "live" and (
            any(self._is_own(each) and not each.made for each in record.replicas)
            # Only this store's: the removed replicas of a node that is gone for good stay listed.
            or any(self._is_own(each) for each in record.removed)
        )

    def _is_unsettled(self, record: PartitionRecord, partition: Partition | None) -> bool:
        """Return whether the members of a group led here differ from its placement, or one is to leave."""
        if partition is None or not partition.replica.leading or record.state != "live":
            return False
        current = partition.replica.configuration
        placed = {each.replica_id for each in record.replicas if not each.abandoned}
        return bool(record.leaving or current.learners) or placed != set(current.voters)

    # -- as a home -------------------------------------------------------------------------

    async def at_home(self) -> None:
        """Create, report and delete this shard's own replicas.

        Raises:
            TransportError: if the catalog did not answer.
        """
        shard = self._shard
        manifest = shard.storage.manifest
        joining: list[tuple[PartitionRecord, int]] = []
        removed: list[tuple[PartitionRecord, int]] = []
        unfinished: list[ReplicaEntry] = []
        report = ReportReplicas(shard.node, shard.store_id)
        lost = {entry.replica_id for entry in shard.lost}
        for record in self._at_home():
            for replica in record.replicas:
                if not self._is_own(replica):
                    continue
                if replica.replica_id in lost:
                    if not replica.lost:
                        report.lost.append(replica.replica_id)
                elif not replica.made:
                    entry = manifest.by_key.get(replica.replica_id)
                    if entry is None:
                        if manifest.of_group(record.group) is None:
                            joining.append((record, replica.replica_id))
                    elif entry.state == "making":
                        unfinished.append(entry)  # `making` was written to the manifest, but not `empty`
                    elif await self._is_filled(entry):
                        report.made.append(replica.replica_id)
                elif (entry := manifest.by_key.get(replica.replica_id)) is not None and entry.state == EMPTY:
                    await self._is_filled(entry)  # A learner that has restarted with an empty log.
            for replica in record.removed:
                if self._is_own(replica):
                    removed.append((record, replica.replica_id))
        await self._begin(unfinished)
        if joining or removed:
            asked = [record.group for record, _ in (*joining, *removed)]
            answer = await shard.ask_catalog(ConfirmRequest(asked))
            await self._make([each for each in joining if each[1] in answer.joining])
            gone = [replica_id for _, replica_id in removed if replica_id in answer.removed]
            await self._delete([manifest.by_key[each] for each in gone if each in manifest.by_key])
            report.deleted.extend(gone)
        if report.made or report.lost or report.deleted:
            await self._report_to_catalog(report)

    def _at_home(self) -> list[PartitionRecord]:
        """Return the live partitions with a replica in this store that changes, is lost or may be empty."""
        shard = self._shard
        found = {f"{record.topic}/{record.number}": record for record, _ in self._work.due(self._home)}
        for entry in (*shard.lost, *shard.storage.manifest.unmade):
            record = shard.view.partition(entry.topic, entry.partition)
            if record is not None and record.state == "live" and shard.owns(record):
                found[f"{record.topic}/{record.number}"] = record
        return [found[key] for key in sorted(found)]

    async def _report_to_catalog(self, change: ReplicaChange) -> bool:
        answer = await self._shard.ask_catalog(ReplicaRequest(change))
        return answer.result is not None

    async def _make(self, new: list[tuple[PartitionRecord, int]]) -> None:
        """Create replicas with an empty log and without a vote, and open them.

        They get the state `making` in the manifest first, and `empty` before they are opened (`_begin`). No
        more than `AT_ONCE` replicas are empty at a time; the others wait for a later pass.
        """
        shard = self._shard
        storage = shard.storage
        filling = len(storage.manifest.unmade)
        new = new[: max(AT_ONCE - filling, 0)]
        if not new:
            return
        entries = []
        for record, replica_id in new:
            entries.append(with_empty_log(shard, record, replica_id, voters=[]))
            storage.record_hard_state(replica_id, term=0, vote=0)
        await storage.sync()
        try:
            await storage.change_manifest(lambda known: {each.replica_id: each for each in entries})
        except StorageError:
            # The manifest does not name these logs, and the next pass makes new ones.
            for entry in entries:
                await storage.delete_log(entry.log_id, replica_id=entry.replica_id)
            raise
        await self._begin(entries)

    async def _begin(self, entries: list[ReplicaEntry]) -> None:
        """Write the replicas as `empty` to the manifest, then open them, so that they may send messages."""
        shard = self._shard
        if not entries:
            return
        ids = [entry.replica_id for entry in entries]
        await shard.storage.change_manifest(
            lambda known: {
                each: msgspec.structs.replace(known[each], state=EMPTY) for each in ids if each in known
            }
        )
        known = shard.storage.manifest.by_key
        for entry in [known[each] for each in ids if each in known]:
            await shard.open(entry)
            self.made += 1
            _log.info("%s/%d: created empty replica %d", entry.topic, entry.partition, entry.replica_id)

    async def _is_filled(self, entry: ReplicaEntry) -> bool:
        """Return whether a replica durably has entries; if so, write `made` to the manifest.

        From then on the replica counts as lost if it is found with an empty log.
        """
        storage = self._shard.storage
        log = storage.logs.get(storage.resolve(entry.log_id))
        if log is None or log.synced_index <= log.start.index:
            return False
        if entry.state == EMPTY:
            await storage.change_manifest(
                lambda known: {
                    each.replica_id: msgspec.structs.replace(each, state="made")
                    for each in [known.get(entry.replica_id)]
                    if each is not None
                }
            )
        return True

    async def _delete(self, entries: list[ReplicaEntry]) -> None:
        """Delete replicas whose removal their groups have committed and reported to the catalog."""
        shard = self._shard
        if not entries:
            return
        for entry in entries:
            shard.remove_replica(
                entry, StorageClosed(f"replica {entry.replica_id} was removed from its group")
            )
        ids = [entry.replica_id for entry in entries]
        logs: list[tuple[int, int]] = []

        def without(known: Mapping[int, ReplicaEntry]) -> dict[int, ReplicaEntry | None]:
            # Resolve log ids only now: another log may have replaced one since the catalog was asked. And not
            # later: once the manifest no longer names a log, `resolve` forgets what replaced it.
            here = [known[each] for each in ids if each in known]
            logs[:] = [(shard.storage.resolve(each.log_id), each.replica_id) for each in here]
            return {each.replica_id: None for each in here}

        await shard.storage.change_manifest(without)
        for log_id, replica_id in logs:
            if log_id in shard.storage.logs:
                await shard.storage.delete_log(log_id, replica_id=replica_id)
        for entry in entries:
            self.deleted += 1
            _log.info("%s/%d: deleted removed replica %d", entry.topic, entry.partition, entry.replica_id)

    # -- as a leader -----------------------------------------------------------------------

    def unsettled(self) -> list[Partition]:
        """Return the partitions led here whose members differ from their placements or are to leave."""
        led = (partition for _, partition in self._work.due(self._to_settle))
        return [partition for partition in led if partition is not None and partition.leads]

    async def as_leader(self, partitions: Sequence[Partition]) -> list[Partition]:
        """Take each of these groups one step further, if it is led here, and report committed removals.

        Return the partitions for which a step was proposed.

        Raises:
            TransportError: if the catalog did not answer.
        """
        led = [(each, each.replica.core.term) for each in partitions if each.leads]
        newest = any(self._lacks_members(partition) for partition, _ in led) and await self._view_is_newest()
        stepped = []
        for partition, term in led:
            # The view was confirmed in this term, so no other leader has removed a replica that it names.
            if not self._leads_in(partition, term):
                continue
            record = self._record_of(partition)
            if record is None:
                continue
            try:
                if self._step(partition, record, newest=newest):
                    stepped.append(partition)
            except Exception as error:  # noqa: BLE001  # stops this partition's replica
                partition.stop(error)
                continue
            if record.leaving:
                await self._report(partition, record)
        return stepped

    def _leads_in(self, partition: Partition, term: int) -> bool:
        return partition.leads and partition.replica.core.term == term

    def _record_of(self, partition: Partition) -> PartitionRecord | None:
        record = self._shard.view.partition(partition.topic, partition.number)
        live = record is not None and record.group == partition.replica.group and record.state == "live"
        return record if live else None

    def _lacks_members(self, partition: Partition) -> bool:
        """Return whether a replica that the view places in the group is not a member yet."""
        record = self._record_of(partition)
        members = partition.replica.configuration.members()
        return record is not None and any(
            each.replica_id not in members and not each.abandoned for each in record.replicas
        )

    async def _view_is_newest(self) -> bool:
        """Wait until the view is as new as the catalog was at the call; return False if that fails."""
        try:
            await self._shard.refresh_view()
        except Problem as problem:
            _log.debug("no replica is added to a group now: the view is not confirmed: %s", problem)
            return False
        return True

    def _step(self, partition: Partition, record: PartitionRecord, *, newest: bool) -> bool:
        """Propose the group's next configuration; return whether one was proposed."""
        replica = partition.replica
        core = replica.core
        observed = Observed(
            caught_up=core.is_caught_up,
            recovering=core.may_be_recovering,
            majority_active=lambda step: core.majority_active(step.configuration().voters),
            newest=newest,
        )
        before = replica.configuration_record
        step = next_step(record, before, observed)
        if step is None:
            return False
        if replica.replica_id not in step.nodes() and self._give_away(partition):
            # The next leader removes this replica. A leader that removes itself leads until that is committed
            # and does not learn the outcome of appends that were proposed after it.
            return False
        try:
            self._shard.driver.propose_configuration(replica, step)
        except (ConfigurationRefused, NotLeader) as error:
            _log.debug("%s: its configuration is not changed now: %s", replica.name, error)
            return False
        self.steps += 1
        _log.info(
            "%s: proposed a configuration with voters %s, learners %s",
            replica.name,
            step.voters,
            step.learners,
        )
        if set(step.learners) - set(before.learners):
            self._learners_added(partition)
        return True

    async def _report(self, partition: Partition, record: PartitionRecord) -> None:
        """Report to the catalog the leaving replicas in `record` whose removal is committed.

        First a majority confirms that this replica leads, after the catalog has recorded that they leave. The
        log of a deposed leader may end before such a replica was added, and its report would cause a member
        to be deleted. For the same reason the replica must not be in an uncommitted configuration either.
        """
        if not any(each.replica.replica_id not in self._members(partition) for each in record.leaving):
            return
        try:
            await self._shard.driver.confirm(partition.replica)
        except ConnectionError:
            return
        members = self._members(partition)
        gone = [each.replica.replica_id for each in record.leaving if each.replica.replica_id not in members]
        if gone and partition.leads:
            await self._report_to_catalog(
                ReportRemovals(f"{record.topic}/{record.number}", record.group, gone)
            )

    @staticmethod
    def _members(partition: Partition) -> set[int]:
        """Return the members of the last committed configuration and of the present one together."""
        history = partition.state.configurations_up_to(partition.committed_index)
        committed = history[-1][1].nodes() if history else {}
        return {*committed, *partition.replica.configuration.members()}

    async def _committed(self, partitions: Sequence[Partition]) -> None:
        """Wait until the groups have committed their newest configurations, at most `STEP_WAIT_S`."""
        waiters = [
            each.appends.when_committed(each.log.last_index, Receipt(each.number, 0, 0))
            for each in partitions
        ]
        await asyncio.wait(waiters, timeout=STEP_WAIT_S)
        for waiter in waiters:
            if waiter.done():
                waiter.exception()  # retrieved: a truncated step is taken again by the next pass
            else:
                waiter.cancel()

    async def run_pass(self) -> None:
        """Change the configurations of groups led here, then create, report and delete own replicas.

        If the catalog or the disk fails, the rest waits for the next pass. A group takes its steps without a
        pause, because between two promotions, or with a superfluous member, it tolerates fewer failures than
        before and after.
        """
        try:
            moving = self.unsettled()
            for _ in range(MOST_STEPS):
                moving = await self.as_leader(moving)
                if not moving:
                    break
                await self._committed(moving)
            await self.at_home()
        except (TransportError, StorageError) as error:
            _log.debug("moving replicas waits for the next pass: %s", error)

    def statistics(self) -> dict[str, int]:
        """Return how many configurations were proposed, and how many replicas were created and deleted."""
        return {"steps": self.steps, "made": self.made, "deleted": self.deleted}
