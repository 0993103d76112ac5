"""Finding records of a partition by what they hold, and what became of one: looking changes nothing.

`where` says which records are wanted, `examine` looks through batches, `scan` reads a partition for it, and
`pace` lets one scan of a shard read at a time.
"""
