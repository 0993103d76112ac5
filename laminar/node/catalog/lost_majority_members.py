"""The members of group 0 for `consensus.lost_majority`: those that must answer before it is released.

Of other groups the catalog lists the members; of group 0, which holds the catalog, it can't. So the members
are all nodes that this controller knows, because every node is a member of group 0.
"""

from __future__ import annotations

from collections.abc import Iterable

from laminar.node.catalog.local_replica import LocalReplica
from laminar.node.catalog.node_directory import NodeDirectory
from laminar.node.consensus.lost_majority import Members
from laminar.node.consensus.replica import Replica


class CatalogMembers:
    """Answers which replicas group 0 has, as one controller knows them, while its majority is lost."""

    def __init__(self, *, replica: LocalReplica, directory: NodeDirectory) -> None:
        self._replica = replica
        self._directory = directory

    def waiting(self) -> Iterable[Replica]:
        """Return group 0's replica if it may be released; nothing if it is not open or may not campaign."""
        group = self._replica.group
        return [] if group is None or self._replica.campaign_inhibited else [group.replica]

    async def refresh(self) -> bool:
        """Return True: there is no catalog above group 0 to ask."""
        return True

    def recorded(self, replica: Replica) -> Members | None:
        """Return the names of all nodes that this controller knows, by their replica ids in group 0."""
        return {
            record.catalog_replica: name
            for name, record in self._directory.known_nodes().items()
            if record.catalog_replica
        }

    def complete(self, members: Members) -> bool:
        """Return whether `members` names every node whose address is remembered on disk here."""
        return self._directory.remembered_nodes() <= set(members.values())

    def unmade(self, replica: Replica, replica_id: int) -> bool:
        """Return False: nothing records which replicas of group 0 were created, so each may have been."""
        return False

    def removed(self, replica: Replica, replica_id: int) -> bool:
        """Return False: a voter that is removed from group 0 is added again as a learner (`voters`)."""
        return False
