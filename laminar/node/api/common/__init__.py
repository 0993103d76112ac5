"""Helpers for all routes: the shard's services, calls to leaders and other shards, JSON bodies, queries."""
