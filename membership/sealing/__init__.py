"""What shows that a gossip datagram is of this cluster, of this moment, and for this node."""
