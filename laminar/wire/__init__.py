"""What client and node must compute alike, beside HTTP.

`key_route`: the partition of a key. `datagram`: the bytes of an append by datagram and of its answer.
"""
