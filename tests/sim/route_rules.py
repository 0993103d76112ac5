"""The rules of routes, looked at from outside: each change of the catalog, and each committed entry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from laminar.batch import Buffer, Header, Kind
from laminar.node.partition.state.succession import open_record, seal_record
from laminar.node.routes import lineage
from membership.records import CatalogState, RouteChange, TopicRecord
from raft.quorum import majority
from tests.sim.world import World

# What only a partition that is open takes.
RECORDS = (Kind.DATA, Kind.STAGED, Kind.PUBLISH)


def changes_of(topic: TopicRecord) -> list[RouteChange]:
    """All changes of a topic that are known, oldest first."""
    return [*(topic.changes or ()), *([] if topic.change is None else [topic.change])]


class RouteRules:
    """The rules of one world; `groups` are what the watch knows of each group."""

    def __init__(self, world: World, groups: dict[bytes, Any]) -> None:
        self.world = world
        self.groups = groups
        self.happened: Counter[str] = Counter()
        # Hears of each step of a change: what it is, the topic or group, and the node if one takes it.
        self.on_step: Callable[[str, str, str], None] = lambda step, name, node: None
        # Hears of each change of a cursor that is committed: the topic, the partition, the entry.
        self.on_cursor: list[Callable[[TopicRecord, int, Buffer], None]] = []
        # Hears of each partition that is reclaimed: the topic without it, and its number.
        self.on_reclaimed: list[Callable[[TopicRecord, int], None]] = []
        # A test seals partitions of which the catalog knows no change.
        self.by_hand = False
        self._newest = CatalogState()
        # By "topic/number": the group that ever had it.
        self._numbers: dict[str, bytes] = {}
        # By group: the change that made it.
        self._origins: dict[bytes, int] = {}

    @property
    def newest(self) -> CatalogState:
        """The catalog as it is committed."""
        return self._newest

    # -- the catalog -------------------------------------------------------------------------

    def catalog_changed(self, after: CatalogState) -> None:
        """Check a change of the catalog, at the first node that makes it."""
        before = self._newest
        if after.version <= before.version:
            return
        self._newest = after
        for key, record in after.partitions.changes_since(before.partitions).items():
            if record is not None:
                known = self._numbers.setdefault(key, record.group)
                assert known == record.group, f"{key} is given to another partition"
                if record.origin:
                    self._origins[record.group] = record.origin
                continue
            name, _, number = key.rpartition("/")
            topic = after.topics.get(name)
            if topic is not None and lineage.seal_of(topic, int(number)) is not None:
                self.happened["partitions reclaimed"] += 1
                self.groups[self._numbers[key]].reclaimed = True
                for told in self.on_reclaimed:
                    told(topic, int(number))
        for name, topic in after.topics.changes_since(before.topics).items():
            was = before.topics.get(name)
            if was is not None and topic is not None:
                self._topic_changed(was, topic)

    def _topic_changed(self, was: TopicRecord, topic: TopicRecord) -> None:
        now = {each.id: each for each in changes_of(topic)}
        if topic.change is not None and was.change is None:
            self.on_step("preparing", topic.name, "")
        for change in changes_of(was):
            after = now.get(change.id)
            if change.state != "preparing":
                assert after is not None, f"{topic.name}: {change} was {change.state} and is gone"
            if after is None:
                self.happened["changes cancelled"] += 1
                continue
            if change.state != after.state:
                self.happened[f"changes {after.state}"] += 1
                self.on_step(after.state, topic.name, "")
            for number, seal in change.seals.items():
                assert after.seals[number] == seal, f"{topic.name}: the end of {number} has changed"
            if after.state == "done" and not after.force:
                sealed = {each.number for each in after.inputs}
                assert sealed == after.seals.keys(), f"{topic.name}: {after} is done without all seals"
            for number in after.seals.keys() - change.seals.keys():
                self._reported(topic, after, number)

    def _reported(self, topic: TopicRecord, change: RouteChange, number: int) -> None:
        group = self.groups[self._numbers[f"{topic.name}/{number}"]]
        seal = change.seals[number]
        assert group.seal == seal.index, f"{group.name}: {seal} is reported, the seal is {group.seal}"
        assert len(group.values) == seal.end_offset, f"{group.name}: {seal}, of {len(group.values)} records"
        group.reported = seal.index
        self.on_step("seal reported", group.name, "")
        self.check_kept(group, f"{group.name}: {seal} is reported")

    def _change(self, change_id: int) -> RouteChange | None:
        found = (each for topic in self._newest.topics.values() for each in changes_of(topic))
        return next((each for each in found if each.id == change_id), None)

    # -- logs --------------------------------------------------------------------------------

    def taken(self, who: str, node: str, group: Any, header: Header, frame: Buffer, stages: int) -> None:
        """Check an entry that a leader takes."""
        self.on_step("seal taken" if header.kind == Kind.SEAL else "open taken", group.name, node)
        if header.kind == Kind.SEAL and not self.by_hand:
            change = self._change(seal_record(frame).change_id)
            assert change is not None and change.state != "preparing", f"{who} seals for {change}"
            assert not stages, f"{who} seals over {stages} stages"
        if header.kind == Kind.OPEN:
            change = self._change(open_record(frame).change_id)
            assert change is not None and change.state == "done", f"{who} opens for {change}"
            for each in open_record(frame).inputs:
                sealed = self.groups[each.group]
                assert sealed.reported, f"{who} opens, and {sealed.name} is not sealed for good"

    def committed(self, who: str, group: Any, header: Header, frame: Buffer) -> None:
        """Check an entry that is committed for the first time."""
        if header.kind == Kind.OPEN:
            change_id = open_record(frame).change_id
            assert change_id == self._origins.get(group.id), f"{who} is opened for another change"
            self.happened["partitions opened"] += 1
            self.on_step("open committed", group.name, "")
        if header.kind == Kind.SEAL:
            self.happened["partitions sealed"] += 1
            self.on_step("seal committed", group.name, "")
        topic, _, number = group.name.rpartition("/")
        if header.kind == Kind.CURSOR and topic in self._newest.topics:
            for told in self.on_cursor:
                told(self._newest.topics[topic], int(number), frame)
        if header.kind in RECORDS:
            waits = group.id in self._origins and all(each.kind != Kind.OPEN for each in group.entries)
            assert not waits, f"{who}: entry {header.index} comes before the partition is opened"
            assert not group.reported, f"{who}: entry {header.index} comes after {group.reported}, a seal"

    def check_kept(self, group: Any, what: str) -> None:
        """Check that a majority of the voters has the seal synced, as far as they run."""
        if group.configuration is None:
            return
        voters = dict(group.configuration[1].voters)
        lacking = 0
        for machine in self.world.up:
            for shard in machine.shard_processes:
                partition = shard.by_group.get(group.id)
                if partition is not None and partition.replica.replica_id in voters:
                    lacking += partition.synced_seal == (0, 0)
        assert lacking <= len(voters) - majority(len(voters)), f"{what}: {lacking} voters may lose the seal"
