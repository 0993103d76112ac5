"""Commands for operators: nodes that come and go, where partitions are, changes under way, a check of all."""
