"""The leaderships that a shard hands over: to preferred leaders, and away from what is to be emptied.

For each group that is led here it decides whether another voter shall lead, which one, and when. The catalog
names the preferred leader of a partition, the nodes that are draining and the replicas that are to leave; why
it does is not known here. A hand-over itself is Raft's (`Core.transfer_leadership`): proposals are refused as
not applied until the other voter leads, what was proposed before is in its log, and if it does not lead
within an election timeout this replica leads on.

Rules:

1. By preference a group is handed over when all is calm: the preferred voter's node was seen alive for
   `calm_ms` without a break and without a restart, the members are those of the placement, no change of them
   is under way, and no voter may be recovering. So a node that comes and goes gets nothing.
2. From a draining node, and from a replica that is to leave, a group is handed over at once, to the preferred
   voter or any other.
3. Only a voter that was heard lately, holds what is committed and is not recovering gets it, and none on a
   draining node.
4. `AT_ONCE` groups of a shard are handed over at a time; a group again only after a delay that doubles,
   whether the last hand-over failed or the leadership came back. So none of them oscillates.

Reference: docs/consensus.md#leaders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from laminar.node.host.periodic import Work
from laminar.node.partition.partition import Partition
from laminar.node.shard.context import ShardContext
from laminar.node.shard.work_lists import WorkLists
from membership.boot_history import BootRecord
from membership.records import PartitionRecord
from raft.values import NotLeader

_log = logging.getLogger("laminar.leaders")

CHECK_S = 1.0
# Most hand-overs of a shard at one time.
AT_ONCE = 2
# How often it is looked at whether a hand-over has ended.
PAUSE_S = 0.05
# The delay between the first hand-over of a group and the second; it doubles up to the longest, which is
# another one where the group must leave this replica.
FIRST_DELAY_MS = 5_000
LONGEST_DELAY_MS = 120_000
LONGEST_URGENT_DELAY_MS = 10_000


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The last hand-over of a group: to whom, in which term, and when the next one may be."""

    target: int
    term: int
    delay_ms: int
    next_ms: int


class LeaderHandback:
    """The hand-overs of one shard. The shard calls `observe` with each view, and `check` periodically.

    `calm_ms`: for how long a preferred leader's node must have been alive, without a break.
    """

    def __init__(self, shard: ShardContext, work: WorkLists, *, calm_ms: int) -> None:
        self._shard = shard
        self._work = work
        self._elsewhere = work.add("leaders", self._is_for_another)
        self._calm_ms = calm_ms
        # By node: the start of it that is seen alive, and since when.
        self._alive_since: dict[str, tuple[BootRecord | None, int]] = {}
        self._attempts: dict[bytes, _Attempt] = {}
        self._under_way: dict[bytes, Partition] = {}
        self.handed_over = 0
        self.refused = 0

    # -- what is known -----------------------------------------------------------------------

    def observe(self) -> None:
        """Note which nodes are alive in the view."""
        message = self._shard.view.message
        if message is None:
            return
        now_ms = self._shard.clock.monotonic_ms()
        alive: dict[str, tuple[BootRecord | None, int]] = {}
        for node, status in message.statuses.items():
            if status == "alive":
                boot = message.boots.get(node)
                known = self._alive_since.get(node)
                alive[node] = known if known is not None and known[0] == boot else (boot, now_ms)
        self._alive_since = alive

    def _is_for_another(self, record: PartitionRecord, partition: Partition | None) -> bool:
        """Return whether a group is led here that another node shall lead."""
        return (
            partition is not None
            and partition.replica.leading
            and (record.preferred_leader not in ("", self._shard.node) or self._must_go(record))
        )

    def _must_go(self, record: PartitionRecord) -> bool:
        """Return whether any other voter that can lead is to lead the group instead of this node."""
        shard = self._shard
        return self._is_draining(shard.node) or any(
            each.replica.node == shard.node and each.replica.store_id == shard.store_id
            for each in record.leaving
        )

    def _is_draining(self, node: str) -> bool:
        return self._work.is_draining(node)

    def _is_calm(self, node: str) -> bool:
        known = self._alive_since.get(node)
        return known is not None and self._shard.clock.monotonic_ms() - known[1] >= self._calm_ms

    # -- who shall lead ----------------------------------------------------------------------

    def _record_of(self, partition: Partition) -> PartitionRecord | None:
        record = self._shard.view.partition(partition.topic, partition.number)
        live = record is not None and record.group == partition.replica.group and record.state == "live"
        return record if live else None

    def _successor(self, partition: Partition) -> int | None:
        """Return the voter to which a group is handed over now; None: it is not handed over."""
        replica = partition.replica
        record = self._record_of(partition)
        attempt = self._attempts.get(replica.group)
        now_ms = self._shard.clock.monotonic_ms()
        if record is None or not replica.core.is_leader or replica.failure is not None:
            return None
        if attempt is not None and now_ms < attempt.next_ms:
            return None
        leaving = {each.replica.replica_id for each in record.leaving}
        fit = [
            member
            for member in replica.configuration.voters
            if member != replica.replica_id and member not in leaving and self._is_fit(partition, member)
        ]
        preferred = [member for member in fit if replica.nodes[member] == record.preferred_leader]
        if self._must_go(record):
            tried = attempt.target if attempt is not None else 0
            # The preferred one, but another than last time; else the one that lacks least.
            return max(
                fit,
                key=lambda member: (member != tried, member in preferred, replica.match_index(member)),
                default=None,
            )
        if preferred and self._is_calm(record.preferred_leader) and self._is_settled(partition, record):
            return preferred[0]
        return None

    def _is_fit(self, partition: Partition, member: int) -> bool:
        replica = partition.replica
        core = replica.core
        return (
            self._shard.driver.is_active(replica, member)
            and core.is_caught_up(member)
            and not core.may_be_recovering(member)
            and not self._is_draining(replica.nodes[member])
        )

    def _is_settled(self, partition: Partition, record: PartitionRecord) -> bool:
        """Return whether the group's members are those placed, for good, and no voter may be recovering."""
        core = partition.replica.core
        current = core.configuration
        placed = {each.replica_id for each in record.replicas if not each.abandoned}
        return (
            not record.leaving
            and not current.learners
            and placed == set(current.voters)
            and not core.is_reconfiguring
            and not any(map(core.may_be_recovering, current.voters))
        )

    # -- hand-overs --------------------------------------------------------------------------

    def check(self) -> Work | None:
        """Return the hand-overs that are due; None if there is none."""
        self._settle()
        due = list(self._due())
        return self._run(due) if due else None

    def _due(self) -> Iterable[Partition]:
        calm = set(filter(self._is_calm, self._alive_since))
        for record, partition in self._work.due(self._elsewhere):
            must_go = self._must_go(record)
            if partition is None or (not must_go and record.preferred_leader not in calm):
                continue
            if record.group in self._under_way:
                continue
            if self._successor(partition) is not None:
                yield partition

    async def _run(self, due: list[Partition]) -> None:
        for partition in due:
            while len(self._under_way) >= AT_ONCE:
                await asyncio.sleep(PAUSE_S)
                self._settle()
            self._begin(partition)

    def give_away(self, partition: Partition) -> bool:
        """Return whether a group that is led here is being handed over, as this replica is to leave it now.

        False: no other voter takes it, or the last one did not.
        """
        return partition.replica.group in self._under_way or self._begin(partition)

    def _begin(self, partition: Partition) -> bool:
        """Begin a hand-over, if it is still due; return whether one was begun."""
        replica = partition.replica
        target = self._successor(partition)
        record = self._record_of(partition)
        if target is None or record is None:
            return False
        last = self._attempts.get(replica.group)
        longest_ms = LONGEST_URGENT_DELAY_MS if self._must_go(record) else LONGEST_DELAY_MS
        delay_ms = FIRST_DELAY_MS if last is None else min(2 * last.delay_ms, longest_ms)
        now_ms = self._shard.clock.monotonic_ms()
        self._attempts[replica.group] = _Attempt(target, replica.core.term, delay_ms, now_ms + delay_ms)
        try:
            self._shard.driver.transfer(replica, target)
        except NotLeader:
            return False
        self._under_way[replica.group] = partition
        _log.info("%s: handing over to replica %d on %s", replica.name, target, replica.nodes[target])
        return True

    def _settle(self) -> None:
        """Count the hand-overs that have ended, and forget what no delay depends on any more."""
        for group, partition in list(self._under_way.items()):
            replica = partition.replica
            core = replica.core
            attempt = self._attempts[group]
            if self._shard.by_group.get(group) is not partition:
                del self._under_way[group]
            elif not replica.leading:
                del self._under_way[group]
                self.handed_over += 1
            elif core.is_leader or core.term != attempt.term:
                del self._under_way[group]
                self.refused += 1
                _log.info(
                    "%s: replica %d does not take over; next attempt in %d ms",
                    replica.name,
                    attempt.target,
                    attempt.delay_ms,
                )
        now_ms = self._shard.clock.monotonic_ms()
        self._attempts = {
            group: attempt
            for group, attempt in self._attempts.items()
            if group in self._under_way or now_ms < attempt.next_ms + LONGEST_DELAY_MS
        }

    def statistics(self) -> dict[str, int]:
        """Return counters and gauges."""
        return {
            "handed_over": self.handed_over,
            "refused": self.refused,
            "handing_over": len(self._under_way),
        }
