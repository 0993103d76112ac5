"""The authentication of gossip datagrams: that each is of this cluster, fresh, and for this node."""
