"""The HTTP API of a shard: the handlers of its routes, and the forwarding of requests to other shards."""
