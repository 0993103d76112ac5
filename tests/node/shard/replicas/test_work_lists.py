"""What makes a partition due for a shard's duties, and that nothing due is forgotten."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from laminar.log.disk.errors import DiskError
from laminar.log.format.manifest import ReplicaEntry
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import ConfirmRequest
from laminar.node.partition.context import PartitionContext
from laminar.node.partition.flush_policy import policy_of
from laminar.node.runtime.cluster_view import View, ViewMessage, ViewUpdate
from laminar.node.shard.replicas.leader_handback import LeaderHandback
from laminar.node.shard.replicas.reconcile import Reconciler
from laminar.node.shard.replicas.replica_moves import ReplicaMover
from laminar.node.shard.replicas.work_lists import WorkLists
from laminar.node.trace.ring import TraceRing
from membership.records import (
    AcceptedLoss,
    CatalogState,
    LeavingReplica,
    PartitionRecord,
    ReplicaRecord,
    Tombstone,
    TopicRecord,
)
from raft.configuration import Configuration
from router import owner_shard, partition_hash
from tests.membership.nodes import node

STORE = node("a").store_id


def replica(replica_id: int, name: str = "a", *, made: bool = True) -> ReplicaRecord:
    return ReplicaRecord(replica_id, name, node(name).store_id, made=made)


def group_of(number: int) -> bytes:
    return number.to_bytes(16)


def record_of(number: int, **fields: Any) -> PartitionRecord:
    """Partition 0 of topic t<number>, with one replica, on this node."""
    made = PartitionRecord(f"t{number}", 0, group_of(number), "live", [replica(number)], 1)
    return replace(made, **fields)


class Shard:
    """A shard of node a with its duties, which follows views as they come."""

    node = "a"
    store_id = STORE
    number = 0

    def __init__(self, *, shards: int = 1) -> None:
        self.shards = shards
        self.view = View(node="a", unix_name=str)
        self.partitions: dict[tuple[str, int], Any] = {}
        self.by_group: dict[bytes, Any] = {}
        self.traces = TraceRing()
        self.lost: list[ReplicaEntry] = []
        self.requested = 0
        self.answer = CatalogAnswer()
        self.asked: list[Any] = []
        self.campaigned: list[Any] = []
        self.manifest: dict[bytes, ReplicaEntry] = {}
        self.storage: Any = SimpleNamespace(
            manifest=SimpleNamespace(of_group=self.manifest.get, unmade=[], by_key={}),
            set_policy=self._set_policy,
            change_manifest=self._change_manifest,
        )
        self.manifest_error: Exception | None = None
        self.clock = SimpleNamespace(monotonic_ms=lambda: 0)
        self.driver = SimpleNamespace(campaign=self.campaigned.append)
        host: Any = self
        self.work = WorkLists(host)
        self.leaders = LeaderHandback(host, self.work, calm_ms=0)
        self.moves = ReplicaMover(host, self.work)
        self.reconciler = Reconciler(host, self.work)

    def owns(self, record: PartitionRecord) -> bool:
        return owner_shard(partition_hash(record.topic, record.number), self.shards) == self.number

    def request_reconcile(self) -> None:
        self.requested += 1

    async def ask_catalog(self, request: Any) -> CatalogAnswer:
        self.asked.append(request)
        return self.answer

    async def _set_policy(self, log: Any, policy: Any) -> None:
        log.policy = policy

    async def _change_manifest(self, change: Any) -> None:
        if self.manifest_error is not None:
            raise self.manifest_error
        known = {each.replica_id: each for each in self.manifest.values()}
        for entry in change(known).values():
            self.manifest[entry.group] = entry

    def take(self, **fields: Any) -> None:
        """A view comes, with these fields of the catalog changed: the first as a whole, then what changed."""
        before = self.view.message
        old = before.catalog if before is not None else CatalogState(nodes={"a": node("a"), "b": node("b")})
        catalog = replace(old, version=old.version + 1, **fields)
        after = ViewMessage(cluster_id=b"", catalog=catalog, statuses={})
        update = None if before is None else ViewUpdate.between(before, after)
        self.view.message = after if before is None or update is None else update.applied_to(before)
        self.work.follow(None if update is None else update.catalog)

    def put(self, record: PartitionRecord, **settings: Any) -> None:
        """A view comes in which this partition, and its topic's settings, are so."""
        catalog = self.catalog
        topic = TopicRecord(record.topic, 1, 1, settings, 1, catalog.version + 1)
        known = catalog.topics.get(record.topic)
        topics = catalog.topics
        if known is None or known.settings != settings:
            topics = topics | {record.topic: topic}
        self.take(partitions=catalog.partitions | {f"{record.topic}/{record.number}": record}, topics=topics)

    @property
    def catalog(self) -> CatalogState:
        return self.view.message.catalog if self.view.message is not None else CatalogState()

    def open(self, record: PartitionRecord, *, leading: bool = False) -> Any:
        """The replica of a partition is open, with its first election still to come."""
        partition: Any = SimpleNamespace(
            topic=record.topic,
            number=record.number,
            leads=leading,
            log=SimpleNamespace(policy=policy_of({}), start=SimpleNamespace(index=0)),
            copies=SimpleNamespace(wanted=1),
            state=SimpleNamespace(stages=SimpleNamespace(prepared=False), channels=SimpleNamespace(pins={})),
            replica=SimpleNamespace(
                group=record.group,
                replica_id=record.replicas[0].replica_id,
                leading=leading,
                configuration=Configuration(tuple(each.replica_id for each in record.replicas)),
                core=SimpleNamespace(term=1, leader_id=0, is_leader=leading),
            ),
        )
        nothing: Any = None
        partition.context = PartitionContext(
            topic=record.topic, number=record.number, driver=nothing, log=partition.log
        )
        partition.context.replica = partition.replica
        self.manifest[record.group] = ReplicaEntry(
            log_id=1,
            replica_id=record.replicas[0].replica_id,
            group=record.group,
            topic=record.topic,
            partition=record.number,
            partition_hash=0,
            state="made",
        )
        self.partitions[(record.topic, record.number)] = partition
        self.by_group[record.group] = partition
        return partition

    def is_moving(self) -> bool:
        return self.moves.needed

    def lists(self) -> dict[str, set[str]]:
        """What is due, by list."""
        return {work.name: set(work.keys) for work in self.work._lists if self.work.due(work)}


def many(count: int) -> tuple[Shard, list[str]]:
    """A shard that knows so many topics, and the partitions for which it asks its rules from now on."""
    shard = Shard()
    records = {f"t{number}/0": record_of(number) for number in range(1, count + 1)}
    topics = {record.topic: TopicRecord(record.topic, 1, 1, {}, 1, 1) for record in records.values()}
    shard.take(partitions=records, topics=topics)
    for record in records.values():
        shard.work.changed(shard.open(record))
    asked: list[str] = []

    def rule(record: PartitionRecord, partition: Any) -> bool:
        asked.append(record.topic)
        return False

    shard.work.add("asked", rule)
    return shard, asked


@pytest.mark.parametrize("count", [10, 1000])
async def test_a_change_costs_the_same_however_many_topics_there_are(count: int) -> None:
    shard, asked = many(count)
    shard.put(record_of(5000, state="creating", replicas=[replica(5000, made=False)]))
    assert ["t5000"] == asked
    shard.put(shard.catalog.partitions["t7/0"], min_replicas=2)
    assert ["t5000", "t7"] == asked
    shard.take(tombstones={"00": Tombstone("t7", 0, b"\0", [replica(7)], 1, 1)})
    shard.take()
    assert ["t5000", "t7"] == asked
    shard.work.changed(shard.partitions[("t3", 0)])
    assert ["t5000", "t7", "t3"] == asked


def test_every_record_is_looked_at_with_a_whole_view() -> None:
    """Also those that an update changed which never came."""
    shard, asked = many(10)
    shard.work.follow(None)
    assert 10 == len(asked)


async def test_what_the_leader_does_not_confirm_stays_to_be_made_though_no_view_comes() -> None:
    """By an old leader, or by one that has just lost its majority."""
    shard = Shard()
    shard.take()
    shard.put(record_of(1, state="creating", replicas=[replica(1, made=False)]))
    for tries in (1, 2):
        await shard.reconciler.make_missing()
        assert tries == len(shard.asked) and isinstance(shard.asked[-1], ConfirmRequest)
        assert shard.reconciler.is_unfinished

    shard.put(record_of(1))  # it was made meanwhile
    await shard.reconciler.make_missing()
    assert 2 == len(shard.asked) and not shard.reconciler.is_unfinished


async def test_a_deletion_is_reported_until_the_catalog_has_no_tombstone() -> None:
    shard = Shard(shards=2)
    shard.take()
    stones = {
        group_of(number).hex(): Tombstone(f"t{number}", 0, group_of(number), [replica(number, where)], 1, 1)
        for number, where in ((1, "a"), (2, "a"), (3, "a"), (4, "a"), (5, "b"), (6, "b"))
    }
    ours = sorted(
        stone.group
        for stone in stones.values()
        if stone.replicas[0].node == "a" and owner_shard(partition_hash(stone.topic, 0), 2) == 0
    )
    assert 0 < len(ours) < 4
    shard.take(tombstones=stones)
    for _ in range(2):
        await shard.reconciler.remove_deleted()
        assert [ours] == [each.groups for each in shard.asked if isinstance(each, ConfirmRequest)]
        assert shard.reconciler.is_unfinished
        shard.asked.clear()

    shard.take(tombstones={})
    await shard.reconciler.remove_deleted()
    assert not shard.asked and not shard.reconciler.is_unfinished


async def test_a_replica_that_is_opened_late_does_what_was_asked_before() -> None:
    """Its log was damaged, or another took its place; the views that asked for it have gone by."""
    shard = Shard()
    shard.take()
    shard.put(record_of(1), flush="interval", min_replicas=1)
    assert not shard.lists()
    partition = shard.open(record_of(1))
    assert shard.work.changed(partition)
    shard.reconciler.campaign_first_replicas()
    await shard.reconciler.change_policies()

    assert [partition.replica] == shard.campaigned and partition.log.policy.is_interval
    assert not shard.work.changed(partition)
    shard.reconciler.campaign_first_replicas()
    assert 1 == len(shard.campaigned) and not shard.lists()


def test_the_first_replica_campaigns_when_its_group_becomes_live() -> None:
    shard = Shard()
    shard.take()
    shard.put(record_of(1, state="creating"))
    partition = shard.open(record_of(1))
    shard.work.changed(partition)
    shard.reconciler.campaign_first_replicas()
    assert [] == shard.campaigned

    shard.put(record_of(1))
    shard.put(record_of(1, preferred_leader="a"))
    shard.reconciler.campaign_first_replicas()
    assert [partition.replica] == shard.campaigned
    # A topic of the same name is another group.
    again = record_of(1, group=group_of(9), replicas=[replica(9)])
    shard.put(again)
    other = shard.open(again)
    shard.work.changed(other)
    shard.reconciler.campaign_first_replicas()
    assert [partition.replica, other.replica] == shard.campaigned


def test_who_begins_to_lead_later_changes_the_members_and_hands_over() -> None:
    """The record came while another led: its change is not news any more."""
    moved = record_of(1, leaving=[LeavingReplica(replica(2, "b"), "moved")], preferred_leader="b")
    shard = Shard()
    shard.take()
    partition = shard.open(record_of(1))
    shard.put(moved)
    shard.reconciler.campaign_first_replicas()
    assert not shard.is_moving() and not shard.lists()

    partition.replica.leading = partition.replica.core.is_leader = partition.leads = True
    shard.work.changed(partition)
    assert {"members": {"t1/0"}, "leaders": {"t1/0"}} == shard.lists()
    assert [partition] == shard.moves.unsettled() and shard.is_moving()
    # Until it is done, however often it is looked at.
    assert [partition] == shard.moves.unsettled()
    shard.put(record_of(1))
    assert [] == shard.moves.unsettled() and not shard.is_moving() and not shard.lists()


def test_a_node_that_drains_hands_over_what_it_leads() -> None:
    """No record of a partition changes."""
    shard = Shard()
    shard.take()
    for number in (1, 2):
        shard.put(record_of(number))
        shard.work.changed(shard.open(record_of(number), leading=number == 1))
    shard.reconciler.campaign_first_replicas()
    assert not shard.lists()
    shard.take(nodes={**shard.catalog.nodes, "b": replace(node("b"), draining=True)})
    assert not shard.lists()
    shard.take(nodes={**shard.catalog.nodes, "a": replace(node("a"), draining=True)})
    assert {"leaders": {"t1/0"}} == shard.lists()
    shard.take(nodes={**shard.catalog.nodes, "a": node("a")})
    assert not shard.lists()


@pytest.mark.parametrize(
    "fields",
    [{"replicas": [replica(1, made=False)]}, {"replicas": [replica(2, "b")], "removed": [replica(1)]}],
)
def test_a_live_group_that_wants_something_of_this_store_keeps_it_busy(fields: dict[str, Any]) -> None:
    shard = Shard()
    shard.take()
    shard.put(record_of(1))
    assert not shard.is_moving()
    shard.put(record_of(1, **fields))
    assert shard.is_moving() and [shard.catalog.partitions["t1/0"]] == shard.moves._at_home()
    shard.take(partitions={})
    assert not shard.is_moving() and [] == shard.moves._at_home()


def test_what_is_lost_or_may_be_empty_is_looked_at_though_the_catalog_asks_nothing() -> None:
    shard = Shard()
    shard.take()
    for number in (1, 2, 3):
        shard.put(record_of(number))
        shard.open(record_of(number))
    shard.lost.append(shard.manifest[group_of(2)])
    shard.storage.manifest.unmade.append(shard.manifest[group_of(3)])
    assert shard.is_moving()
    assert [record_of(2), record_of(3)] == shard.moves._at_home()


async def test_a_policy_stays_due_until_the_manifest_has_it() -> None:
    """The log has it, and a restart would believe the manifest."""
    shard = Shard()
    shard.take()
    shard.put(record_of(1))
    partition = shard.open(record_of(1))
    shard.work.changed(partition)
    shard.put(record_of(1), flush="interval")
    shard.manifest_error = DiskError("write", "manifest", 28, "full")
    with pytest.raises(DiskError):
        await shard.reconciler.change_policies()
    assert partition.log.policy.is_interval
    shard.manifest_error = None
    await shard.reconciler.change_policies()
    assert "interval" == shard.manifest[group_of(1)].settings["flush"]
    assert "policies" not in shard.lists()


def test_min_replicas_follow_their_topic() -> None:
    shard = Shard()
    shard.take()
    shard.put(record_of(1))
    partition = shard.open(record_of(1))
    shard.work.changed(partition)
    shard.put(record_of(1), min_replicas=2)
    shard.reconciler.follow_min_replicas()
    assert 2 == partition.copies.wanted


def test_a_trace_follows_its_topic() -> None:
    shard = Shard()
    shard.take()
    shard.put(record_of(1))
    partition = shard.open(record_of(1))
    shard.work.changed(partition)
    for setting in ("all", "sampled", "off"):
        shard.put(record_of(1), trace=setting)
        assert ("trace" in shard.lists()) == (not partition.context.follows_trace({"trace": setting}, ()))
        shard.reconciler.follow_trace()
        assert partition.context.follows_trace({"trace": setting}, ())
    assert partition.context.trace is None


async def test_a_group_that_goes_on_by_decision_is_looked_at_when_its_replica_opens() -> None:
    loss = AcceptedLoss(1, [2], last_index=1, last_term=1, kept_offset=0, decided_ms=1)
    shard = Shard()
    shard.take()
    shard.put(record_of(1, losses=[loss]))
    await shard.reconciler.go_on_alone()
    assert not shard.asked
    partition = shard.open(record_of(1))
    assert shard.work.changed(partition)
    await shard.reconciler.go_on_alone()
    assert [[group_of(1)]] == [each.groups for each in shard.asked]


async def test_what_no_list_has_is_found_counted_and_done() -> None:
    """If something happens that no rule was asked for, work waits for the next check, and not for ever."""
    shard = Shard()
    shard.take()
    told: list[str] = []
    shard.work.on_missed = told.append
    for number in (1, 2):
        shard.put(record_of(number))
        shard.work.changed(shard.open(record_of(number)))
    shard.reconciler.campaign_first_replicas()
    await shard.work.check_all()
    assert (0, []) == (shard.work.missed, told)

    shard.partitions[("t1", 0)].log.policy = policy_of({"flush": "interval"})  # nobody says so
    before = shard.requested
    await shard.work.check_all()
    assert 1 == shard.work.missed and 1 == len(told) and shard.requested == before + 1
    assert {"policies": {"t1/0"}} == shard.lists()
    await shard.work.check_all()
    assert 1 == shard.work.missed, "it is on its list now"
