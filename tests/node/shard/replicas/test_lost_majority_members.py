"""Which replicas must answer before a group is released, by the shard's view of the catalog."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from laminar.node.runtime.cluster_view import View, ViewMessage
from laminar.node.shard.replicas.lost_majority_members import PartitionMembers
from membership.records import CatalogState, PartitionRecord, ReplicaRecord

GROUP = b"g" * 16


def members_of(record: PartitionRecord) -> PartitionMembers:
    view = View(node="a", unix_name=str)
    view.message = ViewMessage(
        cluster_id=b"", catalog=CatalogState(version=5, partitions={"t/0": record}), statuses={}
    )
    by_group: Any = {GROUP: SimpleNamespace(topic="t", number=0)}

    async def refresh() -> None:
        return None

    return PartitionMembers(by_group, leaderless=by_group.values, view=view, refresh=refresh)


def test_the_newest_replica_is_not_asked_once_it_has_left() -> None:
    """Its id is above all that stay. It may be deleted: whoever waited for it would wait for ever."""
    staying = [ReplicaRecord(n, name, name.encode() * 16, made=True) for n, name in ((1, "a"), (2, "b"))]
    members = members_of(PartitionRecord("t", 0, GROUP, "live", staying, 1, newest_replica_id=3))
    replica = cast(Any, SimpleNamespace(group=GROUP))

    assert members.removed(replica, 3)
    assert not members.removed(replica, 4), "it is of a later placement than this view"
    assert not members.removed(replica, 2)
