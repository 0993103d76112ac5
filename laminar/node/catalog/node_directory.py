"""A controller's knowledge of the cluster's nodes, from its copy of the catalog, gossip, and its disk.

It decides nothing. Its copy of the catalog may be old, gossip may be late, and a remembered address may be
wrong. So a caller may use an answer only where a wrong one does no harm (docs/consensus.md#the-catalog).
"""

from __future__ import annotations

from laminar.node.catalog.controller_addresses import AddressBook, KnownFolder
from laminar.node.catalog.group import CatalogGroup
from laminar.node.catalog.local_replica import LocalReplica
from laminar.node.placement.wanted import belonging_weights
from laminar.node.transport.transport import Address
from membership.boot_history import BootRecord
from membership.gossip.gossip import Gossip
from membership.records import (
    CatalogState,
    NodeRecord,
)


class NodeDirectory:
    """Answers questions about the cluster's nodes from what the controller on `node` knows.

    `replica` has this node's copy of the catalog; `addresses` are the sources of other controllers'
    addresses.
    """

    def __init__(self, node: str, *, replica: LocalReplica, addresses: AddressBook) -> None:
        self.node = node
        self._replica = replica
        self._addresses = addresses
        self._gossip: Gossip | None = None
        self._cluster = ""

    @property
    def group(self) -> CatalogGroup | None:
        """This node's part of group 0; None until it is opened."""
        return self._replica.group

    def follow(self, gossip: Gossip, *, cluster_id: bytes) -> None:
        """Use `gossip` from now on, for nodes of this cluster only."""
        self._gossip = gossip
        self._cluster = cluster_id.hex()

    def gossip_changed(self) -> None:
        """Take over the addresses that gossip announces now."""
        assert self._gossip is not None
        self._addresses.announce(self._gossip.members(), cluster=self._cluster)

    def state(self) -> CatalogState:
        """Return this node's copy of the catalog; while that is empty, the one got at joining."""
        state = self.group.catalog.state() if self.group is not None else CatalogState()
        return state if state.version > 0 else self._addresses.joined

    def known_nodes(self) -> dict[str, NodeRecord]:
        """Return, by name, every node in our copy of the catalog, or in the copy that this node joined with.

        While a new node replays the catalog, its copy has only the cluster's first nodes, which may all be
        gone by now.
        """
        return {**self._addresses.joined.nodes, **self.state().nodes}

    def remembered_nodes(self) -> set[str]:
        """Return the nodes whose addresses are kept on disk beside the catalog."""
        return set(self._addresses.remembered)

    def address(self, node: str) -> Address | None:
        """Return where a node's controller listens for its peers; None if that is not known."""
        return self._addresses.address(node, self.state())

    def boot(self, node: str) -> BootRecord | None:
        """Return the newest boot record of a node's folder that the catalog has named here; None if none."""
        folder = self.folder(node)
        return None if folder is None else folder.boot

    def folder(self, node: str) -> KnownFolder | None:
        """Return the store id and the newest boot record of a node's present folder; None if unknown."""
        return self._addresses.folder(node, self.state())

    def statuses(self) -> dict[str, str]:
        """Return, by node, gossip's status (`alive`, `suspect`, ...); that of this node is `alive`."""
        statuses = {self.node: "alive"}
        if self._gossip is not None:
            for name, member in self._gossip.members().items():
                if member.info.get("cluster") == self._cluster:
                    statuses.setdefault(name, member.status)
        return statuses

    def placement_weights(self) -> dict[str, float]:
        """Return, by node, the weights for placing new replicas.

        It has only nodes that may hold replicas (`laminar.node.placement.wanted`: registered and not
        draining) and that gossip sees as alive or suspect.
        """
        statuses = self.statuses()
        return {
            name: weight
            for name, weight in belonging_weights(self.state()).items()
            if statuses.get(name, "unknown") in ("alive", "suspect")
        }

    def nodes_without_status(self) -> int:
        """Return how many nodes gossip has not heard of since this controller started.

        Only nodes that may hold replicas are counted.
        """
        statuses = self.statuses()
        return sum(name not in statuses for name in belonging_weights(self.state()))
