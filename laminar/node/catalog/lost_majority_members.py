"""The members of group 0 for `consensus.lost_majority`: those that must answer before it is released.

The catalog can't list them: it is what group 0 holds. So they are all nodes that this controller knows, as
every node is a member.
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
        """Return group 0's replica if it may be released: none before it is open, or if it forgot others."""
        group = self._replica.group
        return [] if group is None or self._replica.campaign_inhibited else [group.replica]

    async def refresh(self) -> bool:
        """Return True: there is no catalog above group 0 to ask."""
        return True

    def recorded(self, replica: Replica) -> Members | None:
        """Return all nodes that this controller knows, by replica id in group 0."""
        return {
            record.catalog_replica: name
            for name, record in self._directory.known_nodes().items()
            if record.catalog_replica
        }

    def complete(self, members: Members) -> bool:
        """Return whether `members` has every node whose address this node keeps on disk."""
        return self._directory.remembered_nodes() <= set(members.values())

    def unmade(self, replica: Replica, replica_id: int) -> bool:
        """Return False: group 0 has no record of which replicas were made."""
        return False

    def removed(self, replica: Replica, replica_id: int) -> bool:
        """Return False: a voter that is removed from group 0 is added again as a learner (`voters`)."""
        return False
