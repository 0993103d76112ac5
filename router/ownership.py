"""Ownership: the shard of a node that owns a partition, and the shard whose socket a connection reaches.

Unlike `placement`, this is also computed in the kernel: `owner_shard` in the XDP program
for datagrams that carry a partition hash, `shard_of_source_port` in the classic-BPF program on the shared TCP
port. So it uses integers only, no weights and no floats, and the tests check this side and the C side against
the same vectors.
"""

from __future__ import annotations

from struct import Struct

import mmh3

_HASH_AND_SHARD = Struct("<II")


def owner_shard(partition_hash: int, shards: int) -> int:
    """Return the shard (0..shards-1) that owns the partition with this 32-bit hash.

    Rendezvous with equal weights: each shard draws the 32-bit mmh3 (x86, seed 0, unsigned) of 8 bytes, the
    partition hash and the shard number as little-endian u32; the highest draw wins, a tie goes to the lower
    shard. When a node grows from n shards to n + 1, a partition stays or goes to the new one.

    Cost: one hash of 8 bytes for each shard (about 0.2 us); frequent callers should cache the result.
    """
    assert 0 <= partition_hash < 1 << 32, partition_hash
    assert shards > 0, shards
    owner, highest = 0, -1
    for shard in range(shards):
        draw = mmh3.hash(_HASH_AND_SHARD.pack(partition_hash, shard), 0, signed=False)
        if draw > highest:  # strictly: the lower shard keeps a tie
            owner, highest = shard, draw
    return owner


def shard_of_source_port(port: int, shards: int) -> int:
    """Return the shard whose socket gets a connection to the shared port from this TCP source port.

    The port is halved first because Linux's `connect` gives out even ports only: with ``port % shards`` and
    an even number of shards, every ordinary client would reach an even shard.
    """
    assert 0 <= port < 1 << 16, port
    assert shards > 0, shards
    return (port >> 1) % shards
