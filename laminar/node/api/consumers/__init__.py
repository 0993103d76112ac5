"""Routes of consumers whose positions the cluster stores: cursors and consumer groups."""
