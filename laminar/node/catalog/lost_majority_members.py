"""The members of group 0 for `consensus.lost_majority`: those that must answer before it is released.

No catalog above group 0 has a record of them. They are all nodes that this controller knows, as each node is
a member.
"""

from __future__ import annotations

from collections.abc import Iterable

from laminar.node.catalog.local_replica import LocalReplica
from laminar.node.catalog.node_directory import NodeDirectory
from laminar.node.consensus.lost_majority import Members
from laminar.node.consensus.replica import Replica


class CatalogMembers:
    """The members as one controller knows them."""

    def __init__(self, *, replica: LocalReplica, directory: NodeDirectory) -> None:
        self._replica = replica
        self._directory = directory

    def waiting(self) -> Iterable[Replica]:
        """See `Roster`: not where it has forgotten that there are others."""
        group = self._replica.group
        return [] if group is None or self._replica.sits_out else [group.replica]

    async def refresh(self) -> bool:
        """See `Roster`."""
        return True

    def recorded(self, replica: Replica) -> Members | None:
        """See `Roster`."""
        return {
            record.catalog_replica: name
            for name, record in self._directory.known_nodes().items()
            if record.catalog_replica
        }

    def complete(self, members: Members) -> bool:
        """See `Roster`: whether every node is among them that this one remembers."""
        return self._directory.remembered_nodes() <= set(members.values())

    def unmade(self, replica: Replica, replica_id: int) -> bool:
        """See `Roster`."""
        return False

    def removed(self, replica: Replica, replica_id: int) -> bool:
        """See `Roster`: who left group 0 stays a member of it."""
        return False
