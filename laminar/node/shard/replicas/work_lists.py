"""The work lists of a shard: for each duty of the shard, the partitions that the duty has to look at.

A duty is a task that follows the catalog, such as creating replicas or sealing partitions. A change of the
catalog names the records that it changes. So a duty looks only at its list, not at every partition of the
catalog, and creating a topic takes the same time however many topics there are.

Each list has a rule, the function `is_due`. A partition is on the list if the rule returned True the last
time that it was called, and the rule is called again when anything happens on which it may depend:

- the partition's record or its topic's record changes; with a whole new view, every record counts as changed;
- the partition's replica here is opened, or begins to lead;
- this node begins or ceases to drain.

A duty does not take a partition off its list: `due` does, when the rule no longer holds. So work that a duty
could not finish stays due, after an error, a refused confirmation or a crash.

When a partition is due, by duty, and how often the duty looks at its list while this is not empty:

- to make: this store has a replica to create in a group that is being created. Each second.
- tombstones: the catalog has a tombstone of a replica of this shard. Each second.
- home: a live group has a replica of this store to create or to delete. Each second, like replicas that are
  lost or whose log may be empty, which do not depend on the catalog.
- members: a group led here has a replica that leaves, a learner, or voters that differ from the placement.
  Each second.
- leaders: a group led here is to be led by another node. Each second.
- routes: a group led here is an input to be sealed or whose seal is to be reported, or an output to be
  opened, or its log may have lost a seal; or a replica here does not know yet that its seal is final. Every
  200 ms, and at once with a view or an election.
- channels: a group led here lacks a channel of its topic in its log, or the channel's newest settings, or has
  a channel that is not in the view. Every 200 ms, and at once with a view or an election.
- policies, losses, first campaigns: with each view, and when a replica opens; after a failure, after a pause.
- min_replicas, trace: with each view; these cannot fail.

If a rule depended on anything else, work would stay undone for ever. So from time to time `check_all` calls
every rule for every partition, a few at a time. Work that it finds is done, and counted in `missed`: it shows
a bug in the users of this module, and the simulator fails on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from laminar.node.partition.partition import Partition
from laminar.node.shard.replicas.context import ShardContext
from membership.catalog_delta import CatalogDelta
from membership.records import PartitionRecord, Tombstone
from router import owner_shard, partition_hash

_log = logging.getLogger("laminar.shard")

CHECK_S = 30.0
"""The pause (seconds) between two runs of `check_all`."""

# Partitions that `check_all` checks in one turn of the loop: all rules for one take up to 80 us.
AT_ONCE = 25

Rule = Callable[[PartitionRecord, Partition | None], bool]
"""Returns whether a duty has to look at a partition, from its record and its replica here (None: none)."""


class WorkList:
    """The work list of a duty (periodic task) of a shard: keys (``topic/number``) of partitions to check."""

    __slots__ = ("is_due", "keys", "name")

    def __init__(self, name: str, is_due: Rule) -> None:
        self.name = name
        self.is_due = is_due
        self.keys: set[str] = set()


class WorkLists:
    """All work lists of one shard. Each duty adds its list before the first view comes."""

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        self._lists: list[WorkList] = []
        # Whether this node was draining in the last view.
        self._draining = False
        self.stones: set[str] = set()
        """Keys of the catalog's tombstones (deleted partitions) that name a replica of this shard."""
        self.missed = 0
        # Called with a text for each partition that `check_all` finds due and that was not on its list.
        self.on_missed: Callable[[str], None] = _log.error

    def add(self, name: str, is_due: Rule) -> WorkList:
        """Create and return the list of a duty, with its rule `is_due`."""
        work = WorkList(name, is_due)
        self._lists.append(work)
        return work

    def due(self, work: WorkList) -> list[tuple[PartitionRecord, Partition | None]]:
        """Return the partitions on a list that are due, sorted by key, with their replicas here.

        Those that are not due any more are taken off the list.
        """
        found = []
        for key in sorted(work.keys):
            known = self._known(key)
            if known is not None and work.is_due(*known):
                found.append(known)
            else:
                work.keys.discard(key)
        return found

    # -- what happens ------------------------------------------------------------------------

    def follow(self, delta: CatalogDelta | None) -> None:
        """Call the rules again for the partitions that a new view changes; for all if `delta` is None."""
        message = self._shard.view.message
        assert message is not None, "follow a view"
        was_draining, self._draining = self._draining, self.is_draining(self._shard.node)
        if delta is None:
            for work in self._lists:
                work.keys.clear()
            self.stones = {key for key in message.catalog.tombstones if self._is_ours(key)}
            self._look(message.catalog.partitions)
            return
        for key in delta.tombstones:
            (self.stones.add if self._is_ours(key) else self.stones.discard)(key)
        topics = message.catalog.topics
        keys = set(delta.partitions)
        for name in delta.topics:
            if name in topics:
                keys.update(f"{name}/{number}" for number in topics[name].all_numbers)
        if was_draining != self._draining:
            keys.update(f"{topic}/{number}" for topic, number in self._shard.partitions)
        self._look(keys)

    def changed(self, partition: Partition) -> bool:
        """Call the rules for a partition that was opened or begins to lead; return whether a list grew."""
        return self._look([f"{partition.topic}/{partition.number}"])

    def is_draining(self, node: str) -> bool:
        """Return whether a node drains according to the view, or is no node of the cluster (any more)."""
        record = self._shard.view.nodes().get(node)
        return record is None or record.draining

    # -- everything --------------------------------------------------------------------------

    async def check_all(self) -> None:
        """Call every rule for every partition, a few at a time; put missed due ones on their lists."""
        message = self._shard.view.message
        if message is None:
            return
        before = self.missed
        for place, key in enumerate(list(message.catalog.partitions)):
            if place % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            known = self._known(key)  # its present record, not that of the start of this check
            if known is not None:
                for work in self._lists:
                    if key not in work.keys and work.is_due(*known):
                        work.keys.add(key)
                        self._found(work.name, key)
        await asyncio.sleep(0)
        for key in list(self._shard.view.message.catalog.tombstones if self._shard.view.message else ()):
            if key not in self.stones and self._is_ours(key):
                self.stones.add(key)
                self._found("tombstones", key)
        if self.missed != before:
            self._shard.request_reconcile()

    def _found(self, name: str, key: str) -> None:
        self.missed += 1
        self.on_missed(f"{key} was missing on the work list {name!r} (a bug); its work is done now")

    # -- one partition -----------------------------------------------------------------------

    def _look(self, keys: Iterable[str]) -> bool:
        """Call the rules for these partitions and update the lists; return whether a list has grown."""
        grown = False
        for key in keys:
            known = self._known(key)
            for work in self._lists:
                if known is None or not work.is_due(*known):
                    work.keys.discard(key)
                elif key not in work.keys:
                    work.keys.add(key)
                    grown = True
        return grown

    def _known(self, key: str) -> tuple[PartitionRecord, Partition | None] | None:
        """Return a partition's record and its replica here; None if the shard does not own it."""
        record = self._shard.view.partitions().get(key)
        if record is None or not self._shard.owns(record):
            return None
        return record, self._shard.by_group.get(record.group)

    def _is_ours(self, key: str) -> bool:
        """Return whether a tombstone names a replica of this shard."""
        shard = self._shard
        assert shard.view.message is not None
        stone: Tombstone | None = shard.view.message.catalog.tombstones.get(key)
        return (
            stone is not None
            and any(replica.node == shard.node for replica in stone.replicas)
            and owner_shard(partition_hash(stone.topic, stone.number), shard.shards) == shard.number
        )
