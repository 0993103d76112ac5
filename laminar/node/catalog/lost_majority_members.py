"""Who must answer before a group is released (`consensus.lost_majority`): a partition's replicas, and group
0's.

Of a partition, the catalog's leader knows. Of group 0 nobody above it does: there it is every node that any
controller knows of, as each is a member.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from laminar.http.api.problems import Problem
from laminar.node.consensus.lost_majority import Members
from laminar.node.consensus.replica import Replica
from membership.records import ReplicaRecord

if TYPE_CHECKING:
    from laminar.node.catalog.controller import Controller
    from laminar.node.shard.shard import Shard


class PartitionMembers:
    """Of the partitions of one shard."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def waiting(self) -> Iterable[Replica]:
        """See `Roster`."""
        return [partition.replica for partition in self._shard.partitions.values()]

    async def refresh(self) -> bool:
        """See `Roster`."""
        try:
            await self._shard.refresh_view()
        except Problem:
            return False
        return True

    def recorded(self, replica: Replica) -> Members | None:
        """See `Roster`: those that have their place, and those that are to leave it."""
        known = self._records(replica)
        return None if known is None else {each.replica_id: each.node for each in known}

    def complete(self, members: Members) -> bool:
        """See `Roster`."""
        return True

    def unmade(self, replica: Replica, replica_id: int) -> bool:
        """See `Roster`."""
        known = self._records(replica) or []
        return any(each.replica_id == replica_id and not each.made for each in known)

    def removed(self, replica: Replica, replica_id: int) -> bool:
        """See `Roster`. Replica ids only grow: one above all that are on record is newer than the record."""
        known = {each.replica_id for each in self._records(replica) or []}
        return bool(known) and replica_id not in known and replica_id < max(known)

    def _records(self, replica: Replica) -> list[ReplicaRecord] | None:
        partition = self._shard.by_group.get(replica.group)
        if partition is None:
            return None
        record = self._shard.view.partition(partition.topic, partition.number)
        if record is None or record.group != replica.group:
            return None
        return [*record.replicas, *(each.replica for each in record.leaving)]


class CatalogMembers:
    """Of group 0, as one controller knows it."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def waiting(self) -> Iterable[Replica]:
        """See `Roster`: not where it has forgotten that there are others."""
        group = self._controller.group
        return [] if group is None or self._controller.forgot_others else [group.replica]

    async def refresh(self) -> bool:
        """See `Roster`."""
        return True

    def recorded(self, replica: Replica) -> Members | None:
        """See `Roster`."""
        return {
            record.catalog_replica: name
            for name, record in self._controller.known_nodes().items()
            if record.catalog_replica
        }

    def complete(self, members: Members) -> bool:
        """See `Roster`: whether every node is among them that this one remembers."""
        return self._controller.remembered_nodes() <= set(members.values())

    def unmade(self, replica: Replica, replica_id: int) -> bool:
        """See `Roster`."""
        return False

    def removed(self, replica: Replica, replica_id: int) -> bool:
        """See `Roster`: who left group 0 stays a member of it."""
        return False
