"""Which step a group takes next, and which replicas get a new place: decided from records alone."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from laminar.http.api.problems import Problem
from laminar.node.catalog.messages.answers import CatalogAnswer
from laminar.node.catalog.messages.requests import ReplicaRequest
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.runtime.cluster_view import View, ViewMessage
from laminar.node.shard.replicas.replica_moves import Observed, ReplicaMover, next_step
from laminar.node.shard.replicas.work_lists import WorkLists
from membership.records import (
    CatalogState,
    LeavingReplica,
    PartitionRecord,
    ReplicaRecord,
)
from membership.requests import (
    ReportRemovals,
)
from raft.configuration import check_step
from tests.membership.nodes import GROUP


def replica(number: int, name: str, *, made: bool = True) -> ReplicaRecord:
    return ReplicaRecord(number, name, name.encode() * 16, made=made)


def observed(
    *,
    silent: Collection[str] = (),
    behind: Collection[int] = (),
    recovering: Collection[int] = (),
    newest: bool = True,
) -> Observed:
    """What a leader knows: silent nodes, replicas that lag or are recovering, whether its view is new."""

    def majority_active(wanted: ConfigurationRecord) -> bool:
        answering = [name for _, name in wanted.voters if name not in silent]
        return 2 * len(answering) > len(wanted.voters)

    return Observed(
        caught_up=lambda replica_id: replica_id not in behind,
        recovering=lambda replica_id: replica_id in recovering,
        majority_active=majority_active,
        newest=newest,
    )


def steps(record: PartitionRecord, current: ConfigurationRecord, seen: Observed | None = None) -> list[str]:
    """All steps to the end, as text; each must be one that Raft allows, and most of its voters answer."""
    seen = seen or observed()
    taken: list[str] = []
    while (step := next_step(record, current, seen)) is not None:
        check_step(current.configuration(), step.configuration())
        assert seen.majority_active(step), step
        taken.append(f"{[n for _, n in step.voters]} {[n for _, n in step.learners]}")
        current = step
    return taken


def moving(why: Literal["dead", "lost", "moved"], *, made: bool = True) -> PartitionRecord:
    return PartitionRecord(
        "t",
        0,
        GROUP,
        "live",
        [replica(1, "a"), replica(2, "b"), replica(4, "d", made=made)],
        1,
        leaving=[LeavingReplica(replica(3, "c"), why)],
    )


NOW = ConfigurationRecord(((1, "a"), (2, "b"), (3, "c")))


def test_a_dead_replica_is_removed_before_the_new_one_is_added() -> None:
    """Else four voters would stand, of which one is dead: a majority is three of three."""
    wanted = ["['a', 'b'] []", "['a', 'b'] ['d']", "['a', 'b', 'd'] []"]
    assert steps(moving("dead"), NOW) == steps(moving("lost"), NOW) == wanted


def test_one_that_is_thought_dead_stays_while_another_is_silent() -> None:
    """Of the two voters that were left one would be silent: nothing could be committed any more, though two
    of three are there.
    """
    assert steps(moving("dead"), NOW, observed(silent="b")) == [
        "['a', 'b', 'c'] ['d']",
        "['a', 'b', 'c', 'd'] []",
        "['a', 'b', 'd'] []",
    ]


def test_a_replica_that_is_moved_stays_until_the_new_one_votes() -> None:
    """There are never fewer copies than before."""
    assert steps(moving("moved"), NOW) == [
        "['a', 'b', 'c'] ['d']",
        "['a', 'b', 'c', 'd'] []",
        "['a', 'b', 'd'] []",
    ]
    assert steps(moving("moved", made=False), NOW) == ["['a', 'b', 'c'] ['d']"]


def test_nobody_votes_whose_node_has_not_said_that_it_is_made() -> None:
    """Until then its manifest would take an emptied log for a new one."""
    assert steps(moving("dead", made=False), NOW)[-1] == "['a', 'b'] ['d']"
    assert (
        next_step(
            moving("dead"),
            ConfigurationRecord(((1, "a"), (2, "b")), ((4, "d"),)),
            observed(behind=[4]),
        )
        is None
    )


def test_a_group_that_is_where_it_should_be_takes_no_step() -> None:
    """Its members are those of the placement."""
    record = replace(moving("dead"), replicas=[replica(1, "a"), replica(2, "b"), replica(3, "c")], leaving=[])
    assert steps(record, NOW) == []


def test_an_old_placement_undoes_nothing_that_came_after_it() -> None:
    """A leader whose catalog stands still sees a member that it has never heard of: it waits for a newer."""
    old = replace(moving("dead"), replicas=[replica(1, "a"), replica(2, "b"), replica(3, "c")], leaving=[])
    without_c = ConfigurationRecord(((1, "a"), (2, "b")), ((4, "d"),))
    assert steps(old, without_c) == []
    assert steps(old, ConfigurationRecord(((1, "a"), (2, "b"), (4, "d")))) == []


def test_pitfall_50_a_replica_that_an_old_placement_brought_back_is_removed_again() -> None:
    """Its node deletes it, so it must not stay a member: nobody would ever speak of it again."""
    settled = replace(moving("dead"), leaving=[])
    for current in (
        ConfigurationRecord(((1, "a"), (2, "b"), (4, "d")), ((3, "c"),)),
        ConfigurationRecord(((1, "a"), (2, "b"), (3, "c"), (4, "d"))),
    ):
        assert steps(settled, current) == ["['a', 'b', 'd'] []"]


ONE = ConfigurationRecord(((1, "a"),))


def growing(*made: int) -> PartitionRecord:
    """One replica, and two more since, of which these are made."""
    replicas = [replica(n, name, made=n == 1 or n in made) for n, name in ((1, "a"), (2, "b"), (3, "c"))]
    return PartitionRecord("t", 0, GROUP, "live", replicas, 1, newest_replica_id=3)


def test_of_one_voter_nobody_is_promoted_before_all_are_made_and_have_caught_up() -> None:
    """Two voters stop with either of them, for as long as the third is still being filled."""
    learners = ["['a'] ['b']", "['a'] ['b', 'c']"]
    assert steps(growing(2), ONE) == learners
    assert steps(growing(2, 3), ONE, observed(behind=[3])) == learners
    assert steps(growing(2, 3), ONE) == [*learners, "['a', 'b'] ['c']", "['a', 'b', 'c'] []"]


def test_a_group_of_two_voters_waits_for_no_other_learner() -> None:
    """With a third it bears a failure that it did not bear before, whatever is still being filled."""
    two = ConfigurationRecord(((1, "a"), (2, "b")))
    record = replace(growing(3), replicas=[*growing(2, 3).replicas, replica(4, "d", made=False)])
    record = replace(record, newest_replica_id=4)
    assert steps(record, two)[-1] == "['a', 'b', 'c'] ['d']"


def test_an_only_voter_that_moves_waits_for_its_successor_alone() -> None:
    """One that an operator has abandoned is never made: whoever waited for it would wait for ever."""
    abandoned = replace(replica(2, "b"), lost=True, abandoned=True)
    record = PartitionRecord("t", 0, GROUP, "live", [replica(3, "c"), abandoned], 1)
    record = replace(record, leaving=[LeavingReplica(replica(1, "a"), "moved")])
    current = ConfigurationRecord(((1, "a"),), abandoned=(2,))
    assert steps(record, current) == ["['a'] ['c']", "['a', 'c'] []", "['c'] []"]


def shrinking() -> PartitionRecord:
    """Three replicas of which the newest shall leave."""
    return PartitionRecord(
        "t",
        0,
        GROUP,
        "live",
        [replica(1, "a"), replica(2, "b")],
        1,
        leaving=[LeavingReplica(replica(3, "c"), "moved")],
        newest_replica_id=3,
    )


def test_the_newest_replica_leaves_though_its_id_is_above_all_that_stay() -> None:
    """It is of this placement, not of a later one; and what comes after it is of a later one."""
    assert steps(shrinking(), NOW) == ["['a', 'b'] []"]
    assert steps(shrinking(), ConfigurationRecord(((1, "a"), (2, "b"), (3, "c")), ((4, "d"),))) == []


def test_pitfall_50_the_newest_replica_that_an_old_placement_brought_back_is_removed_again() -> None:
    """It left with the highest id of all: its node has deleted it, or is about to."""
    settled = replace(shrinking(), leaving=[])
    assert steps(settled, NOW) == ["['a', 'b'] []"]
    assert steps(settled, ConfigurationRecord(((1, "a"), (2, "b")), ((3, "c"),))) == ["['a', 'b'] []"]


def test_nothing_is_added_by_a_record_that_may_be_old() -> None:
    """Not even one that was never made, by that record: it may have been made, promoted and removed since."""
    two = ConfigurationRecord(((1, "a"), (2, "b")))
    for made in ((2, 3), (2,)):
        assert steps(growing(*made), two, observed(newest=False)) == []
        assert steps(growing(*made), two)[0] == "['a', 'b'] ['c']"


def test_nobody_leaves_by_choice_while_a_voter_that_stays_may_be_recovering() -> None:
    """What it forgot, the one that leaves may hold; and until it has caught up it could stop the group."""
    assert steps(shrinking(), NOW, observed(recovering=[2])) == []
    assert steps(shrinking(), NOW, observed(recovering=[3])) == ["['a', 'b'] []"]
    dead = replace(shrinking(), leaving=[LeavingReplica(replica(3, "c"), "dead")])
    assert steps(dead, NOW, observed(recovering=[2])) == ["['a', 'b'] []"]


def reporting(
    *, committed_index: int, current: ConfigurationRecord, deposed: bool = False
) -> tuple[ReplicaMover, Any, list[Any]]:
    """A leader whose log has the removal of 3 as entry 7, and what it reports."""
    told: list[Any] = []

    async def ask(request: ReplicaRequest) -> CatalogAnswer:
        told.append(request.change)
        return CatalogAnswer()

    async def confirm(replica: Any) -> int:
        if deposed:
            raise ConnectionError("no longer the leader")
        return committed_index

    history = [(2, NOW), (7, ConfigurationRecord(((1, "a"), (2, "b"))))]
    partition = SimpleNamespace(
        leads=True,
        committed_index=committed_index,
        replica=SimpleNamespace(configuration=current.configuration()),
        state=SimpleNamespace(
            configurations_up_to=lambda index: [each for each in history if each[0] <= index]
        ),
    )
    driver = SimpleNamespace(confirm=confirm)
    shard: Any = SimpleNamespace(ask_catalog=ask, driver=driver)
    return ReplicaMover(shard, WorkLists(shard)), partition, told


async def test_a_removal_is_told_when_it_is_committed() -> None:
    """What is told lets the replica be deleted: an entry that is cut again must not do that."""
    without = ConfigurationRecord(((1, "a"), (2, "b")))
    moves, partition, told = reporting(committed_index=6, current=without)
    await moves._report(partition, moving("dead"))
    assert [] == told
    moves, partition, told = reporting(committed_index=7, current=without)
    await moves._report(partition, moving("dead"))
    assert [ReportRemovals("t/0", GROUP, [3])] == told


async def test_a_leader_that_was_deposed_reports_no_removal() -> None:
    """Its log may end before the replica joined: the report would have a voter deleted."""
    without = ConfigurationRecord(((1, "a"), (2, "b")))
    moves, partition, told = reporting(committed_index=7, current=without, deposed=True)
    await moves._report(partition, shrinking())
    assert [] == told


async def test_a_replica_that_is_just_being_added_is_not_reported_as_removed() -> None:
    """Its node was quick to say that it is made, and a command took it away before its entry is committed."""
    moves, partition, told = reporting(
        committed_index=7, current=ConfigurationRecord(((1, "a"), (2, "b")), ((3, "c"),))
    )
    await moves._report(partition, shrinking())
    assert [] == told


@pytest.mark.parametrize(
    ("meanwhile", "added"), [("nothing", ["c"]), ("no answer", []), ("it left", []), ("another term", [])]
)
async def test_a_replica_is_added_only_by_the_newest_catalog(meanwhile: str, added: list[str]) -> None:
    """Its addition was cut; or it has left since, and its node is about to delete what it acknowledges.
    In another term another leader may have removed it after the catalog answered.
    """
    proposed: list[ConfigurationRecord] = []

    async def refresh() -> None:
        if meanwhile == "no answer":
            raise Problem("no_leader")
        if meanwhile == "it left":
            show(replace(record, replicas=record.replicas[:2], newest_replica_id=3))
        if meanwhile == "another term":
            partition.replica.core.term = 3

    current = ConfigurationRecord(((1, "a"), (2, "b")))
    partition = SimpleNamespace(
        topic="t",
        number=0,
        leads=True,
        replica=SimpleNamespace(
            name="t/0",
            group=GROUP,
            replica_id=1,
            leading=True,
            configuration=current.configuration(),
            configuration_record=current,
            core=SimpleNamespace(
                term=1,
                is_caught_up=lambda replica_id: False,
                may_be_recovering=lambda replica_id: False,
            ),
        ),
    )
    record = replace(moving("dead"), replicas=[replica(1, "a"), replica(2, "b"), replica(3, "c")], leaving=[])
    view = View(node="a", unix_name=str)

    def show(record: PartitionRecord) -> None:
        catalog = CatalogState(version=5, partitions={"t/0": record})
        view.message = ViewMessage(cluster_id=b"", catalog=catalog, statuses={})

    show(record)
    shard: Any = SimpleNamespace(
        refresh_view=refresh,
        node="a",
        store_id=b"a" * 16,
        view=view,
        storage=SimpleNamespace(manifest=SimpleNamespace(unmade=[])),
        partitions={("t", 0): partition},
        by_group={GROUP: partition},
        lost=[],
        owns=lambda record: True,
        driver=SimpleNamespace(propose_configuration=lambda replica, step: proposed.append(step)),
    )
    work = WorkLists(shard)
    moves = ReplicaMover(shard, work)
    work.follow(None)
    assert moves.needed

    await moves.as_leader(moves.unsettled())
    assert added == [node for step in proposed for _, node in step.learners]


@pytest.mark.parametrize("taken", [True, False])
def test_a_leader_hands_over_before_its_own_removal_if_another_takes_over(taken: bool) -> None:
    """What it proposes after its removal it would not see committed; but it does not stay for that."""
    proposed: list[ConfigurationRecord] = []
    partition: Any = SimpleNamespace(
        replica=SimpleNamespace(
            name="t/0",
            replica_id=3,
            configuration_record=NOW,
            core=SimpleNamespace(
                is_caught_up=lambda replica_id: True,
                may_be_recovering=lambda replica_id: False,
            ),
        )
    )
    driver = SimpleNamespace(propose_configuration=lambda replica, step: proposed.append(step))
    shard: Any = SimpleNamespace(driver=driver)
    moves = ReplicaMover(shard, WorkLists(shard), give_away=lambda given: taken)

    assert moves._step(partition, shrinking(), newest=True) is not taken
    assert len(proposed) == (0 if taken else 1)


@pytest.mark.parametrize(("where", "needed"), [("c", False), ("a", True)])
def test_what_a_dead_node_would_have_to_delete_keeps_nobody_else_busy(where: str, needed: bool) -> None:
    """It stands in the catalog for as long as that node does not come back."""
    view = View(node="a", unix_name=str)
    record = replace(moving("dead"), leaving=[], removed=[replica(3, where)])
    view.message = ViewMessage(
        cluster_id=b"", catalog=CatalogState(version=5, partitions={"t/0": record}), statuses={}
    )
    storage = SimpleNamespace(manifest=SimpleNamespace(unmade=[]))
    shard: Any = SimpleNamespace(
        view=view,
        node="a",
        store_id=b"a" * 16,
        storage=storage,
        partitions={},
        by_group={},
        lost=[],
        owns=lambda record: True,
    )
    work = WorkLists(shard)
    moves = ReplicaMover(shard, work)
    work.follow(None)
    assert needed == moves.needed
