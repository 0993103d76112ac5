"""The work lists of a shard: which partitions each of its duties has to look at.

A change of the catalog names the records that it changes. So a duty of a shard looks at its list, and not at
every partition of the catalog: making a topic costs the same however many there are.

Each list has a rule, `is_due`. A partition is on the list when the rule held the last time that it was asked,
and the rule is asked again when something happens that it may depend on:

- the partition's record changes, or its topic's; with a whole view, every record;
- its replica here is opened, or begins to lead;
- this node begins or ceases to drain.

A duty does not take a partition off its list: `due` does, when the rule no longer holds. So what a duty could
not finish stays due: an error, a refused confirmation or a crash loses nothing.

What makes a partition due, by duty, and what looks at the list again while it is not empty:

- to make: this store has a replica to make in a group that is being created. Each second.
- tombstones: the catalog has one of a replica of this shard. Each second.
- home: a live group has a replica of this store to make or to delete. Each second, as for replicas that are
  lost or whose log may be empty, which are no matter of the catalog.
- members: a group led here has a replica that leaves, a learner, or other voters than those placed. Each
  second.
- leaders: a group led here is another's to lead. Each second.
- routes: a group led here is an input that is to be sealed or whose seal is to be reported, an output that is
  to be opened, or may lack a seal; or a replica here has not heard yet that its seal is kept. Every 200 ms,
  and at once with a view or an election.
- channels: a group led here lacks a channel of its topic in its log, or its newest settings, or has one that
  the view has not. Every 200 ms, and at once with a view or an election.
- policies, losses, first campaigns: with each view, and when a replica opens; what failed, after a pause.
- min_replicas, trace: with each view; they cannot fail.

A rule that depends on something else would leave work undone for ever. So `check_all` asks every rule for
every partition, now and then and a few at a time. What it finds is done, and counted in `missed`: that is a
mistake of this module's users, and the simulator fails on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from laminar.node.partition.partition import Partition
from laminar.node.shard.context import ShardContext
from membership.catalog_delta import CatalogDelta
from membership.records import PartitionRecord, Tombstone
from router import owner_shard, partition_hash

_log = logging.getLogger("laminar.shard")

CHECK_S = 30.0
"""How long after the end of a check of everything the next one begins."""

# Partitions that are checked in one turn of the loop: by all rules one takes up to 80 us.
AT_ONCE = 25

Rule = Callable[[PartitionRecord, Partition | None], bool]
"""Whether a duty has to look at a partition of this shard: by its record, and its replica if one is open."""


class WorkList:
    """The keys of the partitions that one duty has to look at."""

    __slots__ = ("is_due", "keys", "name")

    def __init__(self, name: str, is_due: Rule) -> None:
        self.name = name
        self.is_due = is_due
        self.keys: set[str] = set()


class WorkLists:
    """The lists of one shard. Its duties add theirs before the first view comes."""

    def __init__(self, shard: ShardContext) -> None:
        self._shard = shard
        self._lists: list[WorkList] = []
        # Whether this node was draining in the last view.
        self._draining = False
        self.stones: set[str] = set()
        """Keys of the tombstones that name a replica of this shard."""
        self.missed = 0
        # Called with a text for each partition that `check_all` finds and no list had.
        self.on_missed: Callable[[str], None] = _log.error

    def add(self, name: str, is_due: Rule) -> WorkList:
        """Return a new list; `is_due` as in `WorkList`."""
        work = WorkList(name, is_due)
        self._lists.append(work)
        return work

    def due(self, work: WorkList) -> list[tuple[PartitionRecord, Partition | None]]:
        """Return the partitions on a list, sorted by key, with their replicas here; drop what is not due."""
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
        """Ask the rules again for what a new view changes; `delta` None: for everything."""
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
        """Ask the rules for a partition that is open now, or led; return whether a list has grown."""
        return self._look([f"{partition.topic}/{partition.number}"])

    def is_draining(self, node: str) -> bool:
        """Return whether a node is to be emptied by the view, or is none of the cluster."""
        record = self._shard.view.nodes().get(node)
        return record is None or record.draining

    # -- everything --------------------------------------------------------------------------

    async def check_all(self) -> None:
        """Ask every rule for every partition, a few at a time; put what was missed on its list."""
        message = self._shard.view.message
        if message is None:
            return
        before = self.missed
        for place, key in enumerate(list(message.catalog.partitions)):
            if place % AT_ONCE == AT_ONCE - 1:
                await asyncio.sleep(0)
            known = self._known(key)  # as it is now
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
        """Ask the rules for these partitions; return whether a list has grown."""
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
