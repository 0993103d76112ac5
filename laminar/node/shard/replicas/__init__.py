"""The replicas of one shard: how they are created, opened, moved and removed, and who leads them.

Begin with `reconcile`, which brings them to what the catalog says; `context` is the interface of the shard.
"""
