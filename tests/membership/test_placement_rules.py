"""What the catalog accepts of wanted placements: each command compares, and keeps its invariants."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from membership.catalog import Catalog, NotEnabled
from membership.catalog_rules import register_node
from membership.placement_rules import change_placement
from membership.records import CatalogState, LeavingReplica, Pin, ReplicaRecord, Tombstone
from membership.replica_rules import change_replicas
from membership.requests import (
    AddReplicas,
    AlterNode,
    AlterTopic,
    ChangePlacement,
    ChangeReplicas,
    PinPartition,
    PreferLeaders,
    RegisterNode,
    RemoveNode,
    RemoveReplica,
    ReplaceReplica,
    Result,
)
from tests.membership.nodes import GROUP, node, state_of


def do(state: CatalogState, change: Any) -> tuple[CatalogState, Result]:
    """Perform a change; nothing changed if the result says so."""
    after, result = change_placement(state, ChangePlacement(change))
    changed = result.outcome in ("updated", "deleted")
    assert changed == (after is not state) and after.version == state.version + changed
    return after, result


def small() -> CatalogState:
    """Return a catalog whose partition has one replica, on a, of three that are asked for."""
    state = state_of(*"abcd")
    record = state.partitions["t/0"]
    return replace(state, partitions={"t/0": replace(record, replicas=record.replicas[:1])})


def test_a_partition_gets_new_replicas_under_new_ids() -> None:
    after, result = do(small(), AddReplicas("t/0", GROUP, 7, ["b", "d"], "it has too few"))
    record = after.partitions["t/0"]
    assert result.outcome == "updated"
    assert [(r.replica_id, r.node, r.made) for r in record.replicas] == [
        (1, "a", True),
        (4, "b", False),
        (5, "d", False),
    ]
    assert (after.next_replica_id, record.newest_replica_id, record.why) == (6, 5, "it has too few")


@pytest.mark.parametrize(
    ("nodes", "version", "group"),
    [
        (["a"], 7, GROUP),  # holds one
        (["z"], 7, GROUP),  # is not known
        (["b", "b"], 7, GROUP),
        ([], 7, GROUP),
        (["b", "c", "d"], 7, GROUP),  # more than are asked for
        (["b"], 6, GROUP),
        (["b"], 7, b"h" * 16),
    ],
)
def test_replicas_are_not_added_where_they_do_not_belong(
    nodes: list[str], version: int, group: bytes
) -> None:
    assert do(small(), AddReplicas("t/0", group, version, nodes))[1].outcome in ("conflict", "absent")


def test_a_draining_node_gets_no_replica() -> None:
    state = small()
    state = replace(state, nodes=state.nodes | {"b": replace(node("b"), draining=True)})
    assert do(state, AddReplicas("t/0", GROUP, 7, ["b"]))[1].outcome == "conflict"
    moved = ReplaceReplica("t/0", GROUP, 7, 1, "moved", "b")
    assert change_replicas(state, ChangeReplicas(moved))[1].outcome == "conflict"
    pin = Pin(["b"], "operator", "test")
    assert do(state, PinPartition("t/0", 7, pin))[1].outcome == "invalid"


def test_a_node_whose_folder_is_an_older_copy_gets_no_replica() -> None:
    state = small()
    state = replace(state, nodes=state.nodes | {"b": replace(node("b"), rolled_back=True)})
    assert do(state, AddReplicas("t/0", GROUP, 7, ["b"]))[1].outcome == "conflict"


def test_a_replica_leaves_where_there_are_more_than_asked_for_and_its_id_stays_known() -> None:
    """The newest may be the one that leaves: a group's leader compares ids with it."""
    state = state_of(*"abc")
    assert do(state, RemoveReplica("t/0", GROUP, 7, 3))[1].outcome == "conflict"
    state, _ = do(state, AlterTopic("t", 5, 2))
    after, _ = do(state, RemoveReplica("t/0", GROUP, 7, 3, "two are asked for"))
    record = after.partitions["t/0"]
    assert [r.replica_id for r in record.replicas] == [1, 2]
    assert [(each.replica.replica_id, each.why) for each in record.leaving] == [(3, "moved")]
    assert (record.newest_replica_id, record.why) == (3, "two are asked for")
    assert do(state, RemoveReplica("t/0", GROUP, 7, 9))[1].outcome == "conflict"


def test_no_step_begins_beside_another_of_its_partition() -> None:
    state, _ = do(small(), AddReplicas("t/0", GROUP, 7, ["b"]))
    version = state.partitions["t/0"].version
    assert do(state, AddReplicas("t/0", GROUP, version, ["c"]))[1].outcome == "conflict"

    busy = small()
    leaving = replace(
        busy.partitions["t/0"], leaving=[LeavingReplica(ReplicaRecord(2, "b", b"b" * 16), "moved")]
    )
    busy = replace(busy, partitions={"t/0": leaving})
    assert do(busy, AddReplicas("t/0", GROUP, 7, ["c"]))[1].outcome == "conflict"
    creating = replace(small(), partitions={"t/0": replace(small().partitions["t/0"], state="creating")})
    assert do(creating, AddReplicas("t/0", GROUP, 7, ["c"]))[1].outcome == "conflict"


def test_a_preferred_leader_holds_a_replica_and_leaves_other_steps_valid() -> None:
    state = state_of(*"abcd")
    after, result = do(state, PreferLeaders({"t/0": "b", "gone/3": "a"}))
    assert result.outcome == "updated" and after.partitions["t/0"].preferred_leader == "b"
    assert after.partitions["t/0"].version == 7
    assert do(after, PreferLeaders({"t/0": "b"}))[1].outcome == "unchanged"
    assert do(after, PreferLeaders({"t/0": "d"}))[1].outcome == "unchanged"


def test_a_pin_names_known_nodes_an_owner_and_a_reason() -> None:
    state = state_of(*"abcd")
    pin = Pin(["a", "d"], "operator", "near the readers")
    after, result = do(state, PinPartition("t/0", 7, pin))
    record = after.partitions["t/0"]
    assert result.outcome == "updated" and record.pin == pin and record.version == after.version
    assert do(after, PinPartition("t/0", 7, None))[1].outcome == "conflict"  # two administrators
    unpinned, _ = do(after, PinPartition("t/0", record.version, None))
    assert unpinned.partitions["t/0"].pin is None
    for wrong in (
        replace(pin, nodes=["a", "z"]),
        replace(pin, nodes=[]),
        replace(pin, nodes=["a", "a"]),
        replace(pin, owner=""),
        replace(pin, reason="x" * 201),
    ):
        assert do(state, PinPartition("t/0", 7, wrong))[1].outcome == "invalid"


def test_a_topic_asks_for_another_number_of_replicas_but_not_below_min_replicas() -> None:
    state = state_of(*"abc")
    after, result = do(state, AlterTopic("t", 5, 2, {"min_replicas": 2}))
    assert result.topic is not None and (result.topic.replicas, result.topic.settings) == (
        2,
        {"min_replicas": 2},
    )
    assert do(after, AlterTopic("t", 5, 3))[1].outcome == "conflict"
    version = after.topics["t"].version
    assert do(after, AlterTopic("t", version, 1))[1].outcome == "invalid"
    assert do(after, AlterTopic("t", version, 0))[1].outcome == "invalid"
    assert do(after, AlterTopic("t", version, 2))[1].outcome == "unchanged"
    assert do(after, AlterTopic("u", version, 2))[1].outcome == "absent"


def test_a_command_about_a_node_outlives_its_next_registration() -> None:
    """The node announces what its settings say; what was commanded stays until it is taken back."""
    state = state_of(*"abc")
    after, result = do(state, AlterNode("a", 0, draining=True, set_weight=2.5, set_zone="x"))
    assert result.outcome == "updated"
    announced = replace(node("a"), http_port=99, weight=7.0, zone="y")
    after, _ = register_node(after, RegisterNode(announced))
    record = after.nodes["a"]
    assert (record.http_port, record.draining, record.effective_weight, record.effective_zone) == (
        99,
        True,
        2.5,
        "x",
    )
    assert do(after, AlterNode("a", 0, draining=False))[1].outcome == "conflict"  # two administrators
    back, _ = do(after, AlterNode("a", record.version, draining=False, set_weight=None, set_zone=None))
    assert (back.nodes["a"].effective_weight, back.nodes["a"].effective_zone) == (7.0, "y")
    assert do(after, AlterNode("a", record.version, set_weight=-1.0))[1].outcome == "invalid"
    assert do(after, AlterNode("a", record.version, set_weight=float("inf")))[1].outcome == "invalid"
    assert do(after, AlterNode("z", 0, draining=True))[1].outcome == "absent"


def test_a_node_is_removed_only_when_it_holds_nothing_and_its_store_never_comes_back() -> None:
    state = state_of(*"abcd")
    assert do(state, RemoveNode("d", 0))[1].outcome == "conflict"  # not draining
    state, _ = do(state, AlterNode("d", 0, draining=True))
    state, _ = do(state, AlterNode("c", 0, draining=True))
    assert do(state, RemoveNode("c", state.nodes["c"].version))[1].outcome == "conflict"  # holds a replica

    assert do(state, RemoveNode("d", 0))[1].outcome == "conflict"  # decided before it was drained
    record = state.partitions["t/0"]
    late = ReplicaRecord(9, "d", b"d" * 16)
    stone = Tombstone("u", 0, b"s" * 16, [late], 1, 3)
    state = replace(
        state,
        partitions={"t/0": replace(record, removed=[late])},
        tombstones={stone.group.hex(): stone},
    )
    gone, result = do(state, RemoveNode("d", state.nodes["d"].version))
    assert result.outcome == "deleted" and "d" not in gone.nodes
    assert not gone.partitions["t/0"].removed and not gone.tombstones  # nobody is left to report on these
    assert register_node(gone, RegisterNode(node("d")))[1].outcome == "removed"
    again, result = register_node(gone, RegisterNode(replace(node("d"), store_id=b"new" * 4)))
    assert result.outcome == "created" and again.nodes["d"].version == 0 and not again.nodes["d"].draining


def test_a_pinned_node_is_not_removed() -> None:
    state = state_of(*"abcd")
    record = state.partitions["t/0"]
    state = replace(state, partitions={"t/0": replace(record, pin=Pin(["a", "d"], "operator", "test"))})
    state, _ = do(state, AlterNode("d", 0, draining=True))
    assert do(state, RemoveNode("d", state.nodes["d"].version))[1].outcome == "conflict"


class OneNode:
    """A proposer whose group has one member."""

    catalog: Catalog
    index = 0

    async def propose(self, command: bytes) -> int:
        self.index += 1
        self.catalog.apply(self.index, command)
        return self.index


async def test_a_command_of_a_later_version_is_refused_until_it_is_enabled() -> None:
    group = OneNode()
    group.catalog = catalog = Catalog(group)
    await catalog.register_node(node("a"))
    with pytest.raises(NotEnabled):
        await catalog.change_placement(AlterNode("a", 0, draining=True))
    await catalog.enable(1)
    assert (await catalog.change_placement(AlterNode("a", 0, draining=True))).outcome == "updated"

    restored = Catalog(group)
    restored.restore(catalog.snapshot())
    assert restored.code_version == 1 and restored.state() == catalog.state()
