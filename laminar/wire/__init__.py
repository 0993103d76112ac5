"""Formats and computations that client and node share, apart from HTTP.

`key_route` has the partition of a key, `datagram` the bytes of an append by datagram and of its answer.
"""
