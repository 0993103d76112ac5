"""Routes of consumers whose positions the cluster keeps: cursors and consumer groups."""
