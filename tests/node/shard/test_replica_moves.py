"""Which step a group takes next, and which replicas get a new place: decided from records alone."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
from msgspec.structs import replace

from laminar.node.catalog.service import CatalogAnswer, ConfirmRequest, ReplicaRequest
from laminar.node.consensus.raft_wire import ConfigurationRecord
from laminar.node.runtime.cluster_view import View, ViewMessage
from laminar.node.shard.replica_moves import ReplicaMover, next_step
from membership.records import (
    CatalogState,
    LeavingReplica,
    PartitionRecord,
    ReplicaRecord,
)
from membership.requests import (
    ReportConfiguration,
)
from raft.configuration import check_step
from tests.membership.nodes import GROUP


def replica(number: int, name: str, *, made: bool = True) -> ReplicaRecord:
    return ReplicaRecord(number, name, name.encode() * 16, made=made)


def steps(
    record: PartitionRecord, current: ConfigurationRecord, *, silent: Collection[str] = ()
) -> list[str]:
    """All steps to the end, as text; each must be one that Raft allows, and most of its voters answer."""

    def majority_active(wanted: ConfigurationRecord) -> bool:
        answering = [name for _, name in wanted.voters if name not in silent]
        return 2 * len(answering) > len(wanted.voters)

    taken: list[str] = []
    while (step := next_step(record, current, lambda replica_id: True, majority_active)) is not None:
        check_step(current.configuration(), step.configuration())
        assert majority_active(step), step
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
    assert steps(moving("dead"), NOW, silent="b") == [
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


def test_nobody_votes_whose_node_has_not_said_that_it_is_made() -> None:
    """Until then its manifest would take an emptied log for a new one."""
    assert steps(moving("dead", made=False), NOW)[-1] == "['a', 'b'] ['d']"
    assert (
        next_step(
            moving("dead"),
            ConfigurationRecord(((1, "a"), (2, "b")), ((4, "d"),)),
            lambda replica_id: False,
            lambda wanted: True,
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


async def test_a_removal_is_told_when_it_is_committed() -> None:
    """What is told lets the replica be deleted: an entry that is cut again must not do that."""
    told: list[Any] = []

    async def ask(request: ReplicaRequest) -> CatalogAnswer:
        told.append(request.change)
        return CatalogAnswer()

    def partition(committed_index: int) -> Any:
        history = [(2, NOW), (7, ConfigurationRecord(((1, "a"), (2, "b"))))]
        return SimpleNamespace(
            leads=True,
            committed_index=committed_index,
            state=SimpleNamespace(
                configurations_up_to=lambda index: [each for each in history if each[0] <= index]
            ),
        )

    moves = ReplicaMover(cast(Any, SimpleNamespace(ask_catalog=ask)))
    await moves._report(partition(6), moving("dead"))
    assert [] == told
    await moves._report(partition(7), moving("dead"))
    assert [ReportConfiguration("t/0", GROUP, 7, [1, 2])] == told


@pytest.mark.parametrize(("newest", "added"), [(5, ["c"]), (6, [])])
async def test_who_was_a_member_once_is_added_again_only_by_the_newest_catalog(
    newest: int, added: list[str]
) -> None:
    """Its addition was cut; or it has left since, and its node is about to delete what it acknowledges."""
    proposed: list[ConfigurationRecord] = []

    async def ask(request: ConfirmRequest) -> CatalogAnswer:
        return CatalogAnswer(version=newest)

    current = ConfigurationRecord(((1, "a"), (2, "b")))
    partition = SimpleNamespace(
        topic="t",
        number=0,
        leads=True,
        replica=SimpleNamespace(
            name="t/0",
            group=GROUP,
            leading=True,
            configuration=current.configuration(),
            configuration_record=current,
            core=SimpleNamespace(progress={}),
        ),
    )
    record = replace(moving("dead"), replicas=[replica(1, "a"), replica(2, "b"), replica(3, "c")], leaving=[])
    view = View(node="a", unix_name=str)
    view.message = ViewMessage(
        cluster_id=b"", catalog=CatalogState(version=5, partitions={"t/0": record}), statuses={}
    )
    shard = SimpleNamespace(
        ask_catalog=ask,
        node="a",
        store_id=b"a" * 16,
        view=view,
        storage=SimpleNamespace(manifest=SimpleNamespace(entries=[])),
        partitions={("t", 0): partition},
        lost=[],
        owns=lambda record: True,
        driver=SimpleNamespace(propose_configuration=lambda replica, step: proposed.append(step)),
    )
    moves = ReplicaMover(cast(Any, shard))
    assert moves.needed

    await moves.as_leader()
    assert added == [node for step in proposed for _, node in step.learners]


@pytest.mark.parametrize(("where", "needed"), [("c", False), ("a", True)])
def test_what_a_dead_node_would_have_to_delete_keeps_nobody_else_busy(where: str, needed: bool) -> None:
    """It stands in the catalog for as long as that node does not come back."""
    view = View(node="a", unix_name=str)
    record = replace(moving("dead"), leaving=[], removed=[replica(3, where)])
    view.message = ViewMessage(
        cluster_id=b"", catalog=CatalogState(version=5, partitions={"t/0": record}), statuses={}
    )
    storage = SimpleNamespace(manifest=SimpleNamespace(entries=[]))
    shard = SimpleNamespace(
        view=view,
        node="a",
        store_id=b"a" * 16,
        storage=storage,
        partitions={},
        lost=[],
        owns=lambda record: True,
    )
    assert needed == ReplicaMover(cast(Any, shard)).needed
