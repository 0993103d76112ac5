"""How replicas go from node to node in the catalog: each step compares, and none comes back."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from membership.catalog_rules import delete_topic
from membership.records import (
    CatalogState,
)
from membership.replica_rules import MAX_REMOVED, change_replicas
from membership.requests import (
    ChangeReplicas,
    DeleteTopic,
    ReplaceReplica,
    ReportRemovals,
    ReportReplicas,
    Result,
)
from tests.membership.nodes import GROUP, node, state_of


def step(**changes: Any) -> ReplaceReplica:
    return replace(ReplaceReplica("t/0", GROUP, 7, 3, "dead", "d"), **changes)


def do(state: CatalogState, change: Any) -> tuple[CatalogState, Result]:
    after, result = change_replicas(state, ChangeReplicas(change))
    assert (after is state) == (result.outcome in ("unchanged", "absent", "conflict"))
    return after, result


def test_what_never_comes_back_is_remembered_within_bounds() -> None:
    """The last ones, whose ids are the highest: none is given again."""
    state = state_of(*"abc")
    for number in range(2 * MAX_REMOVED):
        name = f"d{number}"
        state = replace(state, nodes=state.nodes | {name: node(name)})
        record = state.partitions["t/0"]
        gone = record.replicas[-1].replica_id
        state, result = do(state, step(replica_id=gone, node=name, version=record.version))
        assert "updated" == result.outcome, result
        state, _ = do(state, ReportRemovals("t/0", GROUP, [gone]))

    removed = [each.replica_id for each in state.partitions["t/0"].removed]
    last = state.next_replica_id - 1
    assert list(range(last - MAX_REMOVED, last)) == removed


def test_a_replica_goes_by_way_of_leaving_and_removed() -> None:
    """Its place is given away at once, its data only after the group and its node have both spoken."""
    state, result = do(state_of(*"abcd"), step())
    assert result.outcome == "updated"
    record = state.partitions["t/0"]
    assert [(r.replica_id, r.node, r.made) for r in record.replicas] == [
        (1, "a", True),
        (2, "b", True),
        (4, "d", False),
    ]
    assert [each.replica.replica_id for each in record.leaving] == [3]

    # The removal is committed.
    state, _ = do(state, ReportRemovals("t/0", GROUP, [3]))
    record = state.partitions["t/0"]
    assert ([], [3]) == ([*record.leaving], [r.replica_id for r in record.removed])

    state, _ = do(state, ReportReplicas("d", b"d" * 16, made=[4]))
    state, _ = do(state, ReportReplicas("c", b"c" * 16, deleted=[3]))
    record = state.partitions["t/0"]
    assert all(r.made for r in record.replicas) and not record.removed


def test_a_dead_replica_is_replaced_beside_one_that_moves() -> None:
    """Once, and on no node that still holds one; nothing moves beside another."""
    state, _ = do(state_of(*"abcdef"), step(why="moved"))
    version = state.partitions["t/0"].version
    made, _ = do(state, ReportReplicas("d", b"d" * 16, made=[4]))
    now = made.partitions["t/0"].version
    assert "conflict" == do(made, step(replica_id=2, why="moved", node="e", version=now))[1].outcome
    assert "conflict" == do(state, step(replica_id=4, node="c", version=version))[1].outcome
    state, result = do(state, step(replica_id=4, node="e", version=version))
    record = state.partitions["t/0"]
    assert "updated" == result.outcome and ["a", "b", "e"] == [each.node for each in record.replicas]
    assert [(3, "moved"), (4, "dead")] == [(each.replica.replica_id, each.why) for each in record.leaving]
    assert "conflict" == do(state, step(replica_id=5, node="f", version=record.version))[1].outcome
    state, _ = do(state, ReportRemovals("t/0", GROUP, [4]))
    version = state.partitions["t/0"].version
    assert "updated" == do(state, step(replica_id=5, node="f", version=version))[1].outcome


def test_a_step_decided_on_an_older_placement_changes_nothing() -> None:
    """The version of the partition, its group and the replica must be what was seen."""
    state = state_of(*"abcd")
    assert do(state, step(version=6))[1].outcome == "conflict"
    assert do(state, step(group=b"h" * 16))[1].outcome == "absent"
    assert do(state, step(replica_id=9))[1].outcome == "conflict"
    assert do(state, step(node="b"))[1].outcome == "conflict"
    assert do(state, step(node="z"))[1].outcome == "conflict"


def test_one_replica_of_a_partition_moves_at_a_time() -> None:
    """Until the old one has left and the new one is made; a new one that is never made may be replaced."""
    state, _ = do(state_of(*"abcde"), step())
    version = state.partitions["t/0"].version
    assert do(state, step(version=version, replica_id=2, node="e"))[1].outcome == "conflict"

    state, _ = do(state, ReportRemovals("t/0", GROUP, [3]))
    version = state.partitions["t/0"].version
    assert do(state, step(version=version, replica_id=2, node="e"))[1].outcome == "conflict"
    assert do(state, step(version=version, replica_id=4, node="e"))[1].outcome == "updated"


def test_a_report_that_comes_late_or_twice_takes_no_other_replica_away() -> None:
    """It names who left, and not who was left: a replica that joined since is not in what it says."""
    state, _ = do(state_of(*"abcd"), step())
    assert do(state, ReportRemovals("t/0", GROUP, [2]))[1].outcome == "unchanged"
    assert do(state, ReportRemovals("t/0", b"h" * 16, [3]))[1].outcome == "absent"
    state, _ = do(state, ReportRemovals("t/0", GROUP, [3]))
    state, _ = do(state, ReportReplicas("d", b"d" * 16, made=[4]))
    version = state.partitions["t/0"].version
    state, _ = do(state, step(version=version, replica_id=4, node="c"))

    assert do(state, ReportRemovals("t/0", GROUP, [3]))[1].outcome == "unchanged"
    assert [each.replica.replica_id for each in state.partitions["t/0"].leaving] == [4]


def test_only_its_own_store_can_say_that_a_replica_is_made_or_deleted() -> None:
    """Another data directory under the same name holds nothing of it."""
    state, _ = do(state_of(*"abcd"), step())
    assert do(state, ReportReplicas("d", b"x" * 16, made=[4]))[1].outcome == "unchanged"
    state, _ = do(state, ReportRemovals("t/0", GROUP, [3]))
    assert do(state, ReportReplicas("c", b"x" * 16, deleted=[3]))[1].outcome == "unchanged"


def test_pitfall_38_a_topic_deleted_meanwhile_leaves_its_stone_for_every_replica_on_its_way() -> None:
    """Also for those that leave and those that were removed: their nodes still hold data of it."""
    state, _ = do(state_of(*"abcd"), step())
    deleted, _ = delete_topic(state, DeleteTopic("t", 1))
    assert [r.replica_id for r in deleted.tombstones[GROUP.hex()].replicas] == [1, 2, 4, 3]

    state, _ = do(state, ReportRemovals("t/0", GROUP, [3]))
    deleted, _ = delete_topic(state, DeleteTopic("t", 1))
    assert [r.replica_id for r in deleted.tombstones[GROUP.hex()].replicas] == [1, 2, 4, 3]
