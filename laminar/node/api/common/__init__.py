"""Modules for every kind of route: the shard's services, finding leaders, other shards, JSON and queries."""
