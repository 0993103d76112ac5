"""Hand-overs of leadership by a shard: to preferred leaders, and away from nodes and replicas that leave.

For each group that is led here this module decides whether another voter is to lead, which one, and when. The
catalog names the preferred leader of a partition, the nodes that are draining and the replicas that are to
leave; the reasons for that are not known here. The hand-over itself is done by Raft
(`Core.transfer_leadership`): proposals are refused as not applied until the other voter leads, entries
proposed before are in its log, and if it does not lead within an election timeout this replica continues to
lead.

Rules:

1. A group is handed over to its preferred leader only when all is calm: the preferred voter's node was seen
   alive for `calm_ms` without a break and without a restart, the members are those of the placement, no
   change of them is under way, and no voter may be recovering. So a node that comes and goes gets nothing.
2. From a draining node, and from a replica that is to leave, a group is handed over at once, to the preferred
   voter or any other.
3. Only a voter that was heard from lately, has all committed entries and is not recovering gets a group, and
   none on a draining node.
4. `AT_ONCE` groups of a shard are handed over at a time. The next hand-over of the same group waits for a
   delay that doubles each time, whether the last one failed or the leadership came back, so that leadership
   does not oscillate.

Reference: docs/consensus.md#leaders.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

from laminar.node.host.periodic import Work
from laminar.node.partition.partition import Partition
from laminar.node.shard.replicas.context import ShardContext
from laminar.node.shard.replicas.work_lists import WorkLists
from membership.boot_history import BootRecord
from membership.records import PartitionRecord
from raft.values import NotLeader

_log = logging.getLogger("laminar.leaders")

CHECK_S = 1.0
# Most hand-overs of a shard at one time.
AT_ONCE = 2
# The pause between two checks whether a hand-over has ended.
PAUSE_S = 0.05
# The delay between the first hand-over of a group and the second. It doubles up to the longest delay, or to
# the longest urgent one if the group must leave this replica.
FIRST_DELAY_MS = 5_000
LONGEST_DELAY_MS = 120_000
LONGEST_URGENT_DELAY_MS = 10_000


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The last hand-over of a group: the voter it went to, the term, and when the next one is allowed."""

    target: int
    term: int
    delay_ms: int
    next_ms: int


class LeaderHandback:
    """The hand-overs of one shard. The shard calls `observe` with each view, and `check` periodically.

    `calm_ms` is how long a preferred leader's node must have been alive without a break.
    """

    def __init__(self, shard: ShardContext, work: WorkLists, *, calm_ms: int) -> None:
        self._shard = shard
        self._work = work
        self._elsewhere = work.add("leaders", self._is_for_another)
        self._calm_ms = calm_ms
        # By node that is alive: the boot record of its present start, and since when (ms) it was seen alive.
        self._alive_since: dict[str, tuple[BootRecord | None, int]] = {}
        self._attempts: dict[bytes, _Attempt] = {}
        self._under_way: dict[bytes, Partition] = {}
        self.handed_over = 0
        self.refused = 0

    # -- what is known -----------------------------------------------------------------------

    def observe(self) -> None:
        """Record which nodes are alive in the new view (copy of the catalog), and since when."""
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
        """Return whether this node leads the group although another node is to lead it."""
        return (
            partition is not None
            and partition.replica.leading
            and (record.preferred_leader not in ("", self._shard.node) or self._must_go(record))
        )

    def _must_go(self, record: PartitionRecord) -> bool:
        """Return whether the group must leave this node: the node drains, or its replica here is leaving."""
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
        """Return the voter to which a group is to be handed over now; None if it is not to be handed over."""
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
            # Another voter than last time; if there is a choice the preferred one, else the longest log.
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
        """Return whether the group's members are those of the placement and no voter may be recovering.

        No change of the members may be under way either.
        """
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
        """Return the work of starting the hand-overs that are due, to be awaited; None if none is due."""
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
        """Hand over a group whose replica here is to be removed now; return whether a hand-over is under way.

        False if no other voter can take the group now, or a hand-over has just failed.
        """
        return partition.replica.group in self._under_way or self._begin(partition)

    def _begin(self, partition: Partition) -> bool:
        """Begin a group's hand-over, if it is still due; return whether one was begun."""
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
        """Count the hand-overs that have ended, and forget attempts so old that they delay nothing."""
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
                    "%s: replica %d did not take over leadership; next attempt in %d ms",
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
        """Return how many hand-overs succeeded and failed, and how many are under way."""
        return {
            "handed_over": self.handed_over,
            "refused": self.refused,
            "handing_over": len(self._under_way),
        }
