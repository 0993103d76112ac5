"""Formats and computations that client and node share, beside HTTP.

`key_route`: the partition of a key. `datagram`: the bytes of an append by datagram and of its answer.
"""
