"""Which groups a shard hands over, to whom and when: decided from the view and what a leader knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from laminar.node.runtime.cluster_view import View, ViewMessage
from laminar.node.shard.replicas.leader_handback import AT_ONCE, FIRST_DELAY_MS, LeaderHandback
from laminar.node.shard.replicas.work_lists import WorkLists
from membership.boot_history import BootRecord
from membership.records import CatalogState, LeavingReplica, PartitionRecord
from raft.configuration import Configuration
from tests.membership.nodes import node, state_of

CALM_MS = 5_000
ALIVE = {"a": "alive", "b": "alive", "c": "alive"}


class Shard:
    """Shard 0 of node a, which leads groups with replicas 1, 2 and 3 on a, b and c; b is preferred."""

    node = "a"
    store_id = b"a" * 16

    def __init__(self, *, groups: int = 1) -> None:
        self.now_ms = 0
        self.clock = SimpleNamespace(monotonic_ms=lambda: self.now_ms)
        self.view = View(node="a", unix_name=str)
        self.silent: set[int] = set()
        self.behind: set[int] = set()
        self.recovering: set[int] = set()
        self.transfers: list[int] = []
        self.driver = SimpleNamespace(
            is_active=lambda replica, member: member not in self.silent, transfer=self._transfer
        )
        record = replace(state_of(*"abc").partitions["t/0"], preferred_leader="b")
        self.records = [replace(record, number=n, group=bytes([n]) * 16) for n in range(groups)]
        self.nodes = {name: node(name) for name in "abc"}
        self.boots: dict[str, BootRecord] = {}
        self.by_group = {record.group: self._partition(record) for record in self.records}
        self.partitions: dict[tuple[str, int], Any] = {}
        self.work = WorkLists(cast(Any, self))
        self.leaders = LeaderHandback(cast(Any, self), self.work, calm_ms=CALM_MS)
        self.show()

    def owns(self, record: PartitionRecord) -> bool:
        return True

    def _partition(self, record: PartitionRecord) -> Any:
        core = SimpleNamespace(
            term=1,
            is_leader=True,
            is_reconfiguring=False,
            configuration=Configuration((1, 2, 3)),
            is_caught_up=lambda member: member not in self.behind,
            may_be_recovering=lambda member: member in self.recovering,
        )
        replica = SimpleNamespace(
            name=f"t/{record.number}",
            group=record.group,
            replica_id=1,
            leading=True,
            failure=None,
            core=core,
            nodes={1: "a", 2: "b", 3: "c"},
            configuration=core.configuration,
            match_index=lambda member: 10 - member,
        )
        return SimpleNamespace(topic="t", number=record.number, replica=replica)

    def _transfer(self, replica: Any, member: int) -> None:
        self.transfers.append(member)
        replica.core.is_leader = False

    def show(self, statuses: dict[str, str] | None = None) -> None:
        """A view comes."""
        partitions = {f"t/{record.number}": record for record in self.records}
        catalog = CatalogState(version=5, nodes=self.nodes, partitions=partitions)
        self.view.message = ViewMessage(
            cluster_id=b"",
            catalog=catalog,
            statuses=ALIVE if statuses is None else statuses,
            boots=self.boots,
        )
        self.leaders.observe()
        self.work.follow(None)

    def change(self, **fields: Any) -> None:
        """The partition changes in the catalog."""
        self.records[0] = replace(self.records[0], **fields)
        self.show()

    def draining(self, *names: str) -> None:
        """These nodes are to be emptied."""
        self.nodes = {name: replace(record, draining=name in names) for name, record in self.nodes.items()}
        self.show()

    def handed_over(self) -> list[int]:
        """To which replicas groups are handed over by one check."""
        self.transfers.clear()
        work = self.leaders.check()
        if work is not None:
            with pytest.raises(StopIteration):
                work.send(None)
        return list(self.transfers)

    def ends(self, *, refused: bool) -> None:
        """What is under way ends."""
        for partition in self.by_group.values():
            partition.replica.core.is_leader = refused
            partition.replica.leading = refused
            self.work.changed(partition)


def test_a_group_goes_to_its_preferred_leader_when_all_is_calm() -> None:
    """Once, and it is counted when it has gone."""
    shard = Shard()
    assert [] == shard.handed_over()
    shard.now_ms += CALM_MS
    assert [2] == shard.handed_over()
    assert [] == shard.handed_over()
    shard.ends(refused=False)
    assert [] == shard.handed_over()
    assert {"handed_over": 1, "refused": 0, "handing_over": 0} == shard.leaders.statistics()


def test_a_node_that_came_and_went_or_was_restarted_waits_again() -> None:
    """It is not calm before it was there for some time without a break."""
    shard = Shard()
    for away in ("suspect", "dead", "restarted"):
        shard.now_ms += CALM_MS - 1
        if away == "restarted":
            shard.boots = {"b": BootRecord(2, b"n" * 8)}
        else:
            shard.show(ALIVE | {"b": away})
        shard.show()
        shard.now_ms += 1
        assert [] == shard.handed_over(), away
    shard.now_ms += CALM_MS
    assert [2] == shard.handed_over()


@pytest.mark.parametrize("why", ["silent", "behind", "recovering", "draining", "none", "here", "gone"])
def test_an_unfit_preferred_leader_gets_nothing_and_nobody_else_does(why: str) -> None:
    """Neither one that could not lead, nor one that is to be emptied, nor another in its place."""
    shard = Shard()
    if why in ("silent", "behind", "recovering"):
        getattr(shard, why).add(2)
    elif why == "draining":
        shard.draining("b")
    else:
        shard.change(preferred_leader={"none": "", "here": "a", "gone": "d"}[why])
    shard.now_ms += CALM_MS

    assert [] == shard.handed_over()


@pytest.mark.parametrize("why", ["pending", "learner", "leaving", "placed", "recovering"])
def test_no_group_is_handed_over_by_preference_while_its_members_change(why: str) -> None:
    """Or while a voter is recovering, whichever: one thing after the other."""
    shard = Shard()
    core = next(iter(shard.by_group.values())).replica.core
    if why == "pending":
        core.is_reconfiguring = True
    elif why == "learner":
        core.configuration = Configuration((1, 2, 3), (4,))
    elif why == "leaving":
        record = shard.records[0]
        shard.change(leaving=[LeavingReplica(replace(record.replicas[2], replica_id=9), "moved")])
    elif why == "placed":
        shard.change(replicas=shard.records[0].replicas[:2])
    else:
        shard.recovering.add(3)
    shard.now_ms += CALM_MS

    assert [] == shard.handed_over()


def test_a_draining_node_hands_over_at_once_to_any_voter_that_can_lead() -> None:
    """The preferred one before others, whatever changes meanwhile; never to one that drains as well."""
    for unfit, target in (([], [2]), (["silent"], [3]), (["behind"], [3]), (["recovering"], [3])):
        shard = Shard()
        for each in unfit:
            getattr(shard, each).add(2)
        next(iter(shard.by_group.values())).replica.core.is_reconfiguring = True
        shard.draining("a")
        assert target == shard.handed_over(), unfit
    shard = Shard()
    shard.change(preferred_leader="c")  # which lacks more than b
    shard.draining("a")
    assert [3] == shard.handed_over()
    shard = Shard()
    shard.draining("a", "b")
    assert [3] == shard.handed_over()
    shard = Shard()
    shard.draining("a", "b", "c")
    assert [] == shard.handed_over()


def test_a_replica_that_is_to_leave_hands_over_before_it_is_removed() -> None:
    """To one that stays; if that one does not take over, the removal does not wait for it."""
    shard = Shard()
    (partition,) = shard.by_group.values()
    assert not shard.leaders.give_away(partition)
    record = shard.records[0]
    own, second, third = record.replicas
    shard.change(replicas=[third], leaving=[LeavingReplica(own, "moved"), LeavingReplica(second, "moved")])
    assert shard.leaders.give_away(partition) and [3] == shard.transfers
    assert shard.leaders.give_away(partition)
    shard.ends(refused=True)
    shard.handed_over()
    assert not shard.leaders.give_away(partition)


def test_what_fails_or_comes_back_is_tried_again_after_a_delay_that_doubles() -> None:
    """So nothing goes to and fro; and another voter is tried, where the group must go."""
    shard = Shard()
    shard.now_ms += CALM_MS
    assert [2] == shard.handed_over()
    for refused, delay_ms in (
        (True, FIRST_DELAY_MS),
        (False, 2 * FIRST_DELAY_MS),
        (True, 4 * FIRST_DELAY_MS),
    ):
        shard.ends(refused=refused)
        shard.handed_over()
        shard.ends(refused=True)  # it leads again
        shard.now_ms += delay_ms - 1
        assert [] == shard.handed_over()
        shard.now_ms += 1
        assert [2] == shard.handed_over()
    assert (1, 2) == (shard.leaders.handed_over, shard.leaders.refused)

    shard = Shard()
    shard.draining("a")
    assert [2] == shard.handed_over()
    shard.ends(refused=True)
    shard.handed_over()
    shard.now_ms += FIRST_DELAY_MS
    assert [3] == shard.handed_over()


async def test_few_groups_are_handed_over_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them takes no appends meanwhile; the next begin when these have gone."""
    shard = Shard(groups=7)
    shard.now_ms += CALM_MS
    most = 0

    async def pause(seconds: float) -> None:
        nonlocal most
        going = [each for each in shard.by_group.values() if not each.replica.core.is_leader]
        under_way = [each for each in going if each.replica.leading]
        most = max(most, len(under_way))
        under_way[0].replica.leading = False

    monkeypatch.setattr("laminar.node.shard.replicas.leader_handback.asyncio.sleep", pause)
    work = shard.leaders.check()
    assert work is not None
    await work

    assert (AT_ONCE, 7) == (most, len(shard.transfers))
