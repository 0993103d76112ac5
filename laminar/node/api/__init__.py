"""The HTTP API of a shard: what each route does, and which shard does it if this one can't."""
