"""The members of a shard's partitions that must answer before a group is released, by the catalog.

The release itself is `laminar.node.consensus.lost_majority`'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from laminar.http.api.problems import Problem
from laminar.node.consensus.lost_majority import Members
from laminar.node.consensus.replica import Replica
from laminar.node.partition.partition import Partition
from laminar.node.runtime.cluster_view import View
from membership.records import ReplicaRecord


class PartitionMembers:
    """The members as the shard with these partitions knows them.

    `refresh()` brings `view` up to what the catalog's leader confirms, and raises `Problem` where it can't.
    """

    def __init__(
        self, by_group: Mapping[bytes, Partition], *, view: View, refresh: Callable[[], Awaitable[object]]
    ) -> None:
        self._by_group = by_group
        self._view = view
        self._refresh = refresh

    def waiting(self) -> Iterable[Replica]:
        """Return the replicas here whose group may be released."""
        return [partition.replica for partition in self._by_group.values()]

    async def refresh(self) -> bool:
        """Bring the view up to what the catalog's leader confirms; return False if that fails."""
        try:
            await self._refresh()
        except Problem:
            return False
        return True

    def recorded(self, replica: Replica) -> Members | None:
        """Return the members by the catalog: those that have their place, and those that are to leave it."""
        known = self._records(replica)
        return None if known is None else {each.replica_id: each.node for each in known}

    def complete(self, members: Members) -> bool:
        """Return True: the catalog's record names every member of a partition."""
        return True

    def unmade(self, replica: Replica, replica_id: int) -> bool:
        """Return whether the catalog has no record that this replica was made."""
        known = self._records(replica) or []
        return any(each.replica_id == replica_id and not each.made for each in known)

    def removed(self, replica: Replica, replica_id: int) -> bool:
        """Return whether the catalog knows that the removal of this replica is committed.

        Replica ids only grow: one above all that are on record is newer than the record.
        """
        known = {each.replica_id for each in self._records(replica) or []}
        return bool(known) and replica_id not in known and replica_id < max(known)

    def _records(self, replica: Replica) -> list[ReplicaRecord] | None:
        partition = self._by_group.get(replica.group)
        if partition is None:
            return None
        record = self._view.partition(partition.topic, partition.number)
        if record is None or record.group != replica.group:
            return None
        return [*record.replicas, *(each.replica for each in record.leaving)]
