"""Routes of channels: how a channel is set, and where it stands in the partitions of its topic."""
