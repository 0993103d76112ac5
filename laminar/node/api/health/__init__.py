"""Health of the cluster: each shard's report of problems, and one answer for all."""
