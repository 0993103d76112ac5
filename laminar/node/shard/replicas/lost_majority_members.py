"""The members of a shard's groups in the catalog, all of which must answer before a group is released.

The release itself, and what it is for, is in `laminar.node.consensus.lost_majority`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping

from laminar.http.api.problems import Problem
from laminar.node.consensus.lost_majority import Members
from laminar.node.consensus.replica import Replica
from laminar.node.partition.partition import Partition
from laminar.node.runtime.cluster_view import View
from membership.records import PartitionRecord, ReplicaRecord


class PartitionMembers:
    """The members of the groups in `by_group`, by the shard's view of the catalog.

    `leaderless()` returns the partitions that may have a recovering replica and no leader. `refresh()` waits
    until `view` is as new as the catalog's leader confirms, and raises `Problem` if that fails.
    """

    def __init__(
        self,
        by_group: Mapping[bytes, Partition],
        *,
        leaderless: Callable[[], Iterable[Partition]],
        view: View,
        refresh: Callable[[], Awaitable[object]],
    ) -> None:
        self._by_group = by_group
        self._leaderless = leaderless
        self._view = view
        self._refresh = refresh

    def waiting(self) -> Iterable[Replica]:
        """Return the recovering replicas of this shard whose groups may be released."""
        return [partition.replica for partition in self._leaderless()]

    async def refresh(self) -> bool:
        """Wait until the view is as new as the catalog's leader confirms; return False if that fails."""
        try:
            await self._refresh()
        except Problem:
            return False
        return True

    def recorded(self, replica: Replica) -> Members | None:
        """Return the nodes of the group's placed and leaving replicas in the view, by replica id.

        Return None if the view has no record of the group.
        """
        known = self._records(replica)
        return None if known is None else {each.replica_id: each.node for each in known}

    def complete(self, members: Members) -> bool:
        """Return whether `members` are all members of the group: always True for those from the catalog."""
        return True

    def unmade(self, replica: Replica, replica_id: int) -> bool:
        """Return whether the catalog lists replica `replica_id`, but not yet as created (`made`)."""
        known = self._records(replica) or []
        return any(each.replica_id == replica_id and not each.made for each in known)

    def removed(self, replica: Replica, replica_id: int) -> bool:
        """Return whether the catalog no longer lists `replica_id`, so that its removal is committed.

        Replica ids only grow: an id above all that the partition had is newer than the view, and gives False.
        """
        record = self._record(replica)
        if record is None:
            return False
        known = {each.replica_id for each in _listed(record)}
        return replica_id not in known and replica_id <= record.highest_replica_id

    def _records(self, replica: Replica) -> list[ReplicaRecord] | None:
        record = self._record(replica)
        return None if record is None else _listed(record)

    def _record(self, replica: Replica) -> PartitionRecord | None:
        partition = self._by_group.get(replica.group)
        if partition is None:
            return None
        record = self._view.partition(partition.topic, partition.number)
        return record if record is not None and record.group == replica.group else None


def _listed(record: PartitionRecord) -> list[ReplicaRecord]:
    """Return the replicas of a partition that are placed, or are to leave."""
    return [*record.replicas, *(each.replica for each in record.leaving)]
