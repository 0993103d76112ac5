"""Routes of readers that share their position: cursors and consumer groups."""
