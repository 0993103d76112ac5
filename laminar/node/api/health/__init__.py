"""Health of the cluster: what each shard sees, and one answer for all."""
