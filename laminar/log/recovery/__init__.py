"""Recovery: a start restores a storage from its newest checkpoint and its journal.

Begin with `store`, for one store directory; `node` recovers all of a node and assigns logs to shards.
"""
