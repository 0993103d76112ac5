"""What every kind of route needs: the shard's services, leaders and other shards, bodies and queries."""
